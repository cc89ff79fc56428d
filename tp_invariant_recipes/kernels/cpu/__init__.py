"""Loops that numba compiles for a CPU: products of matrices as the definitions in kernels/ state them."""
