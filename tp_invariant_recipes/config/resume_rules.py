"""Whether a run can go on in another layout with the bits that it would have had: one row a rule.

Digests, weights, moments and the place in the data do not depend on the layout. What does: the order in which a step
adds its gradients, and the form in which a distributed optimizer's state lies in a checkpoint.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.config.overrides import Override
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import muon
from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.run_config import RunConfig

# Settings of `numerics` whose defaults follow the layout, and which make up the order of sums: a run keeps them.
KEPT_COUNTS = ("data_shards", "context_shards", "expert_groups")

# How a checkpoint holds the moments and master weights: as tensors of the model, of either kind of optimizer, or as the
# ranges of a distributed optimizer's buffers. A layer-wise optimizer has experts among all else, not apart.
OF_EVERY_RANK, DISTRIBUTED, BUCKETS = "of every rank", "distributed", "distributed, in buckets"
LAYER_WISE = "of every rank, layer by layer with experts"
# Degrees that decide what lies in a buffer.
_OF_BUCKETS = ("tp", "pp", "cp", "ep", "etp")

# A checkpoint is loaded whole, whatever a run has set for its start from `checkpoint.pretrained_checkpoint`.
WHOLE = {"finetune": False, "load_optim": True, "load_rng": True}
# Fields of `checkpoint` that may change when a run continues: when, where and how fast it saves and reads, not what. A
# field with none of these names could leave out a part of the state, and the identity would not show it.
MAY_CHANGE = (
    *("*save_interval", "*_retain_interval", "most_recent_k", "ckpt_step", "pretrained_checkpoint"),
    *("async_*", "*fully_parallel_*", "*_workers", "*_ckpt_worker", "*_per_rank", "*fully_reshardable*"),
    *("ckpt_assume_constant_structure", "verify_integrity", "save_tokenizer_assets", "also_save_hf_checkpoint", "hf_*"),
)


@dataclass(frozen=True)
class ResumedOverride:
    """An override of a run that continues. before: what the run has been made of so far. config: as it is now."""

    override: Override
    before: Collection[tuple[str, str]]
    config: RunConfig

    @property
    def other_state(self) -> bool:
        """Whether the run would continue with another state than its checkpoint's, under the same identity."""
        section, _, name = self.override.field.partition(".")
        if section != "checkpoint" or (self.override.field, self.override.value) in self.before:
            return False
        if any(fnmatchcase(name, pattern) for pattern in MAY_CHANGE):
            return False
        return name not in WHOLE or self.config.section(section).get(name) != WHOLE[name]


TYPED: tuple[Rule[ResumedOverride], ...] = (
    Rule(
        lambda typed: typed.other_state,
        "a run continues with the whole state of its checkpoint, read as it was written",
        "leave it out",
        head=lambda typed: typed.override.text,
    ),
)


def other_state(before: Sequence[Override], now: Sequence[Override], config: RunConfig) -> list[Problem]:
    """Keys with which a run would continue with another state than its checkpoint's, under the same identity.

    before: the overrides that the run has been made of so far. config: composed of those `now`.
    """
    known = {(override.field, override.value) for override in before}
    return [problem for override in now for problem in broken_rules(ResumedOverride(override, known, config), TYPED)]


def data_shards(numerics: Mapping[str, Any], layout: Mapping[str, Any]) -> int:
    """D: a step's gradient is a tree over the sums of so many parts of the global batch.

    numerics: the section of the configuration. layout: degrees by their short names.
    """
    return numerics.get("data_shards") or layout["dp"]


def kept(numerics: Mapping[str, Any]) -> list[str]:
    """Return what a run keeps of its numerics in other layouts, as overrides.

    Nothing for stock, which has no fixed order.
    """
    if mode.find(numerics["mode"]) is None:
        return []
    return [f"numerics.{name}={numerics[name]}" for name in KEPT_COUNTS if numerics.get(name) is not None]


def optimizer_state(config: RunConfig) -> str:
    """Return the form in which a run writes its optimizer's state."""
    if not config.section("optimizer").get("use_distributed_optimizer"):
        experts = bool(ModelShape(config.section("model")).experts)
        return LAYER_WISE if experts and muon.is_layer_wise(config.section("optimizer")) else OF_EVERY_RANK
    return DISTRIBUTED if config.section("checkpoint").get("dist_ckpt_optim_fully_reshardable") else BUCKETS


@dataclass(frozen=True)
class Continuation:
    """A run that continues: as it has been, and as it would be. Each has "numerics" and "layout", as in `run.json`."""

    before: Mapping[str, Any]
    now: Mapping[str, Any]

    @property
    def shards(self) -> tuple[int, int]:
        """D, before and now."""
        before, now = (data_shards(run["numerics"], run["layout"]) for run in (self.before, self.now))
        return before, now


def _other_gradients(run: Continuation) -> Problem | None:
    there, here = run.shards
    if there == here:
        return None
    return Problem(
        f"dp={run.now['layout']['dp']}",
        f"a step's gradient has been the sum of {there} data-parallel parts so far, and would be one of {here}, added "
        f"in another order: the steps to come would have other bits",
        f"dp={there}, or numerics=stock",
    )


