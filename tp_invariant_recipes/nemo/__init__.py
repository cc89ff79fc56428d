"""Tasks of NeMo-Run with invariant numerics and a ledger: the plugin that changes a task, and what then runs in it."""
