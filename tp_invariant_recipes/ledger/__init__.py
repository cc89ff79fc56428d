# SPDX-License-Identifier: Apache-2.0
"""The record of a run: exact bits, step by step, written, read and checked. Imports neither torch nor Megatron."""
