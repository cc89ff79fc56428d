# SPDX-License-Identifier: Apache-2.0
"""tpi verify: runs of a sweep of settings, judged."""
