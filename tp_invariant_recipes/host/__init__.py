"""Run CUDA-minded Megatron code on a CPU with Gloo. `cpu.py` holds the table of what is replaced."""
