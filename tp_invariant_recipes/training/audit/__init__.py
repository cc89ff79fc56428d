"""What a rank of `tpi audit` does: record what it computes, dither, and take another run's choices of experts."""
