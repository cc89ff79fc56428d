# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run: our own sections typed, its layout, its shape, the nodes it takes, and mappings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.sections import OWN_SECTIONS, OwnSections
from tp_invariant_recipes.text import plural


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. `world` is the number of ranks they need."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    sp: bool

    @property
    def world(self) -> int:
        """Ranks: tp * pp * cp * dp."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def degrees(self) -> dict[str, int]:
        """Short keys of the degrees of parallelism and their values."""
        return {name: getattr(self, name) for name in ("tp", "pp", "cp", "dp", "ep", "etp")}

    def as_dict(self) -> dict[str, int | bool]:
        """Short keys and their values, for a ledger's header."""
        return {**self.degrees, "sp": self.sp}


# What Megatron-FSDP shards over data-parallel ranks: nothing; masters and moments; gradients, too; weights, too.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FSDP_FORMAT = "fsdp_dtensor"  # of its checkpoints
OVERLAPS = "comm_overlap"  # a section whose fields replace the model's where a run has it
COMBINED = "overlap_moe_expert_parallel_comm"


@dataclass(frozen=True)
class RunConfig(OwnSections):
    """What a run is made of. Every field has been checked.

    sections: section -> fields, as Hydra composes them and `config.yaml` holds them. A section or field of ours that
              it lacks has its default; a field that only another version of tpi has is no error.
    """

    sections: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, cls in OWN_SECTIONS.items():
            ours = {field.name for field in fields(cls)}
            known = {key: value for key, value in self.section(name).items() if key in ours}
            object.__setattr__(self, name, cls(**known))

    def section(self, name: str) -> dict[str, Any]:
        """Return the fields of a section; empty where the run does not have it."""
        return self.sections.get(name) or {}

    def at(self, path: str) -> Any:
        """Return a field by its dotted path. A field of ours has its default where it is not set, another one None."""
        section, _, name = path.partition(".")
        return getattr(getattr(self, section), name) if section in OWN_SECTIONS else self.section(section).get(name)

    @property
    def model(self) -> dict[str, Any]:
        """The fields of Bridge's provider."""
        return self.sections["model"]

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model and kinds of its layers."""
        return ModelShape(self.model)

    @cached_property
    def layout(self) -> Layout:
        """Degrees of parallelism; a field that is not set has Megatron's default."""
        model = self.model
        return Layout(
            tp=model.get("tensor_model_parallel_size", 1),
            pp=model.get("pipeline_model_parallel_size", 1),
            cp=model.get("context_parallel_size", 1),
            dp=self.parallel.data_parallel_size,
            ep=model.get("expert_model_parallel_size", 1),
            etp=model.get("expert_tensor_parallel_size", 1),
            sp=bool(model.get("sequence_parallel")),
        )

    @property
    def train(self) -> dict[str, Any]:
        """The fields of Bridge's TrainingConfig."""
        return self.section("train")

    def overlaps(self, field: str = COMBINED) -> bool:
        """Whether Megatron's combined schedule overlaps the all-to-alls of experts with the next micro-batch."""
        return bool((self.section(OVERLAPS) or self.model).get(field))

    @property
    def without_overlap(self) -> str:
        """The override with which that schedule is off."""
        return f"{OVERLAPS}.{COMBINED}=null" if self.section(OVERLAPS) else f"model.{COMBINED}=false"

    @property
    def mixed_precision(self) -> Any:
        """The name of a recipe of Bridge's, fields of its MixedPrecisionConfig, or None: fp32."""
        return self.sections.get("mixed_precision")

    @property
    def fsdp(self) -> str | None:
        """Return the strategy of Megatron-FSDP, one of STRATEGIES where it is checked; None: the run has no FSDP."""
        ddp = self.section("ddp")
        return (ddp.get("data_parallel_sharding_strategy") or STRATEGIES[0]) if ddp.get("use_megatron_fsdp") else None

    def with_fields(self, section: str, **fields: Any) -> "RunConfig":
        """Return the configuration with other values of some fields of a section."""
        return RunConfig({**self.sections, section: {**self.section(section), **fields}})


# The parallel layout of a run: degrees, and what they split. check/layout.py has its rules.

# Numbers of the model that tensor parallelism splits.
SPLIT_BY_TP = (
    *("num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size", "mamba_num_groups"),
    "mamba_num_heads",
)

# How many layers the first and the last pipeline stage have, if not as many as the others.
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")

# Whether the first stage has a layer less than the others, for the embedding, and the last one, for the loss.
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def splits_unevenly(config: RunConfig) -> bool:
    """Whether tp does not divide the model."""
    tp = config.layout.tp
    return any((config.model.get(number) or 0) % tp for number in SPLIT_BY_TP)


def uneven_ends(config: RunConfig) -> tuple[int, int] | None:
    """Return the layers of the first and the last stage that let the stages between them have equally many.

    None: pp divides the layers, a field says how they are split, or Megatron has no such split.
    """
    model, pp = config.model, config.layout.pp
    chunks = model.get("virtual_pipeline_model_parallel_size") or 1
    layers, (first, last) = config.shape.layers, (model.get(key) for key in UNEVEN)
    stated = any(model.get(key) for key in ("pipeline_model_parallel_layout", "hybrid_layer_pattern", *ACCOUNTED))
    if stated or last or layers < pp or layers % pp == 0 or layers % chunks:
        return None
    # Counted in chunks of a layer for each of a stage's virtual stages.
    units = layers // chunks
    each = next((n for n in (-(-units // pp), units // pp) if n and units - n * (pp - 2) >= 2), 0)
    ends = units - each * (pp - 2)
    sizes = (ends - ends // 2) * chunks, ends // 2 * chunks
    return sizes if each and first in (None, sizes[0]) else None


# The nodes of a cluster that a run takes.


@dataclass(frozen=True)
class Allocation:
    """The part of a cluster that a run takes.

    ranks: on every node. gpus: on every node; 0 on a CPU.
    """

    nodes: int
    ranks: int
    gpus: int

    def __str__(self) -> str:
        """2 nodes with 8 gpu ranks each; 1 node with 1 cpu rank."""
        ranks = plural(self.ranks, f"{'gpu' if self.gpus else 'cpu'} rank")
        return f"{self.nodes} nodes with {ranks} each" if self.nodes > 1 else f"1 node with {ranks}"


def allocation_of(config: RunConfig) -> Allocation:
    """Return the allocation a run needs. Whole nodes but for a run that fits one."""
    world, most = config.layout.world, ranks_per_node(config)
    ranks = min(world, most or world)
    return Allocation(-(-world // ranks), ranks, ranks if config.device.kind == "gpu" else 0)


def ranks_per_node(config: RunConfig) -> int | None:
    """Return the most ranks a node takes; None where the cluster does not say."""
    cluster = config.cluster
    return cluster.ranks_per_node or cluster.gpus_per_node
