"""Everything that only numerics=portable needs: kernels specified to the last bit, layers, conformance."""
