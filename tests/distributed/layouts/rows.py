# SPDX-License-Identifier: Apache-2.0
"""What has one ledger: words that are held fixed, and the layouts that must agree; and pairs that stock has two for.

A row of ROWS is (words, layouts); the rows of SHORT are trained by `make test`, all others for a release. The rows of
families are of models cut small.
"""

from tests.distributed import small_models
from tests.distributed.small_models import BUCKETS, DENSE, DISTRIBUTED, GATHER, RECOMPUTED, SHORTEST, small

# --- dense models: tensor, pipeline, data and context parallelism ---

UNTIED = "model.share_embeddings_and_output_weights=false"
FOUR_LAYERS = "model.num_layers=4"
INTERLEAVED = "model.virtual_pipeline_model_parallel_size=2"
FIRST, LAST = (f"model.num_layers_in_{end}_pipeline_stage=1" for end in ("first", "last"))
ACCOUNTED = "model.account_for_embedding_in_pipeline_split=true model.account_for_loss_in_pipeline_split=true"
OVERLAPPING = "model.overlap_p2p_comm=true model.batch_p2p_comm=false"
MASK = "dataset.create_attention_mask=true"  # Megatron's default; nobody reads it
VALIDATED = "validation.eval_iters=1 validation.eval_interval=1"
FP32 = "precision=fp32"
_SHORT = "qwen3_toy seq=32 gbs=2"
_LONG = "qwen3_toy seq=64 iters=3 gbs=8 model.num_layers=2 numerics.data_shards=4 numerics.context_shards=4"
# Sequence parallelism is on where tp > 1 unless a row says otherwise.
_STAGES = {
    f"{_SHORT} iters=50 gbs=1": ("tp=1", "tp=2", "tp=4", "tp=8"),
    f"{_SHORT} iters=2 gbs=4 mbs=4": ("tp=1", "tp=2", "tp=2 sp=false", "tp=4", "tp=4 sp=false", "tp=8"),
    f"{_SHORT} iters=2 gbs=4 dp=2": ("tp=1", "tp=8"),
    f"{_SHORT} iters=2 gbs=4 pp=2": ("tp=1", "tp=8"),
    f"{_SHORT} iters=2 gbs=8 {FOUR_LAYERS}": (
        "tp=1", "pp=4", f"pp=2 {FIRST}", f"pp=2 {LAST}", f"pp=3 {FIRST} {LAST}", f"pp=3 {ACCOUNTED}",
        f"tp=2 pp=2 {INTERLEAVED}", f"pp=2 {INTERLEAVED} model.pipeline_model_parallel_layout=Et|t|t|tL",
    ),
    f"{_SHORT} iters=2 gbs=8 {FOUR_LAYERS} {UNTIED}": (
        "tp=1", "pp=4", f"pp=2 {INTERLEAVED}", f"tp=2 pp=3 {FIRST} {LAST}",
    ),
    f"{_SHORT} iters=2 gbs=8 model.num_layers=8": (
        "tp=1", f"pp=4 {INTERLEAVED}", f"pp=4 tp=2 {INTERLEAVED} {OVERLAPPING}",
    ),
    f"{_SHORT} iters=2 {RECOMPUTED}": ("tp=1", "tp=2", "tp=4 sp=false"),
    f"{_SHORT} iters=2 {FP32} {FOUR_LAYERS}": ("tp=1", "tp=4 sp=false", f"pp=2 {INTERLEAVED} {MASK}"),
    f"{_SHORT} iters=2 {FP32} {UNTIED} {RECOMPUTED}": ("tp=1", "tp=4 sp=false", "pp=2"),
    f"{_SHORT} iters=1 numerics=gather": ("tp=1", "tp=2", "tp=4", "tp=4 sp=false"),
}  # fmt: skip
_CONTEXTS = (
    "", "cp=2", "cp=2 mbs=2", "cp=4", f"cp=4 tp=2 {DISTRIBUTED}", "tp=2", "tp=2 cp=2", "tp=4 cp=2",
    "tp=2 cp=2 sp=false", f"dp=2 cp=2 {BUCKETS}", f"dp=2 cp=2 {GATHER}", f"tp=2 dp=4 {GATHER}", "pp=2 cp=2",
    f"pp=2 cp=2 dp=2 {GATHER}",
)  # fmt: skip
# Owners of experts take part of a tensor-parallel group, of a context-parallel one, or of both and of data-parallel
# ranks.
_MOE, _HYBRID = small("qwen3_moe_toy"), small("nemotron3_nano_toy")
_CONTEXT = {f"{_LONG} {more}": _CONTEXTS for more in ("", UNTIED, FP32)} | {
    f"{_MOE} iters=2 gbs=2 numerics.data_shards=2 numerics.context_shards=2 validation.eval_iters=1": (
        "", f"cp=2 dp=2 ep=4 {GATHER}", "cp=2", "cp=2 ep=2", "tp=2", "tp=2 cp=2", "tp=2 cp=2 ep=2",
        f"tp=2 cp=2 ep=4 dp=2 {BUCKETS}", f"tp=2 cp=2 ep=8 dp=2 {GATHER}", f"dp=2 cp=2 ep=2 {DISTRIBUTED}",
        "pp=2 cp=2 ep=2",
    ),
}  # fmt: skip
# Each pair of values (tp, dp, mbs, distributed optimizer, overlap, ep) that fits on few ranks occurs in some row.
_OF_DATA = f"iters=3 gbs=8 numerics.data_shards=4 {VALIDATED}"
_DATA = {
    f"{DENSE} {_OF_DATA} model.num_layers=2": (
        "", "mbs=2", "dp=2", "dp=4", f"dp=4 {GATHER}", "dp=4 pp=2", f"tp=2 sp=false dp=2 mbs=2 {BUCKETS}",
        f"dp=2 pp=2 mbs=2 {GATHER}", f"tp=4 dp=2 {BUCKETS}", f"tp=2 dp=4 {GATHER}",
        f"tp=2 sp=false dp=4 {DISTRIBUTED}",
    ),
    f"{_MOE} {_OF_DATA}": (
        "", f"tp=2 dp=2 ep=4 mbs=2 {BUCKETS}", "dp=2 ep=2", f"dp=4 ep=4 {GATHER}", "tp=2 ep=2 dp=4",
        f"tp=2 dp=4 ep=8 {GATHER}", f"dp=4 ep=2 {BUCKETS}", f"tp=4 dp=2 ep=2 {DISTRIBUTED}",
        f"dp=2 ep=2 pp=2 {GATHER}",
    ),
    f"{_HYBRID} {_OF_DATA}": (
        "", "dp=2 ep=2", "dp=4 ep=2", f"dp=4 {GATHER}", f"tp=2 dp=2 {GATHER}", f"tp=2 dp=4 ep=4 {BUCKETS}",
        f"tp=2 dp=2 ep=4 {DISTRIBUTED}",
    ),
    f"{DENSE} iters=2 gbs=16 numerics.data_shards=16": ("mbs=8", "dp=8", f"dp=16 {GATHER}", "dp=2 mbs=4"),
}  # fmt: skip

