"""tpi verify: runs of a sweep of settings, judged."""
