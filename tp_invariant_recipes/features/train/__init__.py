# SPDX-License-Identifier: Apache-2.0
"""Training: one run from its plan to its end, and the callbacks that a rank composes."""