# --- expert groups; which terms each layout adds in which order: tests/unit/numerics/sums/test_group_order.py ---

_OVERLAP = f"{BUCKETS} {DISTRIBUTED}"
FIXED = "iters=2 gbs=8 numerics.data_shards=4"  # two sequences a data shard, so that shards of a rank take turns
_CUT = "seq=64 iters=2 gbs=4 numerics.data_shards=2 numerics.context_shards=2"
_BY_GROUPS = {
    1: ("dp=1", "dp=1 tp=2 ep=2 mbs=2", "dp=2 ep=2 pp=2", f"dp=2 ep=4 tp=2 {_OVERLAP}", f"dp=4 ep=4 {_OVERLAP}"),
    2: ("dp=1", "dp=2", f"dp=2 ep=2 {_OVERLAP}", "dp=2 ep=2 tp=2", "dp=4 ep=2 mbs=2"),
    4: ("dp=1", "dp=2 pp=2", "dp=2 ep=2", "dp=4", f"dp=4 ep=4 {_OVERLAP}"),
}
_BY_CONTEXTS = {
    1: ("cp=1", "cp=2 ep=2", "cp=1 tp=2 ep=2", "cp=2 dp=2 ep=4 mbs=2"),
    2: ("cp=1 dp=2", "cp=2 dp=2 ep=2", "cp=2 ep=2 pp=2"),
    4: ("cp=1", "cp=2 dp=1", "cp=2 dp=2", "cp=2 dp=2 ep=4"),
}
_IN_128 = (
    "qwen3_moe_toy seq=128 numerics.virtual_shards=1 model.num_layers=1 model.hidden_size=128 "
    "model.num_attention_heads=4 model.num_query_groups=4 model.kv_channels=32 model.ffn_hidden_size=128 "
    "model.moe_ffn_hidden_size=128 model.vocab_size=512"
)
_EXPERTS_OF = (
    f"{_IN_128} precision=fp8_tensorwise model.num_moe_experts=8",
    # The sums of many tokens keep 13 bits and have scales that are powers of two, so fp32 adds them exactly.
    f"{_IN_128} precision=fp8_blockwise model.num_moe_experts=64",
    f"{_MOE} numerics=portable",
    f"{_HYBRID} model.moe_expert_capacity_factor=1.0 model.moe_pad_expert_input_to_capacity=true",
    f"{_MOE} precision=mxfp8",
    "gpt_oss_toy model.num_layers=1",
)
STACKED = f"{_MOE} iters=1 model.num_layers=1 ledger.experts=together"
_GROUPS = {
    **{
        f"{_MOE} {FIXED} {more} numerics.expert_groups={groups}": layouts
        for groups, layouts in _BY_GROUPS.items()
        for more in ("", "model.moe_router_load_balancing_type=global_aux_loss")
    },
    **{f"{_MOE} {_CUT} numerics.expert_groups={groups}": layouts for groups, layouts in _BY_CONTEXTS.items()},
    **{f"{kind} {FIXED} numerics.expert_groups=1": ("dp=1", "dp=2 ep=2", "dp=4 ep=4") for kind in _EXPERTS_OF},
}

