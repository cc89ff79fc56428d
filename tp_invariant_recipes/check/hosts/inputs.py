# SPDX-License-Identifier: Apache-2.0
"""The files that a run reads: weights, a checkpoint, text, examples. All that is wrong with them, in one list."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

from tp_invariant_recipes.check import relations
from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.data import text
from tp_invariant_recipes.data.examples import Examples, read_examples
from tp_invariant_recipes.errors import ConfigError, DataError, Problem, lines, listed
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources import hf_models, weights

# One of these lies in a folder that Bridge takes for a checkpoint: of a run, of one step, of Hugging Face.
CHECKPOINT_FILES = (
    *("latest_train_state.pt", "latest_checkpointed_iteration.txt", "run_config.yaml", "metadata.json", ".metadata"),
    "config.json",
)


@dataclass(frozen=True)
class Reading:
    """A run whose files are read before it starts.

    here: whether ranks will run on this machine. imported: whether the weights have been read already.
    """

    config: RunConfig
    here: bool = True
    imported: bool = False


def _checkpoint(reading: Reading) -> list[Problem]:
    """Bridge begins with new weights where it finds no checkpoint."""
    config = reading.config
    folder = config.section("checkpoint").get("pretrained_checkpoint")
    if folder is None or not (reading.here or config.cluster.container is None):
        return []
    path = Path(folder).expanduser()
    adapted = finetuning.adapts(config)  # whose base Bridge reads in its own format only
    if any((path / file).exists() for file in CHECKPOINT_FILES if not (adapted and file == "config.json")):
        return []
    if path.is_dir():
        others = "" if adapted else ", Megatron-LM or Hugging Face"
        why = f"holds no checkpoint of Megatron-Bridge{others}", "of a run: RUN/checkpoints"
    else:
        why = ("is a file", "name the folder of the checkpoint") if path.exists() else ("there is no such folder", "")
    return [Problem(f"checkpoint.pretrained_checkpoint={folder}", *why)]


def check_weights(config: RunConfig) -> None:
    """Raise ConfigError: there are no weights in the folder, or they are not the model's.

    Without transformers, as on a login node, sizes are compared where the ranks start.
    """
    if config.weights.folder is None:
        return
    checkpoint = weights.read(Path(config.weights.folder).expanduser().absolute())
    if installed("transformers") and (wrong := hf_models.problems(config.model, checkpoint)):
        raise ConfigError(listed(wrong), wrong)


def _text(config: RunConfig) -> None:
    """Raise ConfigError: there is no such text or tokenizer."""
    data = config.data
    if data.kind == "text" and data.path is not None and data.tokenizer is not None:
        wrong = text.problems(Path(data.path).expanduser(), str(Path(data.tokenizer).expanduser()))
        if wrong:
            raise ConfigError("\n".join(wrong), wrong)


def named_data(config: RunConfig) -> list[Path]:
    """Return the prefixes of the indexed datasets that a recipe names, on file systems."""
    dataset = config.section("dataset")
    if config.data.kind != "recipe" or finetuning.is_sft(dataset):
        return []
    paths = dataset.get("data_path") or []
    named = paths.split() if isinstance(paths, str) else [*paths]  # perhaps with weights between them
    for blend in dataset.get("blend_per_split") or [dataset.get("blend")]:
        named += blend[0] if blend else []
    return [Path(path) for path in dict.fromkeys(map(str, named)) if "://" not in path and not _is_weight(path)]


def _is_weight(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _named(reading: Reading) -> list[Problem]:
    """Megatron reads an index in the ranks, which wait for ever for the tokens of an empty part."""
    problems: list[Problem | None] = []
    for prefix in named_data(reading.config):
        if not reading.here and not text.beside(prefix, ".idx").exists():
            continue
        try:
            documents, _, _ = text.count(prefix)
        except DataError as error:
            problems.append(Problem("dataset.blend", str(error)))
        else:
            problems.append(relations.empty_part(reading.config, str(prefix), documents))
    return [problem for problem in problems if problem]


def examples(config: RunConfig) -> Examples | None:
    """Return the examples that a run fine-tunes on, read and checked; None: it does not. Raises ConfigError."""
    dataset, tokenizers = config.section("dataset"), config.section("tokenizer")
    tokenizer, template = tokenizers.get("tokenizer_model"), tokenizers.get("chat_template_path")
    if not finetuning.is_sft(dataset) or dataset["dataset_root"] is None:
        return None
    return read_examples(
        Path(dataset["dataset_root"]).expanduser().absolute(),
        finetuning.files(config),
        tokenizer and str(Path(tokenizer).expanduser().absolute()),
        finetuning.columns(dataset),
        chat=finetuning.is_chat(dataset),
        sequences=config.train["global_batch_size"],
        vocabulary=config.shape.vocabulary,
        template=tokenizers.get("chat_template"),
        template_file=Path(template).expanduser() if template else None,
    )


def _raised(read: Callable[[RunConfig], object]) -> Callable[[Reading], list[Problem]]:
    """Return what is wrong with the files that a function reads."""

    @wraps(read)
    def test(reading: Reading) -> list[Problem]:
        try:
            read(reading.config)
        except ConfigError as error:
            return [Problem("", text) for text in error.problems]
        return []

    return test


# About the files that settings name; a rule of the configuration says which settings are missing.
RULES: tuple[Rule[Reading], ...] = (
    Rule(_checkpoint),
    Rule(_raised(check_weights), needs=lambda reading: not reading.imported),
    Rule(_raised(_text)),
    Rule(_named),
    Rule(_raised(examples)),
)


def input_problems(config: RunConfig, *, here: bool = True) -> list[str]:
    """Return what is wrong with the files that a run reads, each with its key."""
    return lines(broken_rules(Reading(config, here=here), RULES))
