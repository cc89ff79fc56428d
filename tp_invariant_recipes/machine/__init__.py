"""This machine: GPUs, memory, network, the terminal, installed versions."""
