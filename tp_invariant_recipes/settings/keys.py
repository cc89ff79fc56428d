# SPDX-License-Identifier: Apache-2.0
"""Short keys: what people type for the fields they change most; and the nearest of what they may have meant."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

# The closest real name to a misspelt one.

RECIPES = "_config"  # at the end of the name of a recipe
_MODES = ("pretrain", "sft", "peft")


def did_you_mean(names: Iterable[str]) -> str:
    """Return a hint that offers these names; nothing where there are none."""
    shown = "' or '".join(names)
    return f"; did you mean '{shown}'?" if shown else ""


def _stem(recipe: str) -> str:
    """Return what distinguishes a recipe from those of its kind, whose name may be misspelt."""
    stem = recipe.removesuffix(RECIPES)
    model, _, kind = stem.rpartition("_")
    return model if model and get_close_matches(kind, _MODES, n=1, cutoff=0.75) else stem


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint to append to an error: "; did you mean 'x'?", or the names when few, or nothing."""
    known = sorted(set(names))
    if name.endswith(RECIPES):  # what most recipes end in says nothing about which is meant
        stems = {recipe: _stem(recipe) for recipe in known if recipe.endswith(RECIPES)}
        closest = get_close_matches(_stem(name), {*stems.values()}, n=1, cutoff=0.75)
        kinds = [recipe for recipe, stem in stems.items() if stem in closest]
        return did_you_mean(get_close_matches(name, kinds, n=1, cutoff=0.0))
    close = get_close_matches(name, known, n=1, cutoff=0.6) or get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if not close and "." in name:
        # The section may be wrong while the field is right.
        leaf = name.rpartition(".")[2]
        close = (
            get_close_matches(leaf, [k for k in known], n=1, cutoff=0.75)
            or [k for k in known if k.rpartition(".")[2] == leaf][:1]
        )
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there are: {', '.join(known)}" if 0 < len(known) <= 12 else ""


# Flags of Megatron-LM whose names Bridge's fields do not have, and words of other trainers: what to type for each.

# Flag, without dashes -> keys, the first best; with a value where the flag stands for one.
FLAGS: dict[str, tuple[str, ...]] = {
    "apply_layernorm_1p": ("model.layernorm_zero_centered_gamma=true",),
    "swiglu": ("model.gated_linear_unit=true",),
    "squared_relu": ("model.activation_func",),
    "group_query_attention": ("model.num_query_groups",),
    "decoder_first_pipeline_num_layers": ("model.num_layers_in_first_pipeline_stage",),
    "decoder_last_pipeline_num_layers": ("model.num_layers_in_last_pipeline_stage",),
    "num_layers_per_virtual_pipeline_stage": ("model.virtual_pipeline_model_parallel_size",),
    "num_virtual_stages_per_pipeline_rank": ("model.virtual_pipeline_model_parallel_size",),
    "untie_embeddings_and_output_weights": ("model.share_embeddings_and_output_weights=false",),
    "disable_bias_linear": ("model.add_bias_linear=false",),
    "norm_epsilon": ("model.layernorm_epsilon",),
    "use_rotary_position_embeddings": ("model.position_embedding_type=rope",),
    "no_rope_fusion": ("model.apply_rope_fusion=false",),
    "no_masked_softmax_fusion": ("model.masked_softmax_fusion=false",),
    "no_bias_swiglu_fusion": ("model.bias_activation_fusion=false",),
    "no_bias_gelu_fusion": ("model.bias_activation_fusion=false",),
    "no_bias_dropout_fusion": ("model.bias_dropout_fusion=false",),
    "no_gradient_accumulation_fusion": ("model.gradient_accumulation_fusion=false",),
    "no_persist_layer_norm": ("model.persist_layer_norm=false",),
    "recompute_activations": ("model.recompute_granularity=selective",),
    "use_flash_attn": ("model.attention_backend=flash",),
    "num_experts": ("model.num_moe_experts",),
    "max_position_embeddings": ("seq",),
    "accumulate_allreduce_grads_in_fp32": ("ddp.grad_reduce_in_fp32=true",),
    "no_check_for_nan_in_loss_and_grad": ("ddp.check_for_nan_in_grad=false",),
    "no_load_optim": ("checkpoint.load_optim=false",),
    "no_save_optim": ("checkpoint.save_optim=false",),
    "use_torch_fsdp2": ("dist.use_torch_fsdp2",),
    "data_path": ("data.path",),
    "tokenizer_model": ("data.tokenizer", "tokenizer.tokenizer_model"),
    "mock_data": ("data=mock",),
    "bf16": ("precision=bf16",),
    "fp32": ("precision=fp32",),
    "fp8_format": ("precision=fp8_tensorwise", "precision=fp8_blockwise"),
    "fp8_recipe": ("precision=fp8_tensorwise", "precision=fp8_blockwise"),
    "wandb_project": ("project",),
    "wandb_exp_name": ("name",),
    "steps": ("iters",),
    "max_steps": ("iters",),
    "per_device_train_batch_size": ("mbs",),
    "warmup_steps": ("scheduler.lr_warmup_iters",),
}


@dataclass(frozen=True)
class ShortKey:
    """`name=VALUE` on the command line stands for `path=VALUE`. type: a hint, as settings/values.py converts to it."""

    name: str
    path: str
    type: Any
    help: str


SHORT_KEYS = {
    key.name: key
    for key in (
        ShortKey("tp", "model.tensor_model_parallel_size", int, "tensor-parallel degree"),
        ShortKey("pp", "model.pipeline_model_parallel_size", int, "pipeline-parallel degree"),
        ShortKey("dp", "parallel.data_parallel_size", int, "data-parallel degree"),
        ShortKey("cp", "model.context_parallel_size", int, "context-parallel degree"),
        ShortKey("ep", "model.expert_model_parallel_size", int, "expert-parallel degree"),
        ShortKey("etp", "model.expert_tensor_parallel_size", int, "tensor-parallel degree of the experts"),
        ShortKey("sp", "model.sequence_parallel", bool, "sequence parallelism (default: on when tp > 1)"),
        ShortKey("seq", "model.seq_length", int, "sequence length, tokens"),
        ShortKey(
            "mbs",
            "train.micro_batch_size",
            int,
            "micro-batch size, sequences; numerics=stock alone computes them at once",
        ),
        ShortKey("gbs", "train.global_batch_size", int, "global batch size, sequences"),
        ShortKey("iters", "train.train_iters", int, "training steps"),
        ShortKey("lr", "optimizer.lr", float, "peak learning rate"),
        ShortKey("seed", "rng.seed", int, "seed of weights and data order"),
        ShortKey("save", "checkpoint.save_interval", int, "steps between checkpoints; 0: only on SIGTERM"),
        ShortKey("project", "logging.project", str | None, "project of wandb and Comet, experiment of MLflow"),
        ShortKey("name", "logging.name", str | None, "name of the run there (default: run.dir's)"),
        ShortKey("weights", "weights.folder", str | None, "folder of the Hugging Face weights to start from"),
    )
}


def suggestions(name: str) -> list[str]:
    """Return the keys that a word of another program may mean: `learning_rate`, `--global-batch-size`, `TP`,
    `--swiglu`.

    Of a flag that stands for a value, with the value.
    """
    plain = name.lstrip("-").lower().replace("-", "_")
    if plain in FLAGS:
        return [*FLAGS[plain]]
    words = plain.replace("_", " ")
    return [
        key.name
        for key in SHORT_KEYS.values()
        if plain in (key.name, key.path.rpartition(".")[2])
        or (len(words) > 4 and words in key.help.partition(";")[0].replace("-", " "))
    ]
