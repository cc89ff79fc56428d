"""tpi verify and tpi sweep: runs of a matrix of settings, judged."""
