"""What scores and rollouts share: the model of a source, its ranks, and files that grow."""
