# SPDX-License-Identifier: Apache-2.0
"""What a machine, a job or a file lacks for a run."""
