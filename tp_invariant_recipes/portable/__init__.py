"""Everything that only numerics=portable needs: kernels stated to the last bit, layers, conformance."""
