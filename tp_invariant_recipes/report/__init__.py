# SPDX-License-Identifier: Apache-2.0
"""An HTML page that shows the ledgers of runs in figures and sentences. Imports neither torch nor Megatron."""
