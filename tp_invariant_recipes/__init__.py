"""Megatron-Bridge training whose bits do not depend on the tensor-parallel degree."""

__version__ = "0.1.0"
