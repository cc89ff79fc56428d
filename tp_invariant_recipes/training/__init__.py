# SPDX-License-Identifier: Apache-2.0
"""One rank: Bridge's pretrain() with our callbacks and patches."""
