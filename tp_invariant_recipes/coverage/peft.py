"""LoRA, the section `peft` of Bridge's class of that name: its rules, and what the invariant numerics cover of it.

A run adapts weights if it has the section (docs/finetuning.md).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tp_invariant_recipes.coverage.limit import Limit
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings import cuda_graphs, schema
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.settings.run_config import RunConfig, Tree, typed

SECTION = "peft"
# The layers that the invariant numerics adapt; those whose rows tensor parallelism splits come first.
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")
TARGETS = (*COLUMN_PARALLEL, "linear_proj", "linear_fc2")
# Others of Megatron's.
OTHERS = (
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "in_proj",
    "out_proj", "router",
)  # fmt: skip
# How Bridge lets a matrix begin (megatron/bridge/peft/utils.py).
METHODS = ("xavier", "normal", "kaiming", "zero")
METHOD_FIELDS = ("lora_A_init_method", "lora_B_init_method")
# What a folder of checkpoints of Bridge has, then one checkpoint in it.
_OF_A_CHECKPOINT = (
    "latest_train_state.pt",
    "latest_checkpointed_iteration.txt",
    "run_config.yaml",
    "metadata.json",
    ".metadata",
)
# Fields that a recipe states whatever their value, since rules read them and a section must not be empty.
STATED = ("target_modules", "dim", "alpha", "dropout")
# Fields that add other layers or sums.
OFF = ("exclude_modules", "canonical_mapping", "a2a_experimental", "sequence_parallel_input_regather", "lora_dtype")


def section(config: RunConfig) -> Mapping[str, Any] | None:
    """The section of a run with adapters; None: it trains all weights."""
    found: Mapping[str, Any] | None = config.bridge.get(SECTION)
    return found


def adapts(tree: Tree) -> bool:
    """Whether a run trains adapters alone."""
    return tree.get(SECTION) is not None


def targets(fields: Mapping[str, Any]) -> list[str]:
    """Names or patterns of the layers to adapt."""
    return list(fields.get("target_modules") or ()) if "target_modules" in fields else list(TARGETS)


def dim(fields: Mapping[str, Any]) -> int:
    """Bridge's default where nothing is said."""
    return fields.get("dim", 32)


def problems(tree: Tree) -> list[str]:
    """What is wrong with the settings of adapters, whatever the numerics."""
    config = typed(tree)
    fields = section(config)
    if fields is None:
        return []
    return [problem for rule in RULES if (problem := rule(config, fields))]


def check_base(tree: Tree) -> None:
    """Raises ConfigError: there is no checkpoint where the weights to adapt are to come from."""
    folder = Path(tree["checkpoint"]["pretrained_checkpoint"])
    if adapts(tree) and not any((folder / name).exists() for name in _OF_A_CHECKPOINT):
        raise ConfigError(f"checkpoint.pretrained_checkpoint={folder}: no checkpoint of Megatron-Bridge is there")


def _unknown(config: RunConfig, fields: Mapping[str, Any]) -> str | None:
    wrong = [name for name in targets(fields) if not {"*", "."} & set(name) and name not in (*TARGETS, *OTHERS)]
    if not wrong:
        return None
    return f"peft.target_modules: no layer is named {wrong[0]}{nearest(wrong[0], (*TARGETS, *OTHERS))}"


def _divided(config: RunConfig, fields: Mapping[str, Any]) -> str | None:
    tp, rank = config.model["tensor_model_parallel_size"], dim(fields)
    if rank % tp == 0 or not any(name.endswith(COLUMN_PARALLEL) for name in targets(fields)):
        return None
    return f"tp={tp} does not divide peft.dim={rank}, whose rows the ranks share; peft.dim={-(-rank // tp) * tp}"


def _base(config: RunConfig, fields: Mapping[str, Any]) -> str | None:
    if config.weights.folder or config.bridge["checkpoint"].get("pretrained_checkpoint"):
        return None
    return (
        "LoRA adapts weights that are there: weights=FOLDER of Hugging Face, or "
        "checkpoint.pretrained_checkpoint=RUN/checkpoints"
    )


def _methods(config: RunConfig, fields: Mapping[str, Any]) -> str | None:
    wrong = {name: fields[name] for name in METHOD_FIELDS if fields.get(name, METHODS[0]) not in METHODS}
    return next((f"peft.{n}={v}: adapters begin with {', '.join(METHODS)} only" for n, v in wrong.items()), None)


def _drawn(config: RunConfig, fields: Mapping[str, Any]) -> str | None:
    if config.numerics.mode != "stock" or config.numerics.initial_weights != "invariant":
        return None
    if _dense(config) and {*targets(fields)} <= {*TARGETS}:
        return None
    return (
        f"numerics.initial_weights=invariant draws adapters of {', '.join(TARGETS)} in dense models only; "
        f"numerics.initial_weights=megatron"
    )


def _dense(config: RunConfig) -> bool:
    return config.model.get("_target_") == schema.PROVIDERS[0] and not config.model.get("num_moe_experts")


RULES: tuple[Callable[[RunConfig, Mapping[str, Any]], str | None], ...] = (
    _unknown,
    _divided,
    _base,
    _methods,
    _drawn,
)


def _row(wrong: Callable[[RunConfig, Mapping[str, Any]], Any], why: str) -> Limit:
    """wrong: of a run with adapters, and of its section."""
    return Limit(lambda t: (fields := section(t)) is not None and bool(wrong(t, fields)), why)


def _off(name: str) -> Callable[[RunConfig, Mapping[str, Any]], bool]:
    return lambda t, fields: bool(fields.get(name))


# The limits of the invariant numerics.
LIMITS = (
    _row(lambda t, _: t.numerics.mode != "tree", "LoRA is covered by numerics=tree only"),
    _row(
        lambda t, _: not _dense(t),
        "LoRA is covered for dense models of attention and feed-forward layers: adapters of experts, Mamba layers and "
        "multi-latent attention have no invariant version; a dense model, or a recipe that trains all weights",
    ),
    _row(
        lambda t, fields: not targets(fields) or {*targets(fields)} - {*TARGETS},
        f"of layers only {', '.join(TARGETS)} have invariant adapters, in all layers alike; name these in "
        f"peft.target_modules",
    ),
    _row(
        lambda t, fields: fields.get("dropout"),
        "dropout of adapters draws other numbers in every layout; peft.dropout=0",
    ),
    *(_row(_off(name), f"peft.{name} is not covered; leave it unset") for name in OFF),
    _row(
        lambda t, _: t.model["context_parallel_size"] > 1 or (t.numerics.context_shards or 1) > 1,
        "LoRA has no version with context shards; cp=1, and leave numerics.context_shards out",
    ),
    _row(
        lambda t, _: cuda_graphs.asked_for(t.model),
        "adapters have not been captured in CUDA graphs; cuda_graph=off",
    ),
    _row(
        lambda t, _: t.model.get("pipeline_model_parallel_layout"),
        "a stage without layers has no adapter to send a gradient to; model.pipeline_model_parallel_layout=null",
    ),
)  # fmt: skip
