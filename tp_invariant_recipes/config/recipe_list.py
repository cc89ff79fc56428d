"""What `numerics=tree` says of each recipe of the installed Bridge, for `tpi models --bridge`."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tp_invariant_recipes.config import recipe_source
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import OR_STOCK, ConfigError

COVERED, REFUSED, ABSENT = "covered", "refused", "not here"


def rows() -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Each recipe as it is judged: how many are done, of how many, and its row. Imports Bridge.

    recipe: its name. tree: COVERED, REFUSED, or ABSENT where the recipe needs files of Hugging Face that are not on
    this machine. why: the problems, with the keys that solve them.
    """
    names = recipe_source.installed_names()
    # The processes share what is imported by now.
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        for done, row in enumerate(pool.map(row_of, names), 1):
            yield done, len(names), row


def row_of(name: str) -> dict[str, Any]:
    """One recipe's row, of a run on GPUs as the recipe has it."""
    try:
        compose(f"{recipe_source.PREFIX}{name}", device="gpu", numerics="tree")
    except ConfigError as error:
        why = [problem for problem in error.problems if problem != OR_STOCK]
        absent = any(recipe_source.NEEDS in problem for problem in why)
        return {"recipe": name, "tree": ABSENT if absent else REFUSED, "why": why}
    return {"recipe": name, "tree": COVERED, "why": []}
