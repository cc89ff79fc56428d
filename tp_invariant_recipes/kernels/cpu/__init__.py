# SPDX-License-Identifier: Apache-2.0
"""Loops that numba compiles for a CPU: GEMMs as the definitions in kernels/ state them."""