# --- Megatron-FSDP: a rank keeps whole gradients, or slices of them and one data shard for each sequence ---

_FSDP = f"{DISTRIBUTED} ddp.use_megatron_fsdp=true ddp.data_parallel_sharding_strategy"
OPTIM, GRADS, PARAMS = (f"{_FSDP}={strategy}" for strategy in ("optim", "optim_grads", "optim_grads_params"))
SHARDED = "gbs=4 numerics.data_shards=4"
_SHARDED_EXPERTS = f"{SHARDED} numerics.expert_groups=4"
_STRATEGIES = {
    f"{DENSE} iters=20 {SHARDED} {VALIDATED}": (
        *("", "dp=2", "dp=4"),
        *(f"{at} {fsdp}" for fsdp in (OPTIM, GRADS, PARAMS) for at in ("dp=2", "dp=4", "tp=2 dp=2")),
    ),
    f"{DENSE} iters=2 gbs=8 numerics.data_shards=8 {UNTIED} model.num_layers=2": (
        "", f"dp=2 {OPTIM} {BUCKETS}", f"dp=2 {GRADS}", f"dp=2 {PARAMS} {RECOMPUTED}", f"dp=1 {PARAMS}",
    ),
    f"{DENSE} iters=2 gbs=8 numerics.data_shards=4": ("", f"dp=2 {OPTIM}", f"dp=4 {OPTIM} {BUCKETS}"),
    f"{_MOE} iters=20 {_SHARDED_EXPERTS} {VALIDATED}": (
        "", *(f"{at} {fsdp}" for fsdp in (OPTIM, GRADS, PARAMS) for at in ("dp=2 ep=2", "dp=4 ep=2", "tp=2 dp=2 ep=4")),
        f"tp=2 dp=2 {PARAMS}",
    ),
    f"{_MOE} {FIXED} numerics.expert_groups=1": ("", f"dp=2 ep=2 {OPTIM}", f"dp=4 ep=4 {OPTIM} {BUCKETS}"),
    f"{DENSE} iters=2 {SHARDED} numerics=portable": ("", f"dp=2 {OPTIM}", f"tp=2 dp=2 {PARAMS}"),
    f"{DENSE} iters=2 {SHARDED} numerics=gather": ("", f"tp=2 dp=2 {PARAMS}"),
}  # fmt: skip

