"""The section `dataset` of a run on examples, Bridge's GPTSFTDatasetConfig (docs/finetuning.md)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.schema import PROVIDER, SFT_DATASET

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
