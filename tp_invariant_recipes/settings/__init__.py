# SPDX-License-Identifier: Apache-2.0
"""What a run can be told: typed sections, their keys and values, and what follows from them alone."""
