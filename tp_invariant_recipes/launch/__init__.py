"""Start runs and watch them: run directory, preflight, local ranks, progress, resume."""
