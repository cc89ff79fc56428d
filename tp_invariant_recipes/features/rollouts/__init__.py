# SPDX-License-Identifier: Apache-2.0
"""Rollouts: sequences sampled with the trainer's own bits, `tpi generate` and an engine for RL loops."""
