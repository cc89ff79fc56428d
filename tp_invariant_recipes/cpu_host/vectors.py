# SPDX-License-Identifier: Apache-2.0
"""Some sizes must be whole vectors on a CPU. torch computes the rest of an incomplete vector with other code, which
rounds differently (SLEEF's and libm's exp differ), so a number's bits would depend on the numbers behind it."""

# The most numbers in one vector of torch's vector code on a CPU.
VECTORS = 32
