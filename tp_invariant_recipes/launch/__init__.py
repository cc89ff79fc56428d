# SPDX-License-Identifier: Apache-2.0
"""One run on one machine: plan, preflight, ranks, progress, resume."""
