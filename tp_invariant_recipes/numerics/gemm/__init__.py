"""Products of matrices: their definition, what computes them on a device, and the trials that compare bits."""
