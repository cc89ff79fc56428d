# SPDX-License-Identifier: Apache-2.0
"""Jobs on SLURM, seen from a login node: submit, list, follow, wait, cancel."""
