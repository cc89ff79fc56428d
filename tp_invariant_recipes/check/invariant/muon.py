"""The limits of Muon, which orthogonalises whole matrices (numerics/megatron/muon.py)."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_invariant_recipes.check.invariant.limit import limit
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.settings import muon, peft
from tp_invariant_recipes.settings.run_config import RunConfig

Wrong = Callable[[Mapping[str, Any]], bool]  # of a section `optimizer`


def _unread(name: str) -> Wrong:
    return lambda fields: not muon.computes(fields) and fields.get(name, muon.READ[name]) != muon.READ[name]


def _of_run(wrong: Wrong, text: str, solve: str) -> Rule[RunConfig]:
    return limit(lambda t: wrong(t.section("optimizer")), text, solve)


# Whether an optimizer is beyond what is covered, and why.
RULES: tuple[tuple[Wrong, str, str], ...] = (
    (
        lambda fields: muon.computes(fields) and fields.get(muon.TP_MODE, muon.READ[muon.TP_MODE]) != muon.WHOLE,
        "Muon would orthogonalise the part of a matrix that a rank has",
        f"optimizer.{muon.TP_MODE}={muon.WHOLE}",
    ),
    *((_unread(name), f"optimizer.{name}: only Muon reads it", "leave it unset") for name in muon.READ),
)

LIMITS = (
    *(_of_run(*rule) for rule in RULES),
    limit(
        lambda t: muon.is_layer_wise(t.section("optimizer")) and muon.owns_copies(t),
        "without data-parallel ranks Megatron-Core saves each copy of an expert as the only one",
        f"optimizer.{muon.LAYER_WISE}=false",
    ),
    limit(
        lambda t: muon.computes(t.section("optimizer")) and peft.adapts(t),
        "adapters have not been trained with Muon",
        "optimizer.optimizer=adam",
    ),
)
