# SPDX-License-Identifier: Apache-2.0
"""Rollouts in other people's RL loops (docs/rl.md). Each module needs the package that it adapts; tpi needs neither."""
