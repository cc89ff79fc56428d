# SPDX-License-Identifier: Apache-2.0
"""The layers that the invariant numerics adapt (adapters.py), by how tensor parallelism splits them.

It splits a layer's rows or its columns, or every rank holds the layer whole. The check of a configuration reads the
names too, without torch.
"""

COLUMN_PARALLEL = ("linear_qkv", "linear_fc1", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "in_proj")
ROW_PARALLEL = ("linear_proj", "linear_fc2", "out_proj")
WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")


# A layer's sign -> its field in Megatron's specification.
LAYERS = {"M": "mamba_layer", "*": "attention_layer", "-": "mlp_layer", "E": "moe_layer"}
SEPARATOR = "|"  # separates pipeline stages
AHEAD = "/"  # before the layers of each depth of MTP, which Bridge puts after the model's
