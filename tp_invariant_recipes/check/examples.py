"""The rules of fine-tuning on examples, whatever the numerics (docs/finetuning.md)."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.check.rule import Rule, value_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import sft
from tp_invariant_recipes.settings.run_config import RunConfig

_INDEX = f"dataset.dataset_kwargs.{sft.INDEX}"


def _row(
    test: Callable[[RunConfig], Any], text: str = "", solve: str = "", head: Callable[[RunConfig], str] | None = None
) -> Rule[RunConfig]:
    """Return a rule of runs on examples."""
    return Rule(test, text, solve, needs=lambda t: sft.is_sft(t.section("dataset")), head=head)


def _downloads(config: RunConfig) -> list[str]:
    return [f"dataset.{name}" for name in sft.DOWNLOADS if config.at(f"dataset.{name}") not in (None, False)]


def _index(config: RunConfig) -> Any:
    return (config.at("dataset.dataset_kwargs") or {}).get(sft.INDEX)


def _packing(config: RunConfig) -> Problem | None:
    specs, section = sft.packing(config), f"dataset.{sft.PACKING}"
    if specs is None:
        return None
    size, length = specs.get("packed_sequence_size"), config.shape.sequence
    if size != length:
        key = f"{section}.packed_sequence_size"
        return Problem(f"{key}={size}", f"a row has model.seq_length={length} tokens", f"{key}={length} or seq={size}")
    if places := [f"{section}.{name}" for name in sft.PACKED_FILES if specs.get(name) is not None]:
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


RULES = (
    _row(
        lambda t: t.data.kind != "recipe",
        "this recipe trains on examples",
        "leave it out, dataset.dataset_root=FOLDER",
        head=lambda t: f"data={t.data.kind}",
    ),
    _row(
        _downloads,
        "tpi downloads no examples",
        f"leave it out, dataset.dataset_root=FOLDER has {sft.TRAINING}",
        head=lambda t: ", ".join(_downloads(t)),
    ),
    _row(
        lambda t: not _downloads(t) and t.at("dataset.dataset_root") is None,
        f"a recipe for fine-tuning needs dataset.dataset_root=FOLDER, which has {sft.TRAINING}: an example a line",
    ),
    _row(_packing),
    _row(
        lambda t: t.at("dataset.dataloader_type") != "batch",
        "it does not go through the examples again",
        "dataset.dataloader_type=batch",
        head=value_of("dataset.dataloader_type"),
    ),
    _row(_tokenizer),
    _row(_index, "the index goes to run.dir", "set run.dir=PATH", head=lambda t: f"{_INDEX}={_index(t)}"),
    _row(
        lambda t: t.at("validation.eval_iters") and t.at("dataset.do_validation") is False,
        "validation.eval_iters without examples to validate",
        "dataset.do_validation=true, or validation.eval_iters=0",
    ),
)
