# SPDX-License-Identifier: Apache-2.0
"""What the invariant numerics cover: one row a limit, fields and values that are known."""
