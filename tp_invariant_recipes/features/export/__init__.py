"""tpi export: a checkpoint as a Hugging Face folder."""
