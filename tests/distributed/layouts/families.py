"""Models of each family cut small, and the layouts in which each must have one ledger under `numerics=tree`.

A row of ROWS is a model, what is held fixed, and layouts; the controls are in test_invariance_families.py.
"""

from tests.distributed.small_models import RECOMPUTED, small

_DENSE = (
    "seq=64 model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=256 model.kv_channels=16 model.vocab_size=512"
)
GPT = (  # as Megatron's defaults have it: LayerNorm, learned positions, biases and GELU
    "qwen3_toy seq=32 model.num_layers=1 model.normalization=LayerNorm model.qk_layernorm=false "
    "model.position_embedding_type=learned_absolute model.activation_func=torch.nn.functional.gelu "
    "model.gated_linear_unit=false model.add_bias_linear=true model.bias_activation_fusion=false"
)
NEXT = (
    "qwen3_next_toy seq=32 model.hidden_size=64 model.moe_ffn_hidden_size=64 model.kv_channels=16 model.vocab_size=512 "
    "model.linear_key_head_dim=16 model.linear_value_head_dim=16"
)
NEXT_ALONE = "model.mtp_num_layers=null"
NEXT_DENSE = (  # as Qwen3.5 9B is
    f"{NEXT_ALONE} model.num_moe_experts=null model.moe_ffn_hidden_size=null "
    "model.moe_shared_expert_intermediate_size=null"
)
_YARN = (
    "model.window_size=[7,0] model.window_attn_skip_freq=2 model.position_embedding_type=yarn "
    "model.yarn_rotary_scaling_factor=32.0 model.yarn_original_max_position_embeddings=16 model.yarn_beta_fast=32.0 "
    "model.yarn_beta_slow=1.0 model.yarn_correction_range_round_to_int=false"
)
_SHORTEST = "seq=32 model.num_layers=1"
_UNTIED = "model.share_embeddings_and_output_weights=false"

MODELS = {
    "deepseek": small("deepseek_v3_toy"),
    "gemma3": f"gemma3_toy {_DENSE} model.window_size=8",
    "glm": "glm45_toy seq=32 model.hidden_size=64 model.ffn_hidden_size=256 model.moe_ffn_hidden_size=64 "
    "model.moe_shared_expert_intermediate_size=256 model.kv_channels=16 model.vocab_size=512 model.num_layers=2 "
    "model.moe_layer_freq=[0,1]",
    "gpt": GPT,
    "gpt_oss": "gpt_oss_toy seq=64 model.window_size=[7,0] model.hidden_size=64 model.moe_ffn_hidden_size=64 "
    "model.kv_channels=16 model.vocab_size=512",
    "llama32": f"llama32_toy {_SHORTEST}",  # scaled rotary frequencies
    "moonlight": small("moonlight_toy"),
    "nemotron": small("nemotron3_nano_toy"),
    "next": NEXT,
    "olmoe": f"olmoe_toy {_DENSE} model.moe_ffn_hidden_size=64",
    "qwen25": f"qwen25_toy {_SHORTEST}",  # biases of queries, keys and values
    "qwen3": "qwen3_toy seq=32",
    "qwen3_moe": small("qwen3_moe_toy"),
    "yarn": f"qwen3_toy seq=32 {_YARN}",
}

_FP32 = "precision=fp32"
_SHARDS = "gbs=4 numerics.data_shards=4"
_TWO_SHARDS = "gbs=4 numerics.data_shards=2"  # two sequences in each
_DISTRIBUTED = "optimizer.use_distributed_optimizer=true"
_FOUR = "numerics.virtual_shards=4"
_SELECTIVE = "model.recompute_granularity=selective model.recompute_modules=[layernorm,moe]"

# Multi-token prediction.
AHEAD = f"model.mtp_num_layers=1 {_FOUR}"
_TWO_AHEAD = f"model.mtp_num_layers=2 {_FOUR} {_TWO_SHARDS}"
HYBRID_AHEAD = (
    "model.mtp_num_layers=2 model.mtp_use_repeated_layer=true model.mtp_hybrid_override_pattern=*ME "
    "numerics.virtual_shards=4"
)
# Of experts.
LATENT = "model.moe_latent_size=32"  # of tokens that experts see
_Z_LOSS = "model.moe_z_loss_coeff=0.01"
_CAPACITY = "model.moe_expert_capacity_factor=1.0 model.moe_pad_expert_input_to_capacity=true"

