# SPDX-License-Identifier: Apache-2.0
"""The keys that solve what `numerics=tree` refuses a run for, as its messages name them: `tpi show --fix`."""

import re
from collections.abc import Iterable, Sequence

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import OR_STOCK, ConfigError
from tp_invariant_recipes.numerics.mode import DEFAULT
from tp_invariant_recipes.sources import recipe_source

# Part of a message -> the override that solves it. Recipes leave these settings to the run: the folder of examples,
# their tokenizer, the weights that LoRA adapts, the model's sizes. So they leave dp, the number of GPUs.
_SIZES = {"vocab_size": 131072, "num_layers": 2, "hidden_size": 256, "num_attention_heads": 8}
PLACEHOLDERS = {
    **{f"model.{name}=0: ": f"model.{name}={size}" for name, size in _SIZES.items()},
    "tokenizer.vocab_size=0: ": "tokenizer.vocab_size=131072",
    "dataset.dataset_root=FOLDER": "dataset.dataset_root=examples",
    "tokenizer.tokenizer_model=FOLDER": "tokenizer.tokenizer_model=tokenizer",
    "checkpoint.pretrained_checkpoint=RUN/checkpoints": "checkpoint.pretrained_checkpoint=RUN/checkpoints",
}
# Keys of messages that no fix takes: they give up the numerics, or the machine.
OTHER_RUNS = ("numerics=stock", "device=gpu")
# Rounds of taking the keys that the messages name: one refusal may hide another one.
ROUNDS = 4
_KEY = re.compile(r"(?<![\w.])([a-z_]+(?:\.\w+)*=(?:\[[^\]]*\]|[\w.\[\]-]+))")
_RANKS = re.compile(r"etp \* ep \* pp = (\d+) does not divide the (\d+) ranks")


def is_open(key: str) -> bool:
    """Whether a recipe leaves a key to the run."""
    return key in PLACEHOLDERS.values() or key.startswith("dp=")


def fixed(model: str, overrides: Sequence[str], device: str) -> tuple[list[str], list[str], list[str]]:
    """Return the overrides with keys that solve what the run is refused for; what none solves; all problems."""
    given, why = [*overrides], _problems(model, overrides, device)
    unsolved = why
    for _ in range(ROUNDS):
        if any(recipe_source.NEEDS in problem for problem in unsolved) or not (more := _keys(unsolved, given)):
            break
        given = more
        unsolved = _problems(model, given, device)
    return given, unsolved, why


def _problems(model: str, overrides: Sequence[str], device: str) -> list[str]:
    try:
        compose(model, overrides, device=device, numerics=DEFAULT)
    except ConfigError as error:
        return [problem for problem in error.problems if problem != OR_STOCK]
    return []


def _keys(problems: Iterable[str], before: Sequence[str]) -> list[str]:
    """Return the overrides that messages name, beside those of `before`; nothing where there is no new one."""
    given = {key.partition("=")[0]: key for key in before}
    dp = given.get("dp", "dp=1").removeprefix("dp=")
    ranks = int(dp) if dp.isdecimal() else 1
    named = {key.partition("=")[0]: key for problem in problems for key in _named(problem, ranks)}
    # What a run lacks comes first: without its number of ranks numerics.adjust cannot reckon with cp.
    opens = {name: key for name, key in named.items() if is_open(key) and given.get(name) != key}
    named = opens or named
    return [*(given | named).values()] if named.items() - given.items() else []


def _named(problem: str, dp: int = 1) -> list[str]:
    """Return the overrides at the end of a message; of alternatives the first. dp: of the run that it is about."""
    if ranks := _RANKS.search(problem):
        return [f"dp={dp * max(1, int(ranks[1]) // int(ranks[2]))}"]
    for phrase, override in PLACEHOLDERS.items():
        if phrase in problem:
            return [override]
    _, semicolon, closing = problem.rpartition(";")
    if not semicolon:
        return []
    parts = [_solving(part.partition(" or ")[0]) or _solving(part) for part in re.split(r",(?![^\[]*\])", closing)]
    return [keys[0] for keys in parts if keys]


def _solving(text: str) -> list[str]:
    return [key for key in _KEY.findall(text) if key not in OTHER_RUNS]
