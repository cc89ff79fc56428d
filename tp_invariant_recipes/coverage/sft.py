"""Fine-tuning on examples, Bridge's GPTSFTDatasetConfig: its rules, and what tpi fills in (docs/finetuning.md)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tp_invariant_recipes.coverage.limit import Limit
from tp_invariant_recipes.settings.run_config import RunConfig, Tree, typed
from tp_invariant_recipes.settings.schema import PROVIDER, SFT_DATASET

# Fields that name or make data of Hugging Face. tpi trains on the user's own files, and takes these from no recipe.
DOWNLOADS = (
    "hf_dataset",
    "hf_validation_dataset",
    "hf_test_dataset",
    "hf_output_root",
    "hf_validation_proportion",
    "hf_rewrite",
)
# Bridge reads them from `dataset.dataset_root`.
TRAINING, VALIDATION = "training.jsonl", "validation.jsonl"
# The columns of an example where a recipe names none (megatron/bridge/data/builders/gpt_sft.py).
COLUMNS = ("input", "output")
# Keys of dataset_kwargs by which Bridge's older recipes say what an example is.
OLDER = ("prompt_template", "label_key", "chat")
INDEX = "index_mapping_dir"
# Keys that say where files of a run on examples lie; a digest says what is in them.
PLACES = ("tokenizer.tokenizer_model", f"dataset.dataset_kwargs.{INDEX}")


def is_sft(dataset: Mapping[str, Any]) -> bool:
    """Whether a section `dataset` is of examples."""
    return dataset.get(PROVIDER) == SFT_DATASET


def columns(dataset: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of the texts that each example must have; none where it is a conversation or has a template of its own.

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
    """The names of the files in `dataset.dataset_root` that a run reads."""
    return [TRAINING, *([VALIDATION] if config.bridge["validation"].get("eval_iters") else [])]


def with_index(dataset: Mapping[str, Any], folder: Path | str) -> dict[str, Any]:
    """A section `dataset` of any kind whose index is written to `folder`."""
    if is_sft(dataset):
        return {**dataset, "dataset_kwargs": {**(dataset.get("dataset_kwargs") or {}), INDEX: str(folder)}}
    return {**dataset, "path_to_cache": str(folder)}


def problems(tree: Tree) -> list[str]:
    """What is wrong with the settings of a run on examples, whatever its numerics."""
    config = typed(tree)
    if not is_sft(config.bridge["dataset"]):
        return []
    return [problem for rule in RULES if (problem := rule(config))]


def _at(config: RunConfig, name: str) -> Any:
    return config.bridge["dataset"].get(name)


def _kind(config: RunConfig) -> str | None:
    if config.data.kind == "recipe":
        return None
    return f"data={config.data.kind}: this recipe trains on examples; leave it out, dataset.dataset_root=FOLDER"


def _source(config: RunConfig) -> str | None:
    if asked := [name for name in DOWNLOADS if _at(config, name) not in (None, False)]:
        named = ", ".join(f"dataset.{name}" for name in asked)
        return f"{named}: tpi downloads no examples; leave it out, dataset.dataset_root=FOLDER has {TRAINING}"
    if _at(config, "dataset_root") is None:
        return f"a recipe for fine-tuning needs dataset.dataset_root=FOLDER, which has {TRAINING}: an example a line"
    return None


def _packing(config: RunConfig) -> str | None:
    asked = [name for name in ("enable_offline_packing", "offline_packing_specs") if _at(config, name)]
    if not asked:
        return None
    return (
        f"dataset.{asked[0]}: packed sequences need attention that ends with each example, which tpi does not cover; "
        f"dataset.enable_offline_packing=false"
    )


def _loader(config: RunConfig) -> str | None:
    kind = _at(config, "dataloader_type")
    if kind == "batch":
        return None
    return f"dataset.dataloader_type={kind}: it does not go through the examples again; dataset.dataloader_type=batch"


def _epochs(config: RunConfig) -> str | None:
    epochs = config.bridge["train"].get("num_epochs")
    return f"train.num_epochs={epochs}: tpi counts steps; leave it unset, iters=N" if epochs is not None else None


def _tokenizer(config: RunConfig) -> str | None:
    tokenizer = config.bridge["tokenizer"]
    kind, model = tokenizer.get("tokenizer_type"), tokenizer.get("tokenizer_model")
    if kind != "HuggingFaceTokenizer":
        return f"tokenizer.tokenizer_type={kind}: examples are text; tokenizer.tokenizer_type=HuggingFaceTokenizer"
    return None if model else "a recipe for fine-tuning needs tokenizer.tokenizer_model=FOLDER, of Hugging Face"


def _index(config: RunConfig) -> str | None:
    where = (_at(config, "dataset_kwargs") or {}).get(INDEX)
    return f"dataset.dataset_kwargs.{INDEX}={where}: the index goes to run.dir; set run.dir=PATH" if where else None


def _validation(config: RunConfig) -> str | None:
    if not config.bridge["validation"].get("eval_iters") or _at(config, "do_validation") is not False:
        return None
    return "validation.eval_iters without examples to validate; dataset.do_validation=true, or validation.eval_iters=0"


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _kind,
    _source,
    _packing,
    _loader,
    _epochs,
    _tokenizer,
    _index,
    _validation,
)


def _tuned(wrong: Callable[[RunConfig], Any]) -> Callable[[RunConfig], bool]:
    """What is wrong with a run on examples alone."""
    return lambda t: is_sft(t.bridge.get("dataset", {})) and bool(wrong(t))


def _options(config: RunConfig) -> Mapping[str, Any]:
    return _at(config, "dataset_kwargs") or {}


# The limits of the invariant numerics.
LIMITS = (
    Limit(_tuned(lambda t: t.numerics.mode != "tree"), "fine-tuning is covered by numerics=tree only"),
    Limit(
        _tuned(lambda t: not _options(t).get("pad_to_max_length")),
        "how far an example is padded depends on the others of its rank; dataset.dataset_kwargs.pad_to_max_length=true",
    ),
    Limit(
        _tuned(lambda t: _options(t).get("get_attention_mask_from_fusion") is False),
        "a mask of the data's own has no invariant version; dataset.dataset_kwargs.get_attention_mask_from_fusion=true",
    ),
    Limit(
        _tuned(lambda t: _at(t, "drop_last") is False),
        "a step of fewer examples has other data shards; dataset.drop_last=true",
    ),
    Limit(
        _tuned(lambda t: t.model["context_parallel_size"] > 1 or (t.numerics.context_shards or 1) > 1),
        "fine-tuning with context parallelism is not covered: a shard may have no token that counts; cp=1, and leave "
        "numerics.context_shards out",
    ),
    Limit(
        lambda t: bool(t.model.get("calculate_per_token_loss")) and t.numerics.mode != "tree",
        "a loss divided by the tokens of a step is covered by numerics=tree only; model.calculate_per_token_loss=false",
    ),
    Limit(
        lambda t: bool(t.model.get("calculate_per_token_loss"))
        and (t.model["context_parallel_size"] > 1 or (t.numerics.context_shards or 1) > 1),
        "context-parallel ranks would count a sequence's tokens several times; model.calculate_per_token_loss=false",
    ),
    Limit(
        lambda t: bool(t.model.get("calculate_per_token_loss") and t.model.get("num_moe_experts")),
        "how an auxiliary loss of experts counts beside a loss a token is not covered; "
        "model.calculate_per_token_loss=false",
    ),
)  # fmt: skip
