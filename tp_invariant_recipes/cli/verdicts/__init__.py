"""Commands that judge: their exit status 1 means that runs, tensors or scores differ."""
