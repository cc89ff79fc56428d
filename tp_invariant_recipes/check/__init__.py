# SPDX-License-Identifier: Apache-2.0
"""May this run, and as what? Every rule has one shape (rule.py); `check(config)` asks them all (configuration.py)."""
