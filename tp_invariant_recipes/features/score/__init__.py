# SPDX-License-Identifier: Apache-2.0
"""tpi score: log-probabilities of sequences, and their comparison with an engine's."""
