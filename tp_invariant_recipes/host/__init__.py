"""Run Megatron code written for CUDA on a CPU with Gloo. `cpu.py` holds the table of replacements."""
