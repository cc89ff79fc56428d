"""The closest real name to a misspelt one."""

from collections.abc import Iterable
from difflib import get_close_matches

RECIPES = "_config"  # at the end of the name of a recipe
_MODES = ("pretrain", "sft", "peft")


def did_you_mean(names: Iterable[str]) -> str:
    """Return a hint that offers these names; nothing where there are none."""
    shown = "' or '".join(names)
    return f"; did you mean '{shown}'?" if shown else ""


def _stem(recipe: str) -> str:
    """Return what distinguishes a recipe from those of its kind, whose name may be misspelt."""
    stem = recipe.removesuffix(RECIPES)
    model, _, kind = stem.rpartition("_")
    return model if model and get_close_matches(kind, _MODES, n=1, cutoff=0.75) else stem


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint to append to an error: "; did you mean 'x'?", or the names when few, or nothing."""
    known = sorted(set(names))
    if name.endswith(RECIPES):  # what most recipes end in says nothing about which is meant
        stems = {recipe: _stem(recipe) for recipe in known if recipe.endswith(RECIPES)}
        closest = get_close_matches(_stem(name), {*stems.values()}, n=1, cutoff=0.75)
        kinds = [recipe for recipe, stem in stems.items() if stem in closest]
        return did_you_mean(get_close_matches(name, kinds, n=1, cutoff=0.0))
    close = get_close_matches(name, known, n=1, cutoff=0.6) or get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if not close and "." in name:
        # The section may be wrong while the field is right.
        leaf = name.rpartition(".")[2]
        close = (
            get_close_matches(leaf, [k for k in known], n=1, cutoff=0.75)
            or [k for k in known if k.rpartition(".")[2] == leaf][:1]
        )
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there are: {', '.join(known)}" if 0 < len(known) <= 12 else ""
