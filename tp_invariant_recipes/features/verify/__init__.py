"""tpi verify: runs of a matrix of settings, judged."""
