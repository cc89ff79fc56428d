# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for CUDA and, beside each, the same function in plain torch for every other device.

Where a module does not say that both have the same bits, they add in another order: CPU and GPU agree to rounding, each
with itself to the last bit.
"""
