# SPDX-License-Identifier: Apache-2.0
"""Rules of fine-tuning: examples, adapters, and weights from a folder of Hugging Face."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tp_invariant_recipes.check.invariant import training as training_rules
from tp_invariant_recipes.check.rule import Rule, value_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import finetuning, low_precision
from tp_invariant_recipes.settings.keys import nearest
from tp_invariant_recipes.settings.run_config import RunConfig

# The rules of fine-tuning on examples, whatever the numerics (docs/finetuning.md).

_INDEX = f"dataset.dataset_kwargs.{finetuning.INDEX}"


_row = partial(Rule, needs=lambda t: finetuning.is_sft(t.section("dataset")))


def _downloads(config: RunConfig) -> list[str]:
    return [f"dataset.{name}" for name in finetuning.DOWNLOADS if config.at(f"dataset.{name}") not in (None, False)]


def _index(config: RunConfig) -> Any:
    return (config.at("dataset.dataset_kwargs") or {}).get(finetuning.INDEX)


def _packing(config: RunConfig) -> Problem | None:
    specs, section = finetuning.packing(config), f"dataset.{finetuning.PACKING}"
    if specs is None:
        return None
    size, length = specs.get("packed_sequence_size"), config.shape.sequence
    if size != length:
        key = f"{section}.packed_sequence_size"
        return Problem(f"{key}={size}", f"a row has model.seq_length={length} tokens", f"{key}={length} or seq={size}")
    if places := [f"{section}.{name}" for name in finetuning.PACKED_FILES if specs.get(name) is not None]:
        return Problem(places[0], "tpi packs the examples of dataset.dataset_root", f"{places[0]}=null")
    if config.device.kind == "cpu" and not config.numerics.invariant:
        return Problem("", "on a CPU Megatron-Core has no attention for packed sequences but with numerics=tree")
    return None


def _tokenizer(config: RunConfig) -> Problem | None:
    key = "tokenizer.tokenizer_type"
    if (kind := config.at(key)) != "HuggingFaceTokenizer":
        return Problem(f"{key}={kind}", "examples are text", f"{key}=HuggingFaceTokenizer")
    if config.at("tokenizer.tokenizer_model"):
        return None
    return Problem("", "a recipe for fine-tuning needs tokenizer.tokenizer_model=FOLDER, of Hugging Face")


EXAMPLE_RULES: tuple[Rule[RunConfig], ...] = (
    _row(lambda t: t.data.kind != "recipe", "this recipe trains on examples",
        "leave it out, dataset.dataset_root=FOLDER", head=lambda t: f"data={t.data.kind}"),
    _row(_downloads, "tpi downloads no examples",
        f"leave it out, dataset.dataset_root=FOLDER has {finetuning.TRAINING}",
        head=lambda t: ", ".join(_downloads(t))),
    _row(lambda t: not _downloads(t) and t.at("dataset.dataset_root") is None,
        "a recipe for fine-tuning needs dataset.dataset_root=FOLDER, "
        f"which has {finetuning.TRAINING}: an example a line"),
    _row(_packing),
    _row(lambda t: t.at("dataset.dataloader_type") != "batch", "it does not go through the examples again",
        "dataset.dataloader_type=batch", head=value_of("dataset.dataloader_type")),
    _row(_tokenizer),
    _row(_index, "the index goes to run.dir", "set run.dir=PATH", head=lambda t: f"{_INDEX}={_index(t)}"),
    _row(lambda t: t.at("validation.eval_iters") and t.at("dataset.do_validation") is False,
        "validation.eval_iters without examples to validate",
        "dataset.do_validation=true, or validation.eval_iters=0"),
)  # fmt: skip


# The rules of LoRA, whatever the numerics (docs/finetuning.md).

Fields = Mapping[str, Any]  # of a section `peft`

_SHARED = "peft.share_expert_adapters"


def _unknown(config: RunConfig, fields: Fields) -> Problem | None:
    known = (*finetuning.TARGETS, *finetuning.OTHERS)
    wrong = next((name for name in finetuning.targets(fields) if not {"*", "."} & {*name} and name not in known), None)
    return Problem("peft.target_modules", f"no layer is named {wrong}{nearest(wrong, known)}") if wrong else None


def _divided(config: RunConfig, fields: Fields) -> Problem | None:
    tp, rank = config.layout.tp, finetuning.dim(fields)
    shared = any(name.endswith((*finetuning.COLUMN_PARALLEL, *finetuning.WHOLE)) for name in finetuning.targets(fields))
    if rank % tp == 0 or not (shared or training_rules.of_experts(config, fields)):
        return None
    text = f"tp={tp} does not divide peft.dim={rank}, whose rows the ranks share"
    return Problem("", text, f"peft.dim={-(-rank // tp) * tp}")


def _latents(config: RunConfig, fields: Fields) -> Problem | None:
    shape, tp = config.shape, config.layout.tp
    widths = {"linear_q_down_proj": shape.query_latent, "linear_kv_down_proj": shape.key_latent + shape.turned_key}
    wrong = next((name for name in finetuning.WHOLE if name in finetuning.targets(fields) and widths[name] % tp), None)
    if wrong is None:
        return None
    text = f"tp={tp} does not divide the {widths[wrong]} rows of an adapter of {wrong}"
    return Problem("", text, "leave it out of peft.target_modules")


def _methods(config: RunConfig, fields: Fields) -> Problem | None:
    wrong = {
        name: fields[name]
        for name in finetuning.METHOD_FIELDS
        if fields.get(name, finetuning.METHODS[0]) not in finetuning.METHODS
    }
    only = f"adapters begin with {', '.join(finetuning.METHODS)} only"
    return next((Problem(f"peft.{name}={value}", only) for name, value in wrong.items()), None)


def _draws_others(config: RunConfig, fields: Fields) -> bool:
    """Whether invariant weights are wanted of adapters that have none under stock numerics."""
    if config.numerics.invariant or config.numerics.initial_weights != "invariant":
        return False
    return training_rules.of_experts(config, fields) or not {*finetuning.targets(fields)} <= {*finetuning.TARGETS}


def _shares_adapter(config: RunConfig, fields: Fields) -> bool:
    """Whether experts that are not grouped would share an adapter."""
    grouped = config.numerics.invariant or config.model.get("moe_grouped_gemm")
    return not grouped and bool(fields.get("share_expert_adapters")) and training_rules.of_experts(config, fields)


def _cut_off(config: RunConfig, fields: Fields) -> Problem | None:
    """Return why parts of the first layer, at whose inputs frozen weights leave no gradient, are not computed again.

    Megatron-Core passes no gradient out of such a part, so its adapters are not trained; a norm is an error in a rank.
    """
    if config.model.get("recompute_granularity") != "selective":
        return None
    parts = ["layernorm"] if config.numerics.invariant or config.device.kind == "cpu" else []
    if all(name.endswith((*finetuning.FEED_FORWARD, *finetuning.OTHERS)) for name in finetuning.targets(fields)):
        parts += ("mlp", "moe", "shared_experts")
    wrong = ", ".join(part for part in config.model.get("recompute_modules") or () if part in parts)
    text = "no adapter comes before it in the first layer, and Megatron-Core needs a gradient at its input"
    return Problem("model.recompute_modules", f"{wrong}: {text}", f"leave {wrong} out") if wrong else None


_rule = partial(Rule, needs=finetuning.adapts, of=lambda t: (t, finetuning.section(t)))

ADAPTER_RULES = (
    _rule(_unknown),
    _rule(_divided),
    _rule(_latents),
    _rule(lambda t, _: not (t.weights.folder or t.at("checkpoint.pretrained_checkpoint")),
        "LoRA adapts weights that are there: weights=FOLDER of Hugging Face, or "
        "checkpoint.pretrained_checkpoint=RUN/checkpoints"),
    _rule(_methods),
    _rule(_draws_others,
        f"numerics.initial_weights=invariant draws adapters of {', '.join(finetuning.TARGETS)} and of no experts",
        "numerics.initial_weights=megatron"),
    _rule(_cut_off),
    _rule(_shares_adapter, "experts that are not grouped have an adapter each", f"{_SHARED}=false, or numerics=tree",
        head=value_of(_SHARED)),
)  # fmt: skip


# Settings that contradict weights from a folder of Hugging Face.

# What must be off.
OFF = {
    "model.init_model_with_meta_device": "the parameters have memory",
    "ddp.use_megatron_fsdp": "they are sharded",
    "dist.use_torch_fsdp2": "they are sharded",
}

_of_folder = partial(
    Rule[RunConfig], needs=lambda t: t.weights.folder is not None, head=lambda t: f"weights={t.weights.folder}"
)


def _sets(path: str) -> Callable[[RunConfig], Any]:
    return lambda t: t.at(path)


def _draws(config: RunConfig) -> bool:
    """Whether stock numerics are to draw what the folder has. Adapters are new: the folder does not have them."""
    stock = not config.numerics.invariant and config.numerics.initial_weights == "invariant"
    return stock and not finetuning.adapts(config)


def _in_fp8(config: RunConfig) -> bool:
    precision = config.mixed_precision
    return isinstance(precision, dict) and any(precision.get(name) for name in low_precision.FP8_WEIGHTS)


WEIGHTS_RULES: tuple[Rule[RunConfig], ...] = (
    _of_folder(_sets("checkpoint.pretrained_checkpoint"), "checkpoint.pretrained_checkpoint says where weights come "
        "from, too", "leave one of them out"),
    _of_folder(_draws, "the folder has the weights", "leave numerics.initial_weights=invariant out"),
    _of_folder(_in_fp8, "weights are not imported into fp8", "mixed_precision.fp8_param_gather=false"),
    *(_of_folder(_sets(path), f"weights are imported before {why}", f"{path}=false") for path, why in OFF.items()),
)  # fmt: skip
