# SPDX-License-Identifier: Apache-2.0
"""Where a module's tensors lie in those of the whole model: one row a kind of module.

A tensor of the whole is [sequence, batch, features …] over all samples of the step. To digests it is a table: position
s of sample b is row `s · batch + b`, its features are the columns. Of features split over tensor-parallel ranks a rank
has one slice, or one of each segment:

    whole  [ gate 0 | gate 1 | up 0 | up 1 ]        rank 1  [ gate 1 | up 1 ]

What has no row has no place, nor has a tensor that is not shaped as its row and the configuration say: then the trace
says that the tensor was there, and no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from tp_invariant_recipes.kernels.launch import TablePlace, TensorPart

# Bridge's data loaders -> the number in the step of sample i of a data-parallel rank's, given samples a micro-batch.
CONSECUTIVE = "consecutive"  # of the invariant numerics (numerics/megatron/data_order.py)
SAMPLERS: dict[str, Callable[["Site", int], int]] = {
    CONSECUTIVE: lambda site, i: site.dp_rank * (site.batch // site.dp) + i,
    "single": lambda site, i: (i // site.samples * site.dp + site.dp_rank) * site.samples + i % site.samples,
    "batch": lambda site, i: i * site.dp + site.dp_rank,
}


@dataclass(frozen=True)
class Site:
    """Where a rank stands in a step.

    config:            the model's.
    sequence, batch:   positions of a sample, and samples of the step, on all ranks.
    samples:           of a micro-batch.
    sampler:           dataset.dataloader_type, or CONSECUTIVE.
    sequence_parallel: positions are split over the tensor-parallel ranks between their products.
    context_shards:    C, into which sequences are cut; cp for stock numerics (numerics/sums/data_shards.py).
    visits:            the rank's number of each micro-batch's sample; empty: they come in their order.
    """

    config: Any
    sequence: int
    batch: int
    samples: int
    sampler: str = "single"
    sequence_parallel: bool = False
    tp: int = 1
    tp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    dp: int = 1
    dp_rank: int = 0
    context_shards: int = 1
    visits: tuple[int, ...] = ()

    def numbers(self, micro_batch: int) -> list[int] | None:
        """Return the samples of the step in a micro-batch; None: the data loader is not known."""
        number = SAMPLERS.get(self.sampler)
        first = (self.visits[micro_batch] if self.visits else micro_batch) * self.samples
        return None if number is None else [number(self, first + i) for i in range(self.samples)]

    def positions(self, split: bool) -> list[tuple[int, int]]:
        """Return the parts of a sample's positions that this rank has, in its order: (first, how many) each.

        split: over tensor-parallel ranks too. Context shard c is chunks c and 2C - 1 - c of 2C.
        """
        shards = max(self.cp, self.context_shards)
        chunk, each = self.sequence // (2 * shards), shards // self.cp
        held = range(self.cp_rank * each, (self.cp_rank + 1) * each)
        chunks = [(start * chunk, chunk) for c in held for start in (c, 2 * shards - 1 - c)]
        parts = [(0, self.sequence)] if shards == 1 else chunks
        if not split:
            return parts
        size = self.sequence // (self.cp * self.tp)
        low, positions, before = self.tp_rank * size, [], 0
        for first, count in parts:
            start, stop = max(low, before), min(low + size, before + count)
            if start < stop:
                positions.append((first + start - before, stop - start))
            before += count
        return positions


@dataclass(frozen=True)
class Placement:
    """A rank's part of a tensor. shape: of the whole."""

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]

    @property
    def places(self) -> tuple[TablePlace, ...]:
        """Where the parts lie."""
        return tuple(part.place for part in self.parts)


# (tensor, its module, micro-batch, site) -> its place; None: it is not shaped as was thought.
PlacementRule = Callable[[Tensor, Any, int, Site], Placement | None]


# --- Kinds of place ---


