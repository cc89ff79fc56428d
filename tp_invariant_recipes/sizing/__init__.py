"""How much memory a run needs, part by part."""
