"""What the invariant numerics cover: one row a limit, fields and values that are known."""
