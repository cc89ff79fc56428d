# SPDX-License-Identifier: Apache-2.0
"""Tasks of NeMo-Run with invariant numerics and a ledger: the plugin, and the changed task's entry point."""