# Why the steps to come would not have the bits that they would have had. Stock promises none.
GRADIENTS: tuple[Rule[Continuation], ...] = (
    Rule(_other_gradients, needs=lambda run: mode.find(run.now["numerics"]["mode"]) is not None),
)


@dataclass(frozen=True)
class StateForm:
    """The state of an optimizer, as a checkpoint has it or as a run reads it.

    form: one of the four above. layout: degrees by their short names. experts_separate: whether the experts' state is
    separate from the other state.
    """

    form: str
    layout: Mapping[str, Any]
    experts_separate: bool = False

    @property
    def distributed(self) -> bool:
        """Whether it is a distributed optimizer's."""
        return self.form in (DISTRIBUTED, BUCKETS)


@dataclass(frozen=True)
class StateReading:
    """A checkpoint's optimizer state, and the run that reads it. checkpoint: what messages call it."""

    checkpoint: str
    saved: StateForm
    wanted: StateForm

    @property
    def alike(self) -> bool:
        """Whether both are of one kind of optimizer."""
        same = (state.distributed for state in (self.saved, self.wanted))
        return len({*same}) == 1 and (self.saved.form == LAYER_WISE) == (self.wanted.form == LAYER_WISE)

    @property
    def buckets(self) -> list[str]:
        """The degrees that differ and decide what lies in a buffer of the checkpoint."""
        before, now = self.saved.layout, self.wanted.layout
        return [name for name in _OF_BUCKETS if self.saved.form == BUCKETS and before.get(name) != now.get(name)]


def _other_kind(reading: StateReading) -> Problem | None:
    distributed = reading.saved.distributed
    if distributed == reading.wanted.distributed:
        return None
    kind = "a distributed optimizer" if distributed else "an optimizer that is not distributed"
    return Problem(
        "", f"it holds the state of {kind}", f"optimizer.use_distributed_optimizer={str(distributed).lower()}"
    )


def _other_layers(reading: StateReading) -> Problem | None:
    saved, wanted = (state.form == LAYER_WISE for state in (reading.saved, reading.wanted))
    if saved == wanted or reading.saved.distributed != reading.wanted.distributed:
        return None
    kind = "with" if saved else "apart from"
    return Problem(
        "",
        f"it holds the state of experts {kind} all other state",
        f"optimizer.{muon.LAYER_WISE}={str(saved).lower()}",
    )


def _separate_experts(reading: StateReading) -> Problem | None:
    before, now = _of_experts(reading.saved.layout), _of_experts(reading.wanted.layout)
    if reading.saved.experts_separate == reading.wanted.experts_separate:
        return None
    if reading.saved.experts_separate:
        return Problem(
            "",
            f"it holds the optimizer state of experts apart from all other state, as Megatron does at {before}, and "
            f"not at {now}",
            "continue with tp > 1 or ep > 1",
        )
    return Problem(
        "",
        f"it holds the optimizer state of experts together with all other state, as Megatron does at {before} with "
        f"numerics=stock alone",
        f"continue with numerics=stock {before}",
    )


def _other_buckets(reading: StateReading) -> Problem | None:
    before, changed = reading.saved.layout, reading.buckets
    if not changed:
        return None
    was = ", ".join(f"{name} was {before.get(name)}" for name in changed)
    return Problem(
        "",
        f"it holds the buffers of a distributed optimizer, which only dp may divide anew, and {was}",
        f"keep {' '.join(f'{name}={before.get(name)}' for name in changed)}; checkpoints saved with "
        f"checkpoint.dist_ckpt_optim_fully_reshardable=true can go on in every layout",
    )


# Why a run cannot read a checkpoint's optimizer state.
STATE: tuple[Rule[StateReading], ...] = (
    Rule(_other_kind, head=lambda reading: reading.checkpoint),
    Rule(_other_layers, head=lambda reading: reading.checkpoint),
    *(
        Rule(test, needs=lambda reading: reading.alike, head=lambda reading: reading.checkpoint)
        for test in (_separate_experts, _other_buckets)
    ),
)


def same_random_states(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has the ranks' random states as ranks in another layout look for them.

    Bridge has one for each rank of tp and pp and, with ep > 1, of dp and cp. It ignores them in another tp or pp; in
    another ep or dp it would look for those that are not there. Nothing of an invariant run draws after the start.
    """
    saved, wanted = ((run["tp"], run["pp"], run["ep"] > 1 and run["dp"] * run["cp"]) for run in (before, now))
    return saved == wanted


def experts_separate(name: str, model: Mapping[str, Any], layout: Mapping[str, Any]) -> bool:
    """Whether a run's experts have an optimizer of their own: with invariant numerics always.

    name: of the mode.
    """
    by_megatron = layout.get("ep", 1) > 1 or layout.get("tp", 1) != layout.get("etp", 1)  # process groups of their own
    return bool(ModelShape(model).experts) and (mode.find(name) is not None or by_megatron)


def _of_experts(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={layout.get(name, 1)}" for name in ("tp", "ep", "etp"))
