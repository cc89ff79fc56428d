# SPDX-License-Identifier: Apache-2.0
"""Compares ledgers and recordings, and explains the first difference. Imports neither torch nor Megatron."""
