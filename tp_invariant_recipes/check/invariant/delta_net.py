"""What the invariant numerics cover of gated delta nets (numerics/megatron/families/delta_net.py) and of gates."""

from functools import partial

from tp_invariant_recipes.check.invariant import latent
from tp_invariant_recipes.check.invariant.limit import has, lacks, limit, limit_of, uncut, unsplit
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import peft, schema, sft
from tp_invariant_recipes.settings.delta_net import (
    ATTENTION_GATE,
    EXPERT_GATE,
    FREQUENCY,
    RECOMPUTED,
    SPEC,
    TAPS,
    has_it,
)
from tp_invariant_recipes.settings.run_config import RunConfig


def _gates(config: RunConfig) -> bool:
    return bool(config.model.get(ATTENTION_GATE) or config.model.get(EXPERT_GATE))


_row = partial(limit_of, lambda t: has_it(t.model))

LIMITS = (
    limit(
        lambda t: t.model.get(families.VARIANT) not in (None, families.DELTA_NET),
        "of attention's variants only gated delta nets are covered",
        f"leave model.{families.VARIANT} unset",
    ),
    _row(lacks(mode.DELTA_NET), mode.only(mode.DELTA_NET), "numerics=tree"),
    limit_of(_gates, lacks(mode.GATES), mode.only(mode.GATES), "numerics=tree"),
    limit_of(
        has(ATTENTION_GATE),
        latent.has_it,
        "multi-latent attention has no gate",
        f"model.{ATTENTION_GATE}=false",
    ),
    _row(
        lambda t: t.model.get("_target_") != schema.PROVIDERS[0],
        f"gated delta nets are covered for {schema.PROVIDERS[0].rpartition('.')[2]} alone",
    ),
    _row(
        lambda t: t.model.get(families.FIELD) not in (None, SPEC),
        "gated delta nets have layers of tpi's",
        f"model.{families.FIELD}=null",
    ),
    _row(
        lambda t: t.model.get(FREQUENCY) is None,
        "how often attention comes among gated delta nets is not said",
        f"model.{FREQUENCY}=4",
    ),
    _row(lambda t: t.model.get(TAPS, 4) != 4, "the convolution takes four tokens", f"model.{TAPS}=4"),
    _row(*unsplit("gated delta nets under tensor parallelism need")),
    limit_of(lambda t: has_it(t.model) or _gates(t), *uncut("gated delta nets and gates have")),
    _row(
        lambda t: sft.packing(t) is not None,
        "packed sequences in gated delta nets have no invariant version",
        "dataset.enable_offline_packing=false",
    ),
    _row(peft.section, "adapters of gated delta nets have no invariant version", "peft=none"),
    _row(
        lambda t: RECOMPUTED in (t.model.get("recompute_modules") or ()),
        f"gated delta nets keep what {RECOMPUTED} would compute again",
        "leave it out of model.recompute_modules",
    ),
    _row(has("add_bias_linear"), "gated delta nets have no biases", "model.add_bias_linear=false"),
)
