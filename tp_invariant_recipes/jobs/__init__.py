"""Jobs on SLURM, seen from a login node: submit, list, follow, wait, cancel."""
