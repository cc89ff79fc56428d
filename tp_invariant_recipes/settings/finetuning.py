# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: examples (SFT) in the section dataset, and adapters (LoRA) in the section peft."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tp_invariant_recipes.numerics.megatron.covered_layers import COLUMN_PARALLEL, ROW_PARALLEL, WHOLE
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.schema import PROVIDER, SFT_DATASET

# The section `dataset` of a run on examples, Bridge's GPTSFTDatasetConfig (docs/finetuning.md).

# Fields that name or make data of Hugging Face. tpi trains on the user's own files, and takes these from no recipe.
DOWNLOADS = (
    *("hf_dataset", "hf_validation_dataset", "hf_test_dataset", "hf_output_root", "hf_validation_proportion"),
    "hf_rewrite",
)
# Bridge reads them from `dataset.dataset_root`.
TRAINING, VALIDATION = "training.jsonl", "validation.jsonl"
# The columns of an example where a recipe names none (megatron/bridge/data/builders/gpt_sft.py).
COLUMNS = ("input", "output")
# Keys of dataset_kwargs by which Bridge's older recipes say what an example is.
OLDER = ("prompt_template", "label_key", "chat")
INDEX = "index_mapping_dir"
PACKING = "offline_packing_specs"
PACKED_FILES = ("packed_train_data_path", "packed_val_data_path", "packed_metadata_path")
# Keys that say where files of a run on examples lie; a digest says what is in them.
PLACES = ("tokenizer.tokenizer_model", f"dataset.dataset_kwargs.{INDEX}")


def is_sft(dataset: Mapping[str, Any]) -> bool:
    """Whether a section `dataset` is of examples."""
    return dataset.get(PROVIDER) == SFT_DATASET


def columns(dataset: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the texts that each example must have; none where it is a conversation or has a template of
    its own.

    dataset: of a composed tree.
    """
    preprocessing = dataset.get("preprocessing")
    if preprocessing is None:
        return () if any(key in (dataset.get("dataset_kwargs") or {}) for key in OLDER) else COLUMNS
    pair = (preprocessing.get("prompt_column"), preprocessing.get("completion_column"))
    return () if None in pair else pair


def is_chat(dataset: Mapping[str, Any]) -> bool:
    """Whether an example is a conversation, to which the tokenizer's chat template is applied."""
    preprocessing = dataset.get("preprocessing")
    return preprocessing is not None and "prompt_column" not in preprocessing


def files(config: RunConfig) -> list[str]:
    """Return the names of the files in `dataset.dataset_root` that a run reads."""
    return [TRAINING, *([VALIDATION] if config.section("validation").get("eval_iters") else [])]


def packing(config: RunConfig) -> Mapping[str, Any] | None:
    """How examples are packed into rows, Bridge's PackedSequenceSpecs; None: each has a row of its own."""
    dataset = config.section("dataset")
    return dataset.get(PACKING) or {} if is_sft(dataset) and dataset.get("enable_offline_packing") else None


def with_index(config: RunConfig, folder: Path | str) -> RunConfig:
    """Return the configuration with the index of its data, examples or not, in `folder`."""
    dataset = config.section("dataset")
    if is_sft(dataset):
        options = {**(dataset.get("dataset_kwargs") or {}), INDEX: str(folder)}
        return config.with_fields("dataset", dataset_kwargs=options)
    return config.with_fields("dataset", path_to_cache=str(folder))


def index_folder(config: RunConfig) -> Path | None:
    """Where the index of the data lies; None: each rank builds its own in memory."""
    dataset = config.section("dataset")
    folder = (dataset.get("dataset_kwargs") or {}).get(INDEX) if is_sft(dataset) else dataset.get("path_to_cache")
    return Path(folder) if folder else None


# The section `peft`, Bridge's class LoRA: a run adapts weights if it has the section (docs/finetuning.md).

SECTION = "peft"
# The layers that Bridge adapts where nothing is set.
DEFAULT = ("linear_qkv", "linear_fc1", "linear_proj", "linear_fc2")
FEED_FORWARD = ("linear_fc1", "linear_fc2")
TARGETS = (*COLUMN_PARALLEL, *ROW_PARALLEL, *WHOLE)
OTHERS = ("router",)  # of Megatron's
# Letters of a hybrid model's layers, as in `hybrid_layer_pattern` -> what can be adapted of them.
OF_LAYERS = {"M": ("in_proj", "out_proj"), "*": ("linear_qkv", "linear_proj"), "E-": FEED_FORWARD}
# How Bridge lets a matrix begin (megatron/bridge/peft/utils.py).
METHODS = ("xavier", "normal", "kaiming", "zero")
METHOD_FIELDS = ("lora_A_init_method", "lora_B_init_method")
# Fields that a recipe states whatever their value, since rules read them and a section must not be empty.
STATED = ("target_modules", "dim", "alpha", "dropout")


def section(config: RunConfig) -> Mapping[str, Any] | None:
    """Return the section of a run with adapters; None: it trains all weights."""
    return config.sections.get(SECTION)


def adapts(config: RunConfig) -> bool:
    """Whether a run trains adapters alone."""
    return section(config) is not None


def loses_bias(config: RunConfig) -> bool:
    """Whether steps move the bias of experts, which adapters' checkpoints lack: it is no weight, and never frozen."""
    moves = config.model.get("moe_router_enable_expert_bias") and config.model.get("moe_router_bias_update_rate") != 0
    return adapts(config) and bool(moves)


def targets(fields: Mapping[str, Any]) -> list[str]:
    """Names or patterns of the layers to adapt."""
    return list(fields.get("target_modules") or ()) if "target_modules" in fields else list(DEFAULT)


def of_feed_forward(fields: Mapping[str, Any]) -> bool:
    """Whether they are also of feed-forward layers, which have the names of experts' layers."""
    return bool({*FEED_FORWARD} & {*targets(fields)})


def dim(fields: Mapping[str, Any]) -> int:
    """Bridge's default where nothing is set."""
    return fields.get("dim", 32)
