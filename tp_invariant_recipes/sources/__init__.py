"""Other people's models: recipes of Bridge, Hugging Face weights, fine-tuning on examples, LoRA."""