# --- models in FP8 ---

# Two shards whose parts of every sum are multiples of 128.
SMALL = "qwen3_toy seq=128 gbs=2 iters=2 model.kv_channels=32 numerics.virtual_shards=2"
SINGLE_LAYER = f"{SMALL} gbs=1 iters=1 model.num_layers=1"
CONTEXT = f"{SMALL} seq=256 numerics.context_shards=2"
EXPERTS = (
    "qwen3_moe_toy seq=128 gbs=1 iters=2 numerics.virtual_shards=2 model.num_layers=2 model.hidden_size=128 "
    "model.moe_ffn_hidden_size=128 model.num_attention_heads=8 model.num_query_groups=4 model.kv_channels=32 "
    "model.vocab_size=512 model.ffn_hidden_size=256"
)
LATENT = (
    "deepseek_v3_toy seq=128 gbs=1 iters=2 numerics.virtual_shards=2 model.num_layers=2 model.moe_layer_freq=[0,1] "
    "model.hidden_size=128 model.num_attention_heads=8 model.q_lora_rank=128 model.kv_lora_rank=128 "
    "model.qk_head_dim=32 model.qk_pos_emb_head_dim=32 model.v_head_dim=32 model.vocab_size=512 "
    "model.ffn_hidden_size=256 model.moe_ffn_hidden_size=128 model.moe_shared_expert_intermediate_size=256 "
    "model.num_moe_experts=8"
)
# Sides in steps of 16, and of dt 2 numbers a shard; the first and the last layer are in bf16.
HYBRID = (
    "nemotron3_nano_toy seq=128 gbs=1 iters=2 numerics.virtual_shards=2 model.hybrid_layer_pattern=ME*EM- "
    "model.hidden_size=80 model.num_attention_heads=4 model.num_query_groups=2 model.kv_channels=16 "
    "model.vocab_size=512 model.ffn_hidden_size=192 model.moe_ffn_hidden_size=96 model.num_moe_experts=8 "
    "model.moe_shared_expert_intermediate_size=192 model.mamba_num_heads=4 model.mamba_num_groups=2 "
    "model.mamba_head_dim=16 model.mamba_state_dim=16"
)
# Of alpha and beta 4 numbers a shard.
DELTA = (
    "qwen3_next_toy seq=128 gbs=1 iters=1 numerics.virtual_shards=2 model.hidden_size=128 model.num_attention_heads=4 "
    "model.num_query_groups=4 model.kv_channels=32 model.vocab_size=512 model.moe_ffn_hidden_size=128 "
    "model.moe_shared_expert_intermediate_size=128 model.linear_num_key_heads=4 model.linear_num_value_heads=8"
)
TENSORWISE, BLOCKWISE, BY_32 = "precision=fp8_tensorwise", "precision=fp8_blockwise", "precision=mxfp8"
NAMED = "mixed_precision=bf16_with_fp8_current_scaling_mixed"

# --- families ---

