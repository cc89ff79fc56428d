# SPDX-License-Identifier: Apache-2.0
"""Everything that only numerics=portable needs: kernels specified to the last bit, layers, conformance."""
