# SPDX-License-Identifier: Apache-2.0
"""Every file of a run directory: its name, its format, who reads and writes it. Imports neither torch nor Megatron."""