ROWS = (
    ("llama32", "gbs=1", ("tp=1", "tp=2")),
    ("qwen25", "gbs=1", ("tp=1", "tp=2")),
    *((model, "gbs=2 seq=64 numerics.context_shards=2", ("cp=1", "cp=2 tp=2")) for model in ("llama32", "qwen25")),
    ("yarn", "gbs=1", ("tp=1", "tp=2")),
    ("qwen3", "gbs=2 model.no_rope_freq=[0,1]", ("tp=1", "tp=2", "pp=2")),
    ("gemma3", "gbs=1", ("tp=1", "tp=2 pp=2", "tp=4 sp=false")),
    ("gemma3", _SHARDS, ("dp=1", "dp=2 mbs=2", "pp=2 dp=2")),
    ("olmoe", "gbs=1", ("tp=1", "tp=4 ep=2", "tp=2 pp=2")),
    ("olmoe", _SHARDS, ("dp=1", "dp=2 ep=2 mbs=2", "tp=2 dp=2 ep=2")),
    ("gpt", "gbs=2", ("tp=1", "tp=2 mbs=2", "tp=4", "tp=2 sp=false")),
    ("gpt", "gbs=2 model.num_layers=2", ("tp=1", "pp=2", "tp=2 pp=2")),
    ("gpt", _SHARDS, ("dp=1", "dp=2 mbs=2", f"tp=2 dp=2 {_DISTRIBUTED}")),
    ("gpt", "gbs=1 numerics.context_shards=2", ("cp=1", "cp=2", "tp=2 cp=2")),
    ("gpt", f"gbs=1 model.layernorm_zero_centered_gamma=true {_UNTIED}", ("tp=1", "tp=2")),
    ("gpt", f"gbs=1 {_FP32}", ("tp=1", "tp=2")),
    (
        "gpt",
        "gbs=1 seq=128 model.kv_channels=32 numerics.virtual_shards=2 precision=fp8_tensorwise",
        ("tp=1", "tp=2"),
    ),
    ("gpt_oss", "gbs=1", ("tp=1", "tp=4 ep=2", "tp=2 pp=2")),
    ("gpt_oss", _SHARDS, ("dp=1", "dp=2 ep=2", f"pp=2 dp=2 ep=2 {_DISTRIBUTED} mbs=2")),
    ("gpt_oss", f"{_SHARDS} model.calculate_per_token_loss=true", ("dp=1", "dp=2 ep=2")),
    ("gpt_oss", f"gbs=1 {_FP32}", ("tp=1", "tp=2")),
    ("glm", "gbs=1", ("tp=1", "tp=2 pp=2", *(f"{at} {RECOMPUTED}" for at in ("tp=1", "tp=2 pp=2", "tp=4 ep=2")))),
    ("glm", f"gbs=1 {NEXT_ALONE}", ("tp=1", f"tp=2 {RECOMPUTED}")),
    ("glm", _TWO_SHARDS, ("dp=1", "dp=2 ep=2", f"dp=2 ep=2 pp=2 {RECOMPUTED}")),
    ("next", "gbs=1", ("tp=1", "tp=2", "tp=4 ep=2", "pp=2")),
    (
        "next",
        _TWO_SHARDS,
        (
            *("dp=1", "dp=2 ep=2 mbs=2", "pp=2 mbs=2", f"dp=1 {_SELECTIVE}", f"pp=2 {_SELECTIVE}"),
            *(f"dp=1 {RECOMPUTED}", f"dp=2 ep=2 pp=2 {RECOMPUTED}"),
        ),
    ),
    ("next", f"gbs=1 {_FP32} {NEXT_ALONE}", ("tp=1", "tp=2")),
    ("next", f"gbs=1 {NEXT_DENSE}", ("tp=1", "tp=2", "pp=2")),
    # Multi-latent attention.
    ("deepseek", _FOUR, ("tp=1", "tp=2 ep=2")),
    ("deepseek", f"{_FOUR} {_TWO_SHARDS} {_DISTRIBUTED}", ("dp=1", "dp=2 tp=2", "dp=2 ep=2 mbs=2")),
    ("deepseek", f"{_FOUR} {_FP32}", ("tp=1", "tp=2")),
    ("moonlight", f"{_FOUR} gbs=2", ("tp=1", "tp=4 ep=4", "tp=2 pp=2", "pp=2")),
    # Multi-token prediction, the last stage with its layers, or with no others.
    (
        "deepseek",
        AHEAD,
        (
            *("tp=1", "pp=2", "tp=2 pp=2"),
            *(f"pp=2 model.pipeline_model_parallel_layout={stages}" for stages in ("Ett|mL", "Et|tmL")),
        ),
    ),
    ("deepseek", f"{AHEAD} {_SHARDS}", ("dp=1", "dp=2 tp=2 ep=2", f"pp=2 dp=2 {_DISTRIBUTED}")),
    (
        "qwen3",
        _TWO_AHEAD,
        ("dp=1", "dp=2 tp=2", f"tp=2 {RECOMPUTED}"),
    ),  # the embedding is the output layer's weight, too
    ("qwen3", f"{_TWO_AHEAD} {_UNTIED} {_FP32}", ("dp=1", "pp=2", "dp=2")),
    (
        "qwen3",
        f"{_TWO_AHEAD} {_UNTIED}",
        ("dp=1", *(f"{at} {RECOMPUTED}" for at in ("dp=1", "dp=2", "pp=2 dp=2", "tp=2 sp=false pp=2", "tp=4"))),
    ),
    # A hybrid model repeats its layers ahead; at pp=1 a router of the model has the number of one of theirs.
    ("nemotron", HYBRID_AHEAD, ("tp=1", "pp=2", "tp=2 ep=2")),
    (
        "nemotron",
        f"{HYBRID_AHEAD} {_SHARDS} model.mtp_use_repeated_layer=false",
        ("dp=1", "dp=2 tp=2", "dp=2 pp=2 ep=2"),
    ),
    # Experts; more of them: test_expert_groups.py.
    ("qwen3_moe", "iters=30", ("tp=1", "tp=2", "tp=4", "tp=4 ep=2")),
    ("qwen3_moe", "gbs=2", ("tp=1", "tp=2 pp=2")),
    ("qwen3_moe", "dp=2 gbs=4", ("tp=1", "tp=1 ep=2", "tp=2 ep=4")),
    ("qwen3_moe", f"mbs=2 gbs=4 {_FP32} {_CAPACITY}", ("tp=1", "tp=4 ep=4")),
    ("qwen3_moe", f"gbs=2 {_Z_LOSS}", ("tp=1", "tp=4 ep=2", "tp=2 pp=2 mbs=2")),
    ("qwen3_moe", f"{_SHARDS} {_Z_LOSS}", ("dp=1", "dp=2 ep=2 tp=2")),
    ("qwen3_moe", f"numerics.context_shards=2 seq=64 {_Z_LOSS}", ("cp=1", "cp=2 ep=2")),
    ("qwen3_moe", LATENT, ("tp=1", "tp=4 ep=2")),
    ("nemotron", "iters=30", ("tp=1", "tp=2 ep=2", "tp=4")),
    ("nemotron", f"dp=2 gbs=4 {_CAPACITY}", ("tp=1 ep=2", "tp=2")),
    ("nemotron", LATENT, ("tp=1", "tp=2 ep=2", "pp=2")),
    ("nemotron", f"{LATENT} {_SHARDS}", ("dp=1", "dp=2 ep=2", "dp=2 tp=2")),
)

# Two layouts that stock numerics has; Bridge's OLMoE has none with tp.
_TP = ("tp=1", "tp=2")
STOCK_ROWS = (
    *((model, "gbs=1", _TP) for model in MODELS if model not in ("moonlight", "nemotron", "olmoe", "qwen3")),
    ("olmoe", "", ("gbs=2 dp=1", "gbs=2 dp=2 ep=2")),
    ("glm", f"gbs=1 {RECOMPUTED}", _TP),
    ("next", f"gbs=1 {NEXT_DENSE}", _TP),
    ("deepseek", AHEAD, _TP),
    ("nemotron", HYBRID_AHEAD, _TP),
    ("nemotron", LATENT, _TP),
    ("qwen3", f"gbs=1 {AHEAD} {RECOMPUTED}", _TP),
)
