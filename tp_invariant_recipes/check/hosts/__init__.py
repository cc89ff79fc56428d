"""What a machine, a job or a file lacks for a run."""
