# SPDX-License-Identifier: Apache-2.0
"""What scores and rollouts share: the model of a source, its ranks, and files that grow."""
