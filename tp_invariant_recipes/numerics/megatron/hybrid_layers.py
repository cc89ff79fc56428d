"""The signs of model.hybrid_layer_pattern that have invariant layers. The check of a configuration reads them."""

# A layer's sign -> its field in Megatron's specification.
LAYERS = {"M": "mamba_layer", "*": "attention_layer", "-": "mlp_layer", "E": "moe_layer"}
SEPARATOR = "|"  # separates pipeline stages
AHEAD = "/"  # before the layers of each depth of multi-token prediction, which Bridge puts after the model's