def embedded(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
    """Return what Megatron's embedding gives: [b, s, hidden], or as `hidden` when it scatters the sequence itself."""
    if getattr(module, "reduce_scatter_embeddings", False):
        return hidden(x, module, micro_batch, site)
    if x.dim() != 3 or x.shape[2] != site.config.hidden_size:
        return None
    return _rows(x.transpose(0, 1), micro_batch, site, split=False)


def tokens(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
    """[b, s]: samples are rows, positions columns."""
    numbers, positions = site.numbers(micro_batch), site.positions(split=False)
    if numbers is None or tuple(x.shape) != (site.samples, sum(count for _, count in positions)):
        return None
    x = _adjacent(x)
    starts = [0, *accumulate(count for _, count in positions)]
    parts = [
        TensorPart(x[i : i + 1, start : start + count], number, first)
        for i, number in enumerate(numbers)
        for start, (first, count) in zip(starts, positions, strict=False)
    ]
    return Placement((site.batch, site.sequence), tuple(parts))


def heads(field: str) -> PlacementRule:
    """[s, b, heads/t, d], `field` of the configuration the number of heads."""

    def rule(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
        # Fewer heads than ranks: each rank has a copy, but gives it a gradient of its own.
        if x.dim() != 4 or x.shape[2] * site.tp != getattr(site.config, field):
            return None
        return _rows(x, micro_batch, site, slices=[x.shape[2] * x.shape[3]])

    return rule


def columns(*widths: Callable[[Any], int | None], segments: Callable[[Any], int] = lambda config: 1) -> PlacementRule:
    """[s, b, n/t]; n is one of `widths` of the configuration, each of its `segments` split over the ranks."""

    def rule(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
        whole, parts = x.shape[-1] * site.tp, segments(site.config)
        if x.dim() != 3 or whole not in [width(site.config) for width in widths] or x.shape[2] % parts:
            return None
        return _rows(x, micro_batch, site, slices=[x.shape[2] // parts] * parts)

    return rule


def latent(*fields: str, or_else: PlacementRule | None = None) -> PlacementRule:
    """[s, b, n], or [s/t, b, n] with sequence parallelism, n the sum of `fields` of the configuration.

    or_else: the rule of a configuration that lacks them: without multi-latent attention.
    """

    def rule(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
        if or_else is not None and not getattr(site.config, "multi_latent_attention", False):
            return or_else(x, module, micro_batch, site)
        if x.dim() != 3 or x.shape[2] != sum(getattr(site.config, field) for field in fields):
            return None
        return _rows(x, micro_batch, site, split=site.sequence_parallel)

    return rule


hidden = latent("hidden_size")


def sliced(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
    """[s, b, n/t] of a width that is no field of the configuration: the padded vocabulary, Mamba's inner width."""
    if x.dim() != 3 or getattr(module, "gather_output", False):
        return None
    return _rows(x, micro_batch, site, slices=[x.shape[2]])


def sections(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
    """[s, b, n/t] of sections of several widths, each split over the ranks: Mamba's z, x, B, C and dt."""
    rows = module.weight if hasattr(module, "weight") else module.linear_out.weight  # of an adapter
    sizes = list(getattr(rows, "partition_sizes", ()))
    if x.dim() != 3 or x.shape[2] != sum(sizes):
        return None
    return _rows(x, micro_batch, site, slices=sizes)


def scores(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
    """[b, heads/t, s, s]: queries are rows, keys columns."""
    numbers, count = site.numbers(micro_batch), site.config.num_attention_heads
    size = site.sequence
    if numbers is None or site.cp > 1 or tuple(x.shape) != (site.samples, count // site.tp, size, size):
        return None
    x = _adjacent(x.reshape(site.samples, -1, size))
    first = site.tp_rank * x.shape[1]
    parts = [TensorPart(x[i], number * count * size + first, 0) for i, number in enumerate(numbers)]
    return Placement((site.batch, count, size, size), tuple(parts))


def experts(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
    """[s · b, experts], or [s/t · b, experts] with sequence parallelism: what the router says of each token."""
    if x.dim() != 2 or x.shape[1] != site.config.num_moe_experts or x.shape[0] % site.samples:
        return None
    return _rows(x.reshape(-1, site.samples, x.shape[1]), micro_batch, site, split=site.sequence_parallel)


def constant(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
    """[s, …]: the same for all samples and on all ranks, so that one micro-batch counts and ranks are replicas."""
    if x.dim() < 1 or x.shape[0] != site.sequence or max(site.cp, site.context_shards) > 1:
        return None
    rows = _adjacent(x.reshape(site.sequence, -1))
    return Placement(tuple(x.shape), (TensorPart(rows, 0, 0),) if micro_batch == 0 else ())


def _rows(
    x: Tensor, micro_batch: int, site: Site, *, split: bool = False, slices: Sequence[int] | None = None
) -> Placement | None:
    """Place [positions, samples, features …]; the rows of one sample are a part.

    slices: widths of this rank's slices of the segments; None: it has all the features.
    """
    numbers, positions = site.numbers(micro_batch), site.positions(split)
    if numbers is None or tuple(x.shape[:2]) != (sum(count for _, count in positions), site.samples):
        return None
    ranks = 1 if slices is None else site.tp
    flat = _adjacent(x.flatten(2))
    widths = [flat.shape[2]] if slices is None else slices
    parts = []
    for i, number in enumerate(numbers):
        start = 0
        for first, count in positions:
            column = 0
            for width in widths:
                # The segments before this one are `ranks` times as wide in the whole.
                whole = column * ranks + (site.tp_rank * width if ranks > 1 else 0)
                values = flat[start : start + count, i, column : column + width]
                parts.append(TensorPart(values, first * site.batch + number, whole, site.batch))
                column += width
            start += count
    features = (x.shape[2] * ranks, *x.shape[3:])
    return Placement((site.sequence, site.batch, *features), tuple(parts))


def _adjacent(x: Tensor) -> Tensor:
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


# --- The table ---


@dataclass(frozen=True)
class ModuleRow:
    """Where the tensors of a kind of module lie.

    classes: names of Megatron's classes; a subclass counts as well.
    names:   last parts of the module's name; none: any.
    inputs:  its tensors in the order of its forward's parameters, under their names there. Others are not recorded.
    outputs: the tensors that it returns, in order. Further ones are not recorded.
    stages:  its layers are divided among pipeline stages: its inputs are those of the first stage, its outputs those of
             the last.
    below:   whether the modules in it are "traced", are "unplaced", or "skipped", because they are a library's own.
    """

    classes: tuple[str, ...]
    inputs: tuple[tuple[str, PlacementRule], ...] = ()
    outputs: tuple[PlacementRule, ...] = ()
    names: tuple[str, ...] = ()
    stages: bool = False
    below: str = "traced"


def _field(name: str) -> Callable[[Any], int | None]:
    return lambda config: getattr(config, name, None)


def _queries(config: Any) -> int:
    """Return what attention makes of a token."""
    if getattr(config, "multi_latent_attention", False):
        return config.v_head_dim * config.num_attention_heads
    return config.kv_channels * config.num_attention_heads


def _qkv(config: Any) -> int:
    queries = 2 if getattr(config, "attention_output_gate", False) else 1
    return config.kv_channels * (queries * config.num_attention_heads + 2 * config.num_query_groups)


def _gates(config: Any) -> int:
    return 2 if config.gated_linear_unit else 1


def _gated(width: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    return lambda config: _gates(config) * (width(config) or 0)


# Of a dense layer, of the experts that see every token.
_FFN = (_field("ffn_hidden_size"), _field("moe_shared_expert_intermediate_size"))

# A layer with an adapter is named as the layer, which lies below it.
_ADAPTED, _BASE = "LoRALinear", ".to_wrap"
_COLUMN_PARALLEL = ("ColumnParallelLinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear", _ADAPTED)
_ROW_PARALLEL = ("RowParallelLinear", "TERowParallelLinear", _ADAPTED)
_NORM = ("RMSNorm", "LayerNorm", "FusedLayerNorm", "InvariantRMSNorm", "PlainRMSNorm")
_QKV = (
    ("query", heads("num_attention_heads")),
    ("key", heads("num_query_groups")),
    ("value", heads("num_query_groups")),
)
_DUPLICATED = ("DuplicatedLinear", "TELinear", _ADAPTED)
_QUERY_NORM = latent("q_lora_rank", or_else=heads("num_attention_heads"))
_EXPERTS = ("TEGroupedMLP", "GroupedMLP", "SequentialMLP")

_DELTA_HEADS = "linear_num_value_heads"

_FC1 = columns(*map(_gated, _FFN), segments=_gates)
# Adapted layer -> where its input and its output lie, which are those of the adapter.
_OF_ADAPTER = {
    "linear_qkv": (hidden, columns(_qkv)),
    "linear_fc1": (hidden, _FC1),
    "linear_proj": (columns(_queries), hidden),
    "linear_fc2": (columns(*_FFN), hidden),
    "linear_q_proj": (hidden, sliced),
    "linear_q_down_proj": (hidden, latent("q_lora_rank")),
    "linear_q_up_proj": (latent("q_lora_rank"), sliced),
    "linear_kv_down_proj": (hidden, latent("kv_lora_rank", "qk_pos_emb_head_dim")),
    "linear_kv_up_proj": (latent("kv_lora_rank"), sliced),
    "in_proj": (hidden, sections),
    "out_proj": (sliced, hidden),
}


def _adapter(end: int) -> PlacementRule:
    """Return the rule of an adapter's input (0) or output (1), by the layer that it adapts."""

    def rule(x: Tensor, module: Any, micro_batch: int, site: Site) -> Placement | None:
        rules = _OF_ADAPTER.get(module.base_linear_name.rpartition(".")[2])
        return rules and rules[end](x, module, micro_batch, site)

    return rule


# Modules that do nothing, and whether there are any is another matter in every implementation.
NOTHING = ("IdentityOp", "IdentityFuncOp")

# The first row that fits counts.
ROWS = (
    ModuleRow(("GPTModel", "HybridModel", "MambaModel"), (("input_ids", tokens),), (tokens,), stages=True),
    ModuleRow(("TransformerBlock", "HybridStack", "MambaStack"), (("hidden_states", hidden),), (hidden,), stages=True),
    ModuleRow(
        (
            *("TransformerLayer", "SelfAttention", "MLASelfAttention", "GatedDeltaNet", "MLP", "MoELayer"),
            *("MambaLayer", "MambaMixer"),
        ),
        (("hidden_states", hidden),),
        (hidden,),
    ),
    ModuleRow(("LanguageModelEmbedding",), (("input_ids", tokens),), (hidden,)),
    ModuleRow(("VocabParallelEmbedding",), (("input_", tokens),), (embedded,), names=("word_embeddings",)),
    ModuleRow(("Embedding",), (("input", tokens),), (embedded,), names=("position_embeddings",)),
    ModuleRow(("Dropout",), (("input", hidden),), (hidden,), names=("embedding_dropout",)),
    ModuleRow(("Dropout",), (("input", scores),), (scores,), names=("attention_dropout",)),
    ModuleRow(("RotaryEmbedding",), (), (constant,)),
    ModuleRow(_NORM, (("x", _QUERY_NORM),), (_QUERY_NORM,), names=("q_layernorm",)),
    ModuleRow(_NORM, (("x", heads(_DELTA_HEADS)),), (heads(_DELTA_HEADS),), names=("out_norm",)),
    ModuleRow(_NORM, (("x", latent("kv_lora_rank")),), (latent("kv_lora_rank"),), names=("kv_layernorm",)),
    ModuleRow(_DUPLICATED, (("x", hidden),), (latent("q_lora_rank"),), names=("linear_q_down_proj",)),
    ModuleRow(_DUPLICATED, (("x", hidden),), (latent("kv_lora_rank", "qk_pos_emb_head_dim"),),
        names=("linear_kv_down_proj",)),
    ModuleRow(_DUPLICATED, (("x", hidden),), (latent("moe_latent_size"),), names=("fc1_latent_proj",)),
    ModuleRow(_DUPLICATED, (("x", latent("moe_latent_size")),), (hidden,), names=("fc2_latent_proj",)),
    ModuleRow(_COLUMN_PARALLEL, (("x", hidden),), (sliced,), names=("linear_q_proj",)),
    ModuleRow(_COLUMN_PARALLEL, (("x", latent("q_lora_rank")),), (sliced,), names=("linear_q_up_proj",)),
    ModuleRow(_COLUMN_PARALLEL, (("x", latent("kv_lora_rank")),), (sliced,), names=("linear_kv_up_proj",)),
    ModuleRow(_NORM, (("x", heads("num_query_groups")),), (heads("num_query_groups"),), names=("k_layernorm",)),
    ModuleRow(_NORM, (("x", hidden),), (hidden,),
        names=("input_layernorm", "pre_mlp_layernorm", "post_layernorm", "final_layernorm", "final_norm")),
    ModuleRow(_COLUMN_PARALLEL, (("x", hidden),), (columns(_qkv),), names=("linear_qkv",)),
    ModuleRow(_COLUMN_PARALLEL, (("x", hidden),), (_FC1,), names=("linear_fc1",)),
    ModuleRow(_COLUMN_PARALLEL, (("x", hidden),), (sliced,), names=("output_layer",)),
    ModuleRow(_COLUMN_PARALLEL, (("x", hidden),), (sections,), names=("in_proj",)),
    ModuleRow(_ROW_PARALLEL, (("x", columns(_queries)),), (hidden,), names=("linear_proj",)),
    ModuleRow(_ROW_PARALLEL, (("x", columns(*_FFN)),), (hidden,), names=("linear_fc2",)),
    ModuleRow(_ROW_PARALLEL, (("x", sliced),), (hidden,), names=("out_proj",)),
    ModuleRow(("ParallelLinearAdapter",), (("x", _adapter(0)),), (_adapter(1),), below="unplaced"),
    # The invariant one launches what is below as often as it needs to: in trials, or once for each shard.
    ModuleRow(("TEDotProductAttention", "InvariantDotProductAttention"), _QKV, (columns(_queries),), below="skipped"),
    ModuleRow(("DotProductAttention",), _QKV, (columns(_queries),)),
    ModuleRow(("FusedScaleMaskSoftmax",), (("input", scores),), (scores,)),
    ModuleRow(("TopKRouter",), (("input", hidden),), (experts, experts)),
    ModuleRow(_EXPERTS, below="unplaced"),
)  # fmt: skip


def row_of(module: Any, name: str) -> ModuleRow | None:
    """Return the row for a module; None: its tensors have no place."""
    classes = class_names(module)
    last = name.removesuffix(_BASE).rpartition(".")[2]
    return next((row for row in ROWS if classes & set(row.classes) and (not row.names or last in row.names)), None)


def class_names(module: Any) -> set[str]:
    """Return the names of a module's class and all classes it derives from."""
    return {kind.__name__ for kind in type(module).__mro__}
