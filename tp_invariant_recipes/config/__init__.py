# SPDX-License-Identifier: Apache-2.0
"""From `conf/` and the command line to a validated run: compose, check, describe. Nothing here starts a process."""
