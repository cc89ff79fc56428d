"""tpi bench: time and memory of a step, against stock."""
