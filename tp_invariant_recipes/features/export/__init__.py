# SPDX-License-Identifier: Apache-2.0
"""tpi export: a checkpoint as a Hugging Face folder."""
