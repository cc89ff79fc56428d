# SPDX-License-Identifier: Apache-2.0
"""What makes two runs comparable, and whether a run can go on in another layout with the bits that it would have had.

Comparable are runs of the same model, data, optimizer and seed, whatever the layout or machine. Digests, weights,
moments and the place in the data do not depend on the layout. What does: the order in which a step adds its gradients,
and the form in which a distributed optimizer's state lies in a checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tp_invariant_recipes.config.overrides import Override
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields import catalogue
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.ledger.schema import SHARDS
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.runs.checkpoints import OF_FSDP
from tp_invariant_recipes.settings import finetuning, muon
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


def other_state(before: Sequence[Override], now: Sequence[Override], config: RunConfig) -> list[Problem]:
    """Keys with which a run would continue with another state than its checkpoint's, under the same identity.

    before: the overrides that the run has been made of so far. config: composed of those `now`.
    """
    known = {(override.field, override.value) for override in before}
    text = "a run continues with the whole state of its checkpoint, read as it was written"
    return [
        Problem(override.text, text, "leave it out")
        for override in now
        if (override.field, override.value) not in known and _leaves_out_state(override.field, config)
    ]


def _leaves_out_state(path: str, config: RunConfig) -> bool:
    section, _, name = path.partition(".")
    if section != "checkpoint" or any(fnmatchcase(name, pattern) for pattern in MAY_CHANGE):
        return False
    return name not in WHOLE or config.at(path) != WHOLE[name]


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
    if config.fsdp:
        return OF_FSDP
    if not config.section("optimizer").get("use_distributed_optimizer"):
        experts = bool(ModelShape(config.section("model")).experts)
        return LAYER_WISE if experts and muon.is_layer_wise(config.section("optimizer")) else OF_EVERY_RANK
    return DISTRIBUTED if config.section("checkpoint").get("dist_ckpt_optim_fully_reshardable") else BUCKETS


def other_gradients(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """Why the steps to come would not have the bits that they would have had. Stock promises none.

    before, now: the run as it has been and as it would be, each with "numerics" and "layout", as in `run.json`.
    """
    there, here = (data_shards(run["numerics"], run["layout"]) for run in (before, now))
    if there == here or mode.find(now["numerics"]["mode"]) is None:
        return []
    text = (
        f"a step's gradient has been the sum of {there} data-parallel parts so far, and would be one of {here}, added "
        f"in another order: the following steps would not be bitwise identical"
    )
    return [Problem(f"dp={now['layout']['dp']}", text, f"dp={there}, or numerics=stock")]


@dataclass(frozen=True)
class StateForm:
    """The state of an optimizer, as a checkpoint has it or as a run reads it.

    form: one of the four above, or OF_FSDP. layout: degrees by their short names. experts_separate: whether the
    experts' state is separate from the other state.
    """

    form: str
    layout: Mapping[str, Any]
    experts_separate: bool = False

    @property
    def distributed(self) -> bool:
        """Whether it is a distributed optimizer's."""
        return self.form in (DISTRIBUTED, BUCKETS)

    @property
    def layer_wise(self) -> bool:
        """Whether it has experts among all other state."""
        return self.form == LAYER_WISE


def unreadable_state(checkpoint: str, saved: StateForm, wanted: StateForm) -> Iterator[Problem]:
    """Yield why a run cannot read a checkpoint's optimizer state. checkpoint: what messages call it."""
    if (saved.form == OF_FSDP) != (wanted.form == OF_FSDP):
        text = f"it holds {'' if saved.form == OF_FSDP else 'no '}{OF_FSDP}"
        yield Problem(checkpoint, text, f"ddp.use_megatron_fsdp={as_text(saved.form == OF_FSDP)}")
        return
    if saved.distributed != wanted.distributed:
        kind = "a distributed optimizer" if saved.distributed else "an optimizer that is not distributed"
        solve = f"optimizer.use_distributed_optimizer={as_text(saved.distributed)}"
        yield Problem(checkpoint, f"it holds the state of {kind}", solve)
        return
    if saved.layer_wise != wanted.layer_wise:
        text = f"it holds the state of experts {'with' if saved.layer_wise else 'apart from'} all other state"
        yield Problem(checkpoint, text, f"optimizer.{muon.LAYER_WISE}={as_text(saved.layer_wise)}")
        return
    before, now = _of_experts(saved.layout), _of_experts(wanted.layout)
    holds = "it holds the optimizer state of experts"
    if saved.experts_separate and not wanted.experts_separate:
        text = f"{holds} apart from all other state, as Megatron does at {before}, and not at {now}"
        yield Problem(checkpoint, text, "continue with tp > 1 or ep > 1")
    if wanted.experts_separate and not saved.experts_separate:
        text = f"{holds} together with all other state, as Megatron does at {before} with numerics=stock alone"
        yield Problem(checkpoint, text, f"continue with numerics=stock {before}")
    degrees = {name: saved.layout.get(name) for name in _OF_BUCKETS if saved.form == BUCKETS}
    changed = {name: degree for name, degree in degrees.items() if degree != wanted.layout.get(name)}
    if changed:
        was = ", ".join(f"{name} was {degree}" for name, degree in changed.items())
        keep = " ".join(f"{name}={degree}" for name, degree in changed.items())
        text = f"it holds the buffers of a distributed optimizer, which only dp may divide anew, and {was}"
        reshardable = "checkpoints saved with checkpoint.dist_ckpt_optim_fully_reshardable=true"
        yield Problem(checkpoint, text, f"keep {keep}; {reshardable} can go on in every layout")


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


WEIGHTS_DIGEST = "weights.digest"

# Sections whose fields are part of the identity.
SECTIONS = ("model", "train", "optimizer", "scheduler", "ddp", "dataset", "tokenizer", "rng", "mixed_precision")

# The same of runs that have them.
OPTIONAL = (finetuning.SECTION,)


def fingerprint(config: RunConfig, data_digest: str | None, weights_digest: str | None = None) -> dict[str, Any]:
    """Dotted key -> value of everything that two comparable runs have in common.

    data_digest:    `PreparedData.digest` of text or `Examples.digest` of examples; None for generated data.
    weights_digest: of the checkpoint that the weights come from (`weights.Checkpoint.digest`); None: they are new.
    """
    flat = of_sections(config.sections)
    if finetuning.is_sft(config.section("dataset")):
        flat = {key: value for key, value in flat.items() if key not in finetuning.PLACES}
    if flat.get("scheduler.lr_decay_iters") is None:
        flat["scheduler.lr_decay_iters"] = config.train["train_iters"]
    flat["data.kind"] = config.data.kind
    if family := families.family_of(config.model):
        flat["model.layers"] = family
    for key in SHARDS if config.numerics.invariant else ():
        if (count := getattr(config.numerics, key.partition(".")[2])) is not None:
            flat[key] = count
    flat["data.digest"] = data_digest
    if weights_digest is not None:
        flat[WEIGHTS_DIGEST] = weights_digest
    return dict(sorted(flat.items()))


def of_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the identity that sections of Bridge make."""
    fields = {name: sections.get(name) for name in SECTIONS}
    fields |= {name: sections[name] for name in OPTIONAL if sections.get(name) is not None}
    return {key: value for key, value in flat(fields).items() if value != {} and catalogue.in_fingerprint(key)}


def flat(sections: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything that is no mapping, or an empty one."""
    fields: dict[str, Any] = {}
    for name, value in sections.items():
        inner = isinstance(value, Mapping) and value
        fields |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return fields
