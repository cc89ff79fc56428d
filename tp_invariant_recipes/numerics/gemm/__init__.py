# SPDX-License-Identifier: Apache-2.0
"""Products of matrices: their definition, what computes them on a device, and the exactness checks that compare
bits."""
