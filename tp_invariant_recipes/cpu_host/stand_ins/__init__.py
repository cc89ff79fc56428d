# SPDX-License-Identifier: Apache-2.0
"""What a machine without Transformer Engine, mamba-ssm or Apex has in their place."""
