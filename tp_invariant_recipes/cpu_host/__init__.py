# SPDX-License-Identifier: Apache-2.0
"""What stands in for GPU packages on a CPU. cpu.py has the table of replacements."""
