"""The limits of Muon, which orthogonalises whole matrices (numerics/megatron/muon.py)."""

from tp_invariant_recipes.check.invariant.limit import Test, limit
from tp_invariant_recipes.settings import muon, peft
from tp_invariant_recipes.settings.run_config import RunConfig


def _computes(config: RunConfig) -> bool:
    return muon.computes(config.section("optimizer"))


def _value(config: RunConfig, name: str) -> object:
    return config.section("optimizer").get(name, muon.READ[name])


def _unread(name: str) -> Test:
    return lambda t: not _computes(t) and _value(t, name) != muon.READ[name]


LIMITS = (
    limit(
        lambda t: _computes(t) and _value(t, muon.TP_MODE) != muon.WHOLE,
        "Muon would orthogonalise the part of a matrix that a rank has",
        f"optimizer.{muon.TP_MODE}={muon.WHOLE}",
    ),
    *(limit(_unread(name), f"optimizer.{name}: only Muon reads it", "leave it unset") for name in muon.READ),
    limit(
        lambda t: muon.is_layer_wise(t.section("optimizer")) and muon.owns_copies(t),
        "without data-parallel ranks Megatron-Core saves each copy of an expert as the only one",
        f"optimizer.{muon.LAYER_WISE}=false",
    ),
    limit(
        lambda t: _computes(t) and peft.adapts(t),
        "adapters have not been trained with Muon",
        "optimizer.optimizer=adam",
    ),
)
