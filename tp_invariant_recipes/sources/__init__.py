# SPDX-License-Identifier: Apache-2.0
"""Other people's models: recipes of Bridge, Hugging Face weights, fine-tuning on examples, LoRA."""
