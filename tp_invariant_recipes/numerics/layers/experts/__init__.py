# SPDX-License-Identifier: Apache-2.0
"""Experts: their placement, the exchange of tokens, their GEMMs in each precision."""
