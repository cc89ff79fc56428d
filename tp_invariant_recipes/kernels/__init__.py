"""Triton kernels for CUDA and, beside each, the same function in plain torch for every other device."""
