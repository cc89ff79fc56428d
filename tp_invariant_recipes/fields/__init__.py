# SPDX-License-Identifier: Apache-2.0
"""The fields of Bridge: what each may be with invariant numerics, whether it changes bits, and why."""
