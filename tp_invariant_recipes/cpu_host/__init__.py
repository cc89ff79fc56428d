"""What stands in for GPU packages on a CPU. cpu.py has the table of replacements."""