_DENSE = (
    "seq=64 model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=256 model.kv_channels=16 model.vocab_size=512"
)
# As Megatron's defaults have it: LayerNorm, learned positions, biases and GELU.
GPT = (
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

_SHARDS = "gbs=4 numerics.data_shards=4"
_TWO_SHARDS = "gbs=4 numerics.data_shards=2"  # two sequences in each
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
_OF_LATENTS = "model.moe_latent_size=32"  # of tokens that experts see
_Z_LOSS = "model.moe_z_loss_coeff=0.01"
_CAPACITY = "model.moe_expert_capacity_factor=1.0 model.moe_pad_expert_input_to_capacity=true"

_FAMILIES = (
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
    ("gpt", _SHARDS, ("dp=1", "dp=2 mbs=2", f"tp=2 dp=2 {DISTRIBUTED}")),
    ("gpt", "gbs=1 numerics.context_shards=2", ("cp=1", "cp=2", "tp=2 cp=2")),
    ("gpt", f"gbs=1 model.layernorm_zero_centered_gamma=true {UNTIED}", ("tp=1", "tp=2")),
    ("gpt", f"gbs=1 {FP32}", ("tp=1", "tp=2")),
    ("gpt", f"gbs=1 seq=128 model.kv_channels=32 numerics.virtual_shards=2 {TENSORWISE}", ("tp=1", "tp=2")),
    ("gpt_oss", "gbs=1", ("tp=1", "tp=4 ep=2", "tp=2 pp=2")),
    ("gpt_oss", _SHARDS, ("dp=1", "dp=2 ep=2", f"pp=2 dp=2 ep=2 {DISTRIBUTED} mbs=2")),
    ("gpt_oss", f"{_SHARDS} model.calculate_per_token_loss=true", ("dp=1", "dp=2 ep=2")),
    ("gpt_oss", f"gbs=1 {FP32}", ("tp=1", "tp=2")),
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
    ("next", f"gbs=1 {FP32} {NEXT_ALONE}", ("tp=1", "tp=2")),
    ("next", f"gbs=1 {NEXT_DENSE}", ("tp=1", "tp=2", "pp=2")),
    # Multi-latent attention.
    ("deepseek", _FOUR, ("tp=1", "tp=2 ep=2")),
    ("deepseek", f"{_FOUR} {_TWO_SHARDS} {DISTRIBUTED}", ("dp=1", "dp=2 tp=2", "dp=2 ep=2 mbs=2")),
    ("deepseek", f"{_FOUR} {FP32}", ("tp=1", "tp=2")),
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
    ("deepseek", f"{AHEAD} {_SHARDS}", ("dp=1", "dp=2 tp=2 ep=2", f"pp=2 dp=2 {DISTRIBUTED}")),
    (
        "qwen3",
        _TWO_AHEAD,
        ("dp=1", "dp=2 tp=2", f"tp=2 {RECOMPUTED}"),
    ),  # the embedding is the output layer's weight, too
    ("qwen3", f"{_TWO_AHEAD} {UNTIED} {FP32}", ("dp=1", "pp=2", "dp=2")),
    (
        "qwen3",
        f"{_TWO_AHEAD} {UNTIED}",
        ("dp=1", *(f"{at} {RECOMPUTED}" for at in ("dp=1", "dp=2", "pp=2 dp=2", "tp=2 sp=false pp=2", "tp=4"))),
    ),
    # A hybrid model repeats its layers ahead; at pp=1 a router of the model has the number of one of theirs.
    ("nemotron", HYBRID_AHEAD, ("tp=1", "pp=2", "tp=2 ep=2")),
    (
        "nemotron",
        f"{HYBRID_AHEAD} {_SHARDS} model.mtp_use_repeated_layer=false",
        ("dp=1", "dp=2 tp=2", "dp=2 pp=2 ep=2"),
    ),
    # Experts.
    ("qwen3_moe", "iters=30", ("tp=1", "tp=2", "tp=4", "tp=4 ep=2")),
    ("qwen3_moe", "gbs=2", ("tp=1", "tp=2 pp=2")),
    ("qwen3_moe", "dp=2 gbs=4", ("tp=1", "tp=1 ep=2", "tp=2 ep=4")),
    ("qwen3_moe", f"mbs=2 gbs=4 {FP32} {_CAPACITY}", ("tp=1", "tp=4 ep=4")),
    ("qwen3_moe", f"gbs=2 {_Z_LOSS}", ("tp=1", "tp=4 ep=2", "tp=2 pp=2 mbs=2")),
    ("qwen3_moe", f"{_SHARDS} {_Z_LOSS}", ("dp=1", "dp=2 ep=2 tp=2")),
    ("qwen3_moe", f"numerics.context_shards=2 seq=64 {_Z_LOSS}", ("cp=1", "cp=2 ep=2")),
    ("qwen3_moe", _OF_LATENTS, ("tp=1", "tp=4 ep=2")),
    ("nemotron", "iters=30", ("tp=1", "tp=2 ep=2", "tp=4")),
    ("nemotron", f"dp=2 gbs=4 {_CAPACITY}", ("tp=1 ep=2", "tp=2")),
    ("nemotron", _OF_LATENTS, ("tp=1", "tp=2 ep=2", "pp=2")),
    ("nemotron", f"{_OF_LATENTS} {_SHARDS}", ("dp=1", "dp=2 ep=2", "dp=2 tp=2")),
)

_FAMILIES += (
    *((model, f"{_SHARDED_EXPERTS} {more}", ("dp=1", f"dp=2 ep=2 {PARAMS}")) for model, more in (
        ("nemotron", ""), ("deepseek", _FOUR), ("gpt_oss", "model.calculate_per_token_loss=true"), ("next", NEXT_ALONE),
        ("qwen3_moe", "model.moe_router_load_balancing_type=global_aux_loss"), ("deepseek", AHEAD),
    )),
    ("gpt", SHARDED, ("dp=1", f"tp=2 dp=2 {PARAMS}")),
    ("gemma3", SHARDED, ("dp=1", f"dp=2 {PARAMS}")),
    ("qwen3", f"{SHARDED} model.mtp_num_layers=2 {_FOUR}", ("dp=1", f"tp=2 dp=2 {PARAMS}")),
)  # fmt: skip

# --- Muon ---

MUON = f"{small_models.MUON} ledger.state_digests=1"
LAYER_WISE = "optimizer.use_layer_wise_distributed_optimizer=true"
SHARED = "gbs=4 numerics.data_shards=2"
_MUON = {
    f"{DENSE} {MUON} iters=2 gbs=1": ("tp=1", "tp=2"),
    f"{DENSE} {MUON} iters=2 {SHARED}": ("dp=1", "dp=2", f"dp=2 {LAYER_WISE}"),
    f"{DENSE} {MUON} iters=2 {SHARED} model.num_layers=2 optimizer.muon_nesterov=true": (
        "tp=1", "pp=2", f"dp=2 tp=2 {LAYER_WISE}", "tp=4 sp=false",
    ),
    f"{DENSE} {MUON} iters=2 gbs=1 {FP32}": ("tp=1", "tp=2"),
    f"{DENSE} {MUON} iters=2 gbs=1 numerics=gather": ("tp=1", "tp=2"),
    f"{_MOE} {MUON} iters=2 {SHARED} {_FOUR}": (
        "tp=1", "tp=2 ep=2", f"dp=2 tp=2 {LAYER_WISE}", f"dp=2 ep=2 {LAYER_WISE}",
    ),
    f"{small('deepseek_v3_toy')} {MUON} iters=2 {SHARED} {_FOUR}": ("tp=1", "tp=2 ep=2", f"dp=2 ep=2 {LAYER_WISE}"),
    f"{_HYBRID} {MUON} iters=2 {_FOUR}": ("tp=1", "tp=2 ep=2", "pp=2"),
}  # fmt: skip

# --- numerics=portable ---

PORTABLE = f"{SHORTEST} numerics=portable"
PORTABLE_SMALL = "qwen3_toy numerics=portable seq=32 gbs=2 iters=2"
PORTABLE_NEXT = f"{NEXT} {NEXT_ALONE} numerics=portable gbs=1 iters=2"
PORTABLE_LATENT = f"{small('moonlight_toy')} numerics=portable iters=2"
PORTABLE_YARN = f"{small('deepseek_v3_toy')} numerics=portable iters=2"
PORTABLE_EXPERTS = f"{_MOE} numerics=portable iters=2"
_PORTABLE = {
    PORTABLE_SMALL: ("tp=1", "tp=4 sp=false", "tp=1 pp=2"),
    f"{PORTABLE_SMALL} gbs=4 numerics.data_shards=4 model.num_layers=1": (
        "dp=1", f"dp=4 {GATHER}", "dp=2", f"tp=2 dp=2 {DISTRIBUTED} {BUCKETS}", "mbs=2",
    ),
    PORTABLE_EXPERTS: ("tp=1", "tp=2 ep=2", "tp=1 pp=2", "tp=4"),
    PORTABLE_NEXT: ("tp=1", "tp=2 ep=2", "tp=2 pp=2"),
    PORTABLE_LATENT: ("tp=1", "tp=2 ep=2", "tp=2 pp=2"),
    PORTABLE_YARN: ("tp=1", "tp=2"),
    **{f"{name}_toy numerics=portable seq=32 gbs=1 iters=1": ("tp=1", "tp=2") for name in ("llama32", "qwen25")},
}  # fmt: skip

# --- FP8 ---

# Sizes of 32 and tokens of 32; Mamba's dt too.
_FP8 = {
    f"{SINGLE_LAYER} {BY_32} seq=96": ("tp=1", "tp=2"),
    f"{SMALL} {BY_32} seq=32": ("tp=1", "tp=2 sp=false", "tp=2 pp=2", "mbs=2", f"tp=2 {RECOMPUTED}"),
    f"{SMALL} {BY_32} mixed_precision.fp8=hybrid gbs=4 numerics.data_shards=2": ("dp=1", "dp=2", "dp=2 tp=2"),
    f"{CONTEXT} {BY_32} seq=64": ("cp=1", "cp=2", "tp=2"),
    f"{EXPERTS} {BY_32}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{LATENT} {BY_32}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{HYBRID} {BY_32} model.hidden_size=96 model.mamba_num_heads=64 model.mamba_num_groups=4 model.kv_channels=32": (
        "tp=1", "tp=2 ep=2", "pp=2",
    ),
    f"{SINGLE_LAYER} {BY_32} numerics=portable": ("tp=1", "tp=2"),
    f"{SMALL} {BY_32} model.num_layers=3 mixed_precision.first_last_layers_bf16=true "
    "mixed_precision.num_layers_at_start_in_bf16=1 mixed_precision.num_layers_at_end_in_bf16=1": ("tp=1", "pp=3"),
}  # fmt: skip
_FP8 |= {
    f"{SMALL} {TENSORWISE}": ("tp=1", "tp=2 sp=false", "tp=2 pp=2", "mbs=2", f"tp=2 {RECOMPUTED}"),
    f"{SMALL} {TENSORWISE} gbs=4 numerics.data_shards=2": ("dp=1", "dp=2", "dp=2 tp=2", "mbs=2"),
    f"{SMALL} {BLOCKWISE}": ("tp=1", "tp=2", "tp=2 sp=false", "tp=2 pp=2"),
    f"{SMALL} {BLOCKWISE} gbs=4 numerics.data_shards=2": ("dp=1", "dp=2"),
    f"{CONTEXT} {TENSORWISE}": ("cp=1", "cp=2", "tp=2"),
    f"{CONTEXT} {BLOCKWISE}": ("cp=1", "cp=2"),
    f"{EXPERTS} {TENSORWISE}": ("tp=1", "tp=2 ep=2"),
    f"{EXPERTS} {BLOCKWISE}": ("tp=1", "tp=2 ep=2"),
    f"{LATENT} {TENSORWISE}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{LATENT} {BLOCKWISE}": ("tp=1", "tp=2 ep=2"),
    f"{SMALL} {TENSORWISE} model.mtp_num_layers=2 gbs=4 numerics.data_shards=2": (
        "dp=1",
        f"dp=2 {RECOMPUTED}",
        f"tp=2 {RECOMPUTED}",
    ),
    f"{SMALL} {BY_32} seq=32 model.mtp_num_layers=1": ("tp=1", f"tp=1 {RECOMPUTED}", f"tp=2 {RECOMPUTED}"),
    f"{SMALL} {BLOCKWISE} model.mtp_num_layers=1": ("tp=1", f"tp=2 {RECOMPUTED}"),
    f"{LATENT} {TENSORWISE} model.mtp_num_layers=1 gbs=2 numerics.data_shards=2": ("dp=1", "dp=2 ep=2", "pp=2"),
    f"{HYBRID} {NAMED}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{HYBRID} {NAMED} model.mtp_num_layers=1 model.mtp_hybrid_override_pattern=*M gbs=2 numerics.data_shards=2": (
        "dp=1",
        "dp=2",
        "pp=2",
    ),
    f"{DELTA} {TENSORWISE}": ("tp=1", "tp=2 ep=2", "pp=2"),
    f"{SINGLE_LAYER} {TENSORWISE} numerics=portable": ("tp=1", "tp=2"),
    f"{SINGLE_LAYER} {BLOCKWISE} numerics=portable": ("tp=1", "tp=2"),
}

# --- all ---

ONE_HYBRID = f"{_HYBRID} iters=1 model.hybrid_layer_pattern=ME*"
SHORT = {
    f"{SINGLE_LAYER} {TENSORWISE}": ("tp=1", "tp=2"),
    PORTABLE: ("tp=1", "tp=2"),
    f"{SHORTEST} numerics=gather": ("tp=1", "tp=2 sp=false"),
    ONE_HYBRID: ("tp=1", "tp=2 ep=2"),
    f"{SHORTEST} gbs=4 iters=2 numerics.data_shards=4": ("dp=1", f"dp=2 {OPTIM}", f"dp=2 {PARAMS}"),
}
ROWS = _STAGES | _CONTEXT | _DATA | _GROUPS | _MUON | _PORTABLE | _FP8 | _STRATEGIES | {STACKED: ("tp=1", "tp=2 ep=2")}
ROWS |= {f"{MODELS[model]} iters=2 {fixed}": layouts for model, fixed, layouts in _FAMILIES}

# Two layouts that stock numerics has; Bridge's OLMoE has none with tp.
_TP = ("tp=1", "tp=2")
_OF_FAMILIES = (
    *((model, "gbs=1", _TP) for model in MODELS if model not in ("moonlight", "nemotron", "olmoe", "qwen3")),
    ("olmoe", "", ("gbs=2 dp=1", "gbs=2 dp=2 ep=2")),
    ("glm", f"gbs=1 {RECOMPUTED}", _TP),
    ("next", f"gbs=1 {NEXT_DENSE}", _TP),
    ("deepseek", AHEAD, _TP),
    ("nemotron", HYBRID_AHEAD, _TP),
    ("nemotron", _OF_LATENTS, _TP),
    ("qwen3", f"gbs=1 {AHEAD} {RECOMPUTED}", _TP),
)
STOCK_SHORT = {ONE_HYBRID: ("tp=1", "tp=2 ep=2")}
_OF_FSDP = {f"{DENSE} iters=1 gbs={batch}": ("dp=2", f"dp=2 {fsdp}") for batch, fsdp in ((8, GRADS), (16, PARAMS))}
STOCK_ROWS = {f"{MODELS[model]} iters=1 {fixed}": layouts for model, fixed, layouts in _OF_FAMILIES} | _OF_FSDP | {
    f"{_SHORT} iters=1 {FP32} model.num_layers=1": _TP, f"{_MOE} iters=1 gbs=4": ("dp=2", "dp=2 ep=2"),
    STACKED: ("tp=1", "tp=2 ep=2"),
    **{
        f"{DENSE} {MUON} iters=1 gbs=1 optimizer.muon_tp_mode={mode}": _TP
        for mode in ("blockwise", "duplicated", "distributed")
    },
}  # fmt: skip
