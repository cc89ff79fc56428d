"""The machine: GPUs, network, versions, and Megatron's CUDA code on a CPU. `cpu.py` has the table of replacements."""
