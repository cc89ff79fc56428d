"""One run on one machine: plan, preflight, ranks, progress, resume."""
