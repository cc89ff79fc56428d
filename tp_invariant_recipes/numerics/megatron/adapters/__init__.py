"""LoRA on Megatron's layers and experts."""
