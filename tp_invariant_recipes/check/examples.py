"""The rules of fine-tuning on examples, whatever the numerics (docs/finetuning.md)."""

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import sft
from tp_invariant_recipes.settings.run_config import RunConfig


def _kind(config: RunConfig) -> Problem | None:
    if config.data.kind == "recipe":
        return None
    return Problem(
        f"data={config.data.kind}", "this recipe trains on examples", "leave it out, dataset.dataset_root=FOLDER"
    )


def _source(config: RunConfig) -> Problem | None:
    if requested := [name for name in sft.DOWNLOADS if sft.field(config, name) not in (None, False)]:
        named = ", ".join(f"dataset.{name}" for name in requested)
        return Problem(
            named, "tpi downloads no examples", f"leave it out, dataset.dataset_root=FOLDER has {sft.TRAINING}"
        )
    if sft.field(config, "dataset_root") is None:
        return Problem(
            "",
            f"a recipe for fine-tuning needs dataset.dataset_root=FOLDER, which has {sft.TRAINING}: an example a line",
        )
    return None


def _packing(config: RunConfig) -> Problem | None:
    specs, section = sft.packing(config), f"dataset.{sft.PACKING}"
    if specs is None:
        return None
    size, length = specs.get("packed_sequence_size"), config.shape.sequence
    if size != length:
        return Problem(
            f"{section}.packed_sequence_size={size}",
            f"a row has model.seq_length={length} tokens",
            f"{section}.packed_sequence_size={length} or seq={size}",
        )
    if places := [name for name in sft.PACKED_FILES if specs.get(name) is not None]:
        return Problem(
            f"{section}.{places[0]}", "tpi packs the examples of dataset.dataset_root", f"{section}.{places[0]}=null"
        )
    if config.device.kind == "cpu" and not config.numerics.invariant:
        return Problem("", "on a CPU Megatron-Core has no attention for packed sequences but with numerics=tree")
    return None


def _loader(config: RunConfig) -> Problem | None:
    kind = sft.field(config, "dataloader_type")
    if kind == "batch":
        return None
    return Problem(
        f"dataset.dataloader_type={kind}", "it does not go through the examples again", "dataset.dataloader_type=batch"
    )


def _tokenizer(config: RunConfig) -> Problem | None:
    tokenizer = config.section("tokenizer")
    kind, model = tokenizer.get("tokenizer_type"), tokenizer.get("tokenizer_model")
    if kind != "HuggingFaceTokenizer":
        return Problem(
            f"tokenizer.tokenizer_type={kind}", "examples are text", "tokenizer.tokenizer_type=HuggingFaceTokenizer"
        )
    return (
        None
        if model
        else Problem("", "a recipe for fine-tuning needs tokenizer.tokenizer_model=FOLDER, of Hugging Face")
    )


def _index(config: RunConfig) -> Problem | None:
    where = (sft.field(config, "dataset_kwargs") or {}).get(sft.INDEX)
    return (
        Problem(f"dataset.dataset_kwargs.{sft.INDEX}={where}", "the index goes to run.dir", "set run.dir=PATH")
        if where
        else None
    )


def _validation(config: RunConfig) -> Problem | None:
    if not config.section("validation").get("eval_iters") or sft.field(config, "do_validation") is not False:
        return None
    return Problem(
        "",
        "validation.eval_iters without examples to validate",
        "dataset.do_validation=true, or validation.eval_iters=0",
    )


RULES = tuple(
    Rule(test, needs=lambda t: sft.is_sft(t.section("dataset")))
    for test in (_kind, _source, _packing, _loader, _tokenizer, _index, _validation)
)
