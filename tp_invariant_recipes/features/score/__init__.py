"""tpi score: log-probabilities of sequences, and their comparison with an engine's."""
