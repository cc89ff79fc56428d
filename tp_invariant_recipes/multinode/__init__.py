"""One run on the nodes of an allocation: srun, rendezvous, heartbeat, and what each node does."""
