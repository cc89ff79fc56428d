# SPDX-License-Identifier: Apache-2.0
"""Names of norms in checkpoints.

Transformer Engine has a norm and the linear layer after it in one module. Local layers have two modules, and their
checkpoints and ledgers have Transformer Engine's names, so that each reads the other's.
"""

# A module of local layers -> how its parameters' names begin. For `sharded_state_dict_keys_map` of Megatron-Core.
ATTENTION = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
LATENT_ATTENTION = {
    f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_" for part in ("q", "kv")
}
DENSE = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}  # with experts the norm is a module of its own everywhere
DELTA_NET = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
MAMBA = {"norm.": "mixer.in_proj.layer_norm_"}
