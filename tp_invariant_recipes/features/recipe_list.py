"""Whether `numerics=tree` covers each recipe of the installed Bridge, for `tpi models --bridge`."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import OR_STOCK, ConfigError
from tp_invariant_recipes.numerics.mode import DEFAULT
from tp_invariant_recipes.sources import recipe_process, recipe_source

COVERED, WITH, REFUSED, ABSENT = "covered", "covered with", "refused", "not here"
STATES = (COVERED, WITH, REFUSED, ABSENT)

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
NEEDED = re.compile(rf"{recipe_source.NEEDS} ([\w./-]+),")
_GPUS = re.compile(r"_\d+gpu(?=_)")
_KEY = re.compile(r"(?<![\w.])([a-z_]+(?:\.\w+)*=(?:\[[^\]]*\]|[\w.\[\]-]+))")
_RANKS = re.compile(r"etp \* ep \* pp = (\d+) does not divide the (\d+) ranks")


def groups(of_family: str | None = None) -> list[tuple[str, ...]]:
    """Return the recipes of the installed Bridge and its benchmarks, each with all names, the shortest first.

    Names of one function, or with another number of GPUs, are one recipe. of_family: None: of all.
    """
    recipes: dict[tuple[str, str], list[str]] = {}
    for name in (*recipe_source.installed_names(), *recipe_source.benchmark_names()):
        module, function = recipe_source.function(name)
        if of_family in (None, recipe_source.family(name)):
            recipes.setdefault((module.partition(".recipes")[0], _GPUS.sub("", function)), []).append(name)
    return [tuple(sorted(names, key=lambda name: (len(name), name))) for names in recipes.values()]


def rows(of_family: str | None = None) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield for each of `groups` the number done, the number of all, and its row.

    recipe, names: its shortest name, and all. family: the name of its file in Bridge. tree: one of STATES; ABSENT
    where the recipe needs files of Hugging Face that are not on this machine. why: the problems, with the keys that
    solve them. keys: of WITH, the overrides that those messages name. open: overrides of OPEN that it needs. Names with
    other results have the worst of them.
    """
    names = groups(of_family)
    # The processes share the modules imported so far.
    with ProcessPoolExecutor(mp_context=get_context("fork"), initializer=recipe_process.serve) as pool:
        for done, row in enumerate(pool.map(row_of, names), 1):
            yield done, len(names), row


def row_of(names: Sequence[str], hf_folder: str | None = None) -> dict[str, Any]:
    """One recipe's row, of a run on GPUs as the recipe has it. hf_folder: as `recipe.hf_folder`."""
    functions = {recipe_source.function(name): name for name in reversed(names)}
    judged = [_judged(name, hf_folder) for name in functions.values()]
    worst = max(judged, key=lambda row: STATES.index(row[DEFAULT]))
    return {"recipe": names[0], "names": [*names], "family": recipe_source.family(names[0])} | worst


def _judged(name: str, hf_folder: str | None) -> dict[str, Any]:
    model = f"{recipe_source.PREFIX}{name}"
    folder = [f"recipe.hf_folder={hf_folder}"] if hf_folder else []
    given, unsolved, why = fixed(model, folder, "gpu")
    keys = [key for key in given[len(folder) :] if not _is_open(key)]
    absent = any(recipe_source.NEEDS in problem for problem in why)
    state = ABSENT if absent else REFUSED if unsolved else WITH if keys else COVERED
    return {
        DEFAULT: state,
        "why": unsolved if state == REFUSED else why,
        "keys": keys if state == WITH else [],
        "open": [key for key in given[len(folder) :] if _is_open(key)] if state in (COVERED, WITH) else [],
    }


def _is_open(key: str) -> bool:
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
    opens = {name: key for name, key in named.items() if _is_open(key) and given.get(name) != key}
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


def reason(problem: str) -> str:
    """Return a message without the recipe, the values and the keys, so that equal reasons can be counted."""
    text = re.sub(r"^(recipe=\S+|numerics=\w+): ", "", problem)
    if recipe_source.NEEDS in text:
        return f"{recipe_source.NEEDS} its model"
    key, colon, message = text.partition(": ")
    text = message if colon and re.fullmatch(r"[\w.]+(=\S*)?", key) else text
    text = re.sub(r"(=|\b)\d+\b", r"\g<1>N", text.partition("; ")[0])
    if key.startswith("model.") and "do not know" in text:
        return f"{key}: {text}"
    return text.partition(": ")[0]


def families(recipe_rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a family: how many recipes are in each of STATES, and why, with counts."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in recipe_rows:
        grouped.setdefault(row["family"], []).append(row)
    return [
        {
            "family": family,
            **{state: sum(row[DEFAULT] == state for row in rows) for state in STATES},
            "why": Counter(why for row in rows if row[DEFAULT] == REFUSED for why in {*map(reason, row["why"])}),
        }
        for family, rows in sorted(grouped.items())
    ]


def summary(family_row: dict[str, Any]) -> str:
    """Return a row of `families` in a line: how many recipes are in each state, and the most frequent reason."""
    counts = ", ".join(f"{family_row[state]} {state}" for state in STATES if family_row[state])
    return f"{family_row['family']}: {counts}{f': {why}' if (why := most_frequent(family_row)) else ''}"


def most_frequent(family_row: dict[str, Any]) -> str:
    """Return the most frequent reason of a row of `families`; empty: it has none."""
    why, _ = min(family_row["why"].items(), key=lambda count: (-count[1], count[0]), default=("", 0))
    return why.partition(", and ")[0]


def details(recipe_rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """For each recipe its state and the keys that it needs, and its problems below it."""
    for row in recipe_rows:
        yield f"{row['recipe']}: {row[DEFAULT]} {' '.join([*row['keys'], *row['open']])}".rstrip()
        if row[DEFAULT] == REFUSED:
            yield from (f"    {why.removeprefix('recipe=' + row['recipe'] + ': ')}" for why in row["why"])


def legend(recipe_rows: Sequence[dict[str, Any]]) -> list[str]:
    """Explain the states, with the number of recipes in each."""
    names = sum(len(row["names"]) for row in recipe_rows)
    counts = Counter(row[DEFAULT] for row in recipe_rows)
    absent = next((NEEDED.search(why) for row in recipe_rows if row[DEFAULT] == ABSENT for why in row["why"]), None)
    lines = [
        f"{len(recipe_rows)} recipes of {names} names: {', '.join(f'{counts[state]} {state}' for state in STATES)}",
        f"{COVERED}: as the recipe is, but for folders, vocabulary and dp; {WITH}: with the keys of --family NAME",
    ]
    if absent:
        lines.append(f"{ABSENT}: hf download NAME config.json, as for {absent[1]}, or recipe.hf_folder=FOLDER")
    return lines
