# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank needs at most, from the configuration alone, part by part.

The estimate is for the fullest moment of a step: the end of the forward pass, when all activations are kept and the
loss is computed. docs/memory.md compares it with measured peaks.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings import cuda_graphs, expert_groups, finetuning, low_precision, muon, run_config
from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.run_config import Layout, RunConfig
from tp_invariant_recipes.sizing import activations, size
from tp_invariant_recipes.sizing.activations import FP32, MicroBatch
from tp_invariant_recipes.sizing.size import Weights

MIB, GIB = 2**20, 2**30

# Parts that are numbers of parameters times bytes, and the others.
COUNTED = WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOSS, FIRST_STEP, LIBRARIES = "activations", "loss", "first step", "libraries"
GRAPHS, UNUSED = "CUDA graphs", "unused"

# cuBLAS's workspace and Transformer Engine's, 32 MiB each, and what torch's allocator loses to rounding: it does not
# split the last MiB off a block, and a step of Qwen3-8B keeps some 400.
WORKSPACES = 350 * MIB
# A capture's own: cuBLAS's and Transformer Engine's workspaces again, 0.06 GiB of Qwen3-0.6B at 4096 tokens (H100).
CAPTURED = 64 * MIB
# What torch's allocator does not count: CUDA's context, NCCL's buffers, cuDNN's plans. Assumed, not measured.
OUTSIDE = 1536 * MIB
# Of a rank on a CPU beside its tensors, and of all ranks together: they are forked from a process that has imported
# Megatron-Bridge. Measured as proportional set size.
RANK_ON_CPU = 150 * MIB
IMPORTED = 800 * MIB

PIECE = 2**24  # numbers of gradients that are on their way together
MOMENTS = {"adam": 2, "sgd": 1}  # per parameter, by optimizer.optimizer; 1 for others, and for matrices of Muon
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "uint8": 1}

# Keys that move or shrink something in a way that the estimate does not follow, and the parts that it then does not
# count against the memory of a rank.
UNFOLLOWED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model.cpu_offloading", (ACTIVATIONS,)),
    ("model.fine_grained_activation_offloading", (ACTIVATIONS,)),
    ("mixed_precision.fp8", (ACTIVATIONS,)),
    ("optimizer.optimizer_cpu_offload", (OPTIMIZER,)),
    ("optimizer.use_layer_wise_distributed_optimizer", (OPTIMIZER,)),
    ("peft.dim", (ACTIVATIONS, LOSS, FIRST_STEP)),  # frozen weights need fewer activations and no gradient
    # The sequences of a row are computed one by one, and how long they are is the data's.
    ("dataset.enable_offline_packing", (ACTIVATIONS, LOSS, FIRST_STEP)),
)


@dataclass(frozen=True)
class Estimate:
    """The memory of the fullest rank and of a node.

    parts:      bytes of the rank, by part.
    outside:    bytes of the rank that torch's allocator does not count; part of `libraries`.
    ranks:      on a node. shared: bytes of a node that its ranks share; 0 on GPUs.
    unfollowed: key -> parts that the key changes in a way that the estimate does not follow.
    """

    parts: Mapping[str, int]
    outside: int
    ranks: int
    shared: int
    unfollowed: Mapping[str, tuple[str, ...]]

    @property
    def rank(self) -> int:
        """Bytes of the fullest rank."""
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """Bytes that torch's allocator counts after the first step: `torch.cuda.max_memory_allocated` of a step."""
        return self.rank - self.outside - sum(self.parts[part] for part in (FIRST_STEP, GRAPHS, UNUSED))

    @property
    def node(self) -> int:
        """Bytes of a node with all its ranks as full as the fullest."""
        return self.ranks * self.rank + self.shared

    def least(self, error: float) -> float:
        """Bytes that the rank needs even if all that is estimated, and followed, is this part of it too high."""
        omitted = {UNUSED, *(part for parts in self.unfollowed.values() for part in parts)}
        certain = {part: size for part, size in self.parts.items() if part not in omitted}
        return sum(size * (1 if part in COUNTED else 1 - error) for part, size in certain.items())


def estimate(config: RunConfig) -> Estimate:
    """Return the memory of a run whose configuration has been checked. Imports neither torch nor Megatron."""
    at = config.layout
    # The first stage has an embedding and the most micro-batches, the last one the logits; others are as the second.
    stages = [_stage(config, at, stage) for stage in sorted({0, min(1, at.pp - 1), at.pp - 1})]
    on_cpu = config.device.kind == "cpu"
    outside = RANK_ON_CPU if on_cpu else OUTSIDE
    fullest = max(stages, key=lambda parts: sum(parts.values()))
    return Estimate(
        parts={**fullest, LIBRARIES: outside + (0 if on_cpu else WORKSPACES)},
        outside=outside,
        ranks=run_config.allocation_of(config).ranks,
        shared=IMPORTED if on_cpu else 0,
        unfollowed={key: parts for key, parts in UNFOLLOWED if _set(config, key)},
    )


def _set(config: RunConfig, key: str) -> bool:
    section, _, name = key.partition(".")
    if section == "mixed_precision":
        return low_precision.adds_fp8(config)
    return bool((config.sections.get(section) or {}).get(name))


def _stage(config: RunConfig, at: Layout, stage: int) -> dict[str, int]:
    layers, model = size.layers(config.shape), config.model
    first = model.get("num_layers_in_first_pipeline_stage")
    final = model.get("num_layers_in_last_pipeline_stage")
    counts = {0: first, at.pp - 1: final} if at.pp > 1 else {}
    given = {number: count for number, count in counts.items() if count}
    total, others = layers.total(), at.pp - len(given)
    accounted = [bool(model.get(key)) for key in run_config.ACCOUNTED]
    mine = given.get(stage) or (total + sum(accounted) - sum(given.values())) / max(1, others)
    mine -= sum(on for on, end in zip(accounted, (0, at.pp - 1), strict=True) if stage == end)
    held = Counter({kind: math.ceil(count * mine / total) for kind, count in layers.items()})
    weights, matrices = (_sum(config, held, count) for count in (size.weights, size.matrices))
    last = stage == at.pp - 1
    if last:
        weights += Weights(whole=size.norm(config.shape))  # the final one
        weights += Weights() if _tied(config, at) else size.embedding(config.shape)
        weights += size.ahead(config.shape)
        matrices += size.ahead(config.shape, size.matrices)
    if stage == 0 or (last and config.shape.depths):  # the latter has a copy of the first stage's
        weights += size.embedding(config.shape) + size.positions(config.shape)
        matrices += size.positions(config.shape)  # of which Megatron-Core does not say that they are an embedding
    batch = activations.micro_batch(config)
    trained, lookups, waiting, fields = weights, 0, 0, finetuning.section(config)
    if config.numerics.invariant:  # numerics/layers/embedding.py adds up apart what one buffer would mix
        ahead = bool(config.shape.depths)
        lookup_count = (_tied(config, at) or (ahead and at.pp == 1)) + (last and ahead)
        lookups = lookup_count * size.embedding(config.shape).split // at.tp
        looked_up = config.train["global_batch_size"] // at.dp * batch.tokens * config.shape.hidden
        # Until the last backward pass has ended, where they are fewer than the rows.
        if config.numerics.data_shards == at.dp and not config.fsdp and lookup_count * looked_up <= lookups:
            lookups, waiting = 0, lookup_count * looked_up * batch.element
    if fields is not None:
        trained, lookups, shared = Weights(), 0, fields.get("share_expert_adapters", True)
        for layer, count in held.items():
            for part in layer:
                trained += (
                    size.adapters(config.shape, part, finetuning.dim(fields), finetuning.targets(fields), shared=shared)
                    * count
                )
        weights += trained
    kept = sum(count * _kept(config, batch, layer) for layer, count in held.items())
    if last:
        row = batch.slice * config.shape.hidden * batch.element
        # Of MTP also the embedding, it and the features side by side, and the last norm's two.
        depth = _kept(config, batch, size.mtp_layers(config.shape)) + 5 * row
        kept += 2 * row + config.shape.depths * depth  # 2: the final norm's input and output
    standing = int(kept * _in_flight(config, at, stage)) + waiting
    working = _working(config, at, batch, held, weights.largest // at.tp, last=last)
    step = _of_step(config, at, trained, matrices.largest)
    working[LOSS] = max(working[LOSS], step - standing)
    working[GRAPHS] = _of_graphs(config, batch, held, step, _in_flight(config, at, stage))
    working[UNUSED] = _unused(config, batch) * last
    units = [sum((size.weights(config.shape, part) for part in layer), Weights()) for layer in held]
    inner = sum((unit * count for unit, count in zip(units, held.values(), strict=True)), Weights())
    states = _states(config, at, weights, trained, lookups, matrices)
    if config.fsdp:
        largest = max(sum(_held(unit, at)) for unit in units)
        states |= _in_shards(config, at, weights, sum(_held(inner, at)), largest)
    return {**states, ACTIVATIONS: standing, **working}


def _tied(config: RunConfig, at: Layout) -> bool:
    """Whether the output layer has the embedding's weight, on one rank."""
    return at.pp == 1 and config.shape.tied


def _sum(config: RunConfig, held: Counter[str], counted: Callable[[ModelShape, str], Weights]) -> Weights:
    parts = (counted(config.shape, part) * count for layer, count in held.items() for part in layer)
    return sum(parts, Weights())


def _in_flight(config: RunConfig, at: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at once: one forward, one backward (1F1B)."""
    train = config.train
    steps = max(1, train["global_batch_size"] // (activations.sequences(config) * at.dp))
    chunks = config.model.get("virtual_pipeline_model_parallel_size") or 1
    if chunks == 1:
        return min(at.pp - stage, steps)
    return min((at.pp - stage - 1) * 2 + (chunks - 1) * at.pp + 1, steps * chunks) / chunks


def _states(
    config: RunConfig, at: Layout, weights: Weights, trained: Weights, lookups: int, matrices: Weights
) -> dict[str, int]:
    """Weights, gradients and the optimizer's state of a rank.

    trained: those that have gradients. lookups: numbers of the embedding's gradients beside. matrices: those of which
    Muon has one moment; all else has Adam's.
    """
    dense, experts = _held(weights, at)
    half = activations.element(config)
    standing = half * (dense + experts)
    dense, experts = _held(trained, at)
    optimizer, owned = config.section("optimizer"), dense + experts
    if optimizer.get("use_distributed_optimizer"):
        owned = dense // (at.dp * at.cp) + experts // max(1, at.world // (at.pp * at.etp * at.ep))
    single_moment = sum(_held(matrices, at)) if muon.computes(optimizer) else 0
    return {
        WEIGHTS: standing,
        GRADIENTS: _gradient(config, half) * _summed(config, at, dense + lookups, experts),
        OPTIMIZER: _of_optimizer(optimizer, half) * owned - FP32 * single_moment,
    }


def _in_shards(config: RunConfig, at: Layout, weights: Weights, inner: int, largest: int) -> dict[str, int]:
    """Weights, gradients and the optimizer's state of a rank under Megatron-FSDP (observe/fsdp.py).

    inner: parameters of the rank's layers, of which the last strategy has two whole at a time, and all else always.
    largest: of the largest layer. Gradients that are sharded are whole, bucket by bucket, until they are summed.
    """
    (dense, experts), strategy = _held(weights, at), config.fsdp
    whole, ranks = dense + experts, at.dp * at.cp
    shard = dense // ranks + experts // max(1, at.world // (at.pp * at.etp * at.ep))
    held, summed = whole, _summed(config, at, dense, experts)
    slices = _counted(max(1, (config.numerics.data_shards or 1) // at.dp), 1, alone=True)
    if ranks > 1 and strategy == "optim_grads":
        summed = slices * shard + min(whole, 2 * (config.section("ddp").get("bucket_size") or whole))
    elif ranks > 1 and strategy == "optim_grads_params":
        outer = whole - inner
        held, summed = shard + outer + 2 * largest, slices * shard + max(outer, 2 * largest)
    half, optimizer = activations.element(config), config.section("optimizer")
    gradient = FP32 if config.at("ddp.megatron_fsdp_main_grads_dtype") else half
    owned = whole if strategy == "no_shard" else shard
    return {
        WEIGHTS: half * held,
        GRADIENTS: gradient * summed,
        OPTIMIZER: (FP32 + _of_optimizer(optimizer, FP32)) * owned,
    }


def _of_step(config: RunConfig, at: Layout, trained: Weights, largest: int) -> int:
    """Bytes after the last backward pass: of the sums over ranks, or of Muon's step.

    Muon has of the largest matrix the whole, the iterate before and after, and two of its squares.
    """
    optimizer = config.section("optimizer")
    step = 0
    if muon.computes(optimizer):
        matrix = largest if optimizer.get(muon.TP_MODE) == muon.WHOLE else largest // at.tp
        step = FP32 * (3 * matrix + 2 * min(matrix, config.shape.hidden**2))
    return max(step, _of_sums(config, at, sum(_held(trained, at))))


def _of_sums(config: RunConfig, at: Layout, held: int) -> int:
    """Bytes of what ranks send each other of gradients (numerics/sums/bucket_reduction.py).

    Two pieces arrive at once, and a rank adds up its slice of one; with context shards two copies of a whole one put
    the leaves of the tree into its order.
    """
    if not config.numerics.invariant or at.dp * at.cp == 1:
        return 0
    shards = config.numerics.context_shards or at.cp
    whole = max(1, shards // at.cp) * held
    return FP32 * (min(2 * PIECE, whole) + 2 * min(PIECE, whole) // (1 if shards > 1 else at.dp))


def _of_graphs(config: RunConfig, batch: MicroBatch, held: Counter[str], step: int, in_flight: float) -> int:
    """Bytes that graphs keep beside: their pools hold activations and working memory, which nothing else may use.

    So what follows the last backward pass, `step` bytes, needs memory of its own. Transformer Engine's graphs of each
    layer and micro-batch have their own backward pass, inputs and gradients of outputs.
    """
    if not cuda_graphs.requested(config.model):
        return 0
    if config.model["cuda_graph_impl"] == cuda_graphs.FULL:
        return CAPTURED + step
    row = batch.slice * config.shape.hidden * batch.element
    backward = max(_backward(config, batch, layer) for layer in held)
    return CAPTURED + step + int(backward + 2 * row * held.total() * in_flight)


def _unused(config: RunConfig, batch: MicroBatch) -> int:
    """Bytes of blocks as large as the logits' largest, which small tensors that stay split: a step needs another.

    The count follows peaks of torch's allocator (docs/memory.md). No trace of allocations names the small tensors: of a
    step perhaps cuBLAS's workspaces and the optimizer's moments, which the invariant modes allocate apart
    (numerics/megatron/optimizer_step.py).
    """
    if config.device.kind == "cpu":
        return 0
    width = batch.element if config.model.get("cross_entropy_loss_fusion") else FP32
    blocks = (not config.numerics.invariant) + (config.model.get("cuda_graph_impl") == cuda_graphs.FULL)
    return blocks * width * batch.tokens * (config.shape.vocabulary // config.layout.tp)


def _held(weights: Weights, at: Layout) -> tuple[int, int]:
    """Parameters of a rank: all but experts, and experts."""
    return weights.split // at.tp + weights.whole, weights.experts // (at.ep * at.etp)


def _summed(config: RunConfig, at: Layout, dense: int, experts: int) -> int:
    """Numbers of gradients of a rank: what backward passes add to.

    For each context shard that a rank has there are as many, and for each doubling from dp to D as many again, less the
    first where a data shard is one sequence (numerics/sums/data_shards.py). Data shards that take turns have one each.
    Of experts there are as many as expert groups that a rank has in one pass (numerics/sums/expert_groups.py).
    """
    shards = config.numerics.data_shards
    if shards is None:
        return dense + experts
    of_rank, alone = max(1, shards // at.dp), config.train["global_batch_size"] == shards
    contexts, groups = max(1, (config.numerics.context_shards or 1) // at.cp), expert_groups.groups(config)
    if groups is None:
        return _counted(of_rank, 1, alone=alone) * contexts * dense
    single = alone and groups.turns == len(groups.chain) == 1
    buffers = groups.data_buffers * groups.context_buffers * _counted(groups.spans, 1, alone=single)
    return _counted(of_rank, groups.turns, alone=alone) * contexts * dense + buffers * experts


def _counted(shards: int, turns: int, *, alone: bool) -> int:
    """Buffers of a tree over `shards`, of which `turns` take turns. alone: whether each is one sequence."""
    nodes, turns = (max(1, number // (1 + alone)) for number in (shards, turns))
    return turns + (nodes // turns).bit_length() - 1


def _gradient(config: RunConfig, half: int) -> int:
    precision = config.mixed_precision
    if isinstance(precision, str):  # Bridge's recipes of this name decide, not the section ddp
        return half if precision.startswith("fp16") else FP32
    requested: Any = config.section("ddp") if precision is None else precision
    return FP32 if requested.get("grad_reduce_in_fp32", True) else half


def _of_optimizer(optimizer: Mapping[str, Any], half: int) -> int:
    """Bytes the optimizer keeps of a parameter: a master weight of 32 bits, and moments."""
    moments = MOMENTS.get("adam" if muon.computes(optimizer) else optimizer["optimizer"], 1)
    master = 0 if half == FP32 else FP32
    if not optimizer.get("use_precision_aware_optimizer"):
        return master + moments * FP32
    if half != FP32 and optimizer.get("store_param_remainders", True):
        master = FP32 - half  # the bits that the weight lacks
    for moment in ("exp_avg_dtype", "exp_avg_sq_dtype")[:moments]:
        name = str(optimizer.get(moment) or "float32").rpartition(".")[2]  # "bfloat16", "torch.bfloat16"
        master += next((width for known, width in BYTES.items() if name.startswith(known)), FP32)
    return master


def _kept(config: RunConfig, batch: MicroBatch, layer: str) -> float:
    """Bytes that a layer keeps of a micro-batch, after what is recomputed."""
    rows = [activations.kept(batch, part) for part in layer]
    if config.model.get("recompute_granularity") == "full":
        return rows[0][activations.INPUT] / _unit(config)
    dropped = _dropped(config)
    return sum(amount for part in rows for row, amount in part.items() if row not in dropped)


def _unit(config: RunConfig) -> int:
    """Layers that are computed again together."""
    model = config.model
    if model.get("recompute_granularity") != "full" or model.get("recompute_method") == "block":
        return 1
    return model.get("recompute_num_layers") or 1


def _dropped(config: RunConfig) -> set[str]:
    if config.model.get("recompute_granularity") != "selective":
        return set()
    words = config.model.get("recompute_modules") or [activations.CORE]
    return {row for word in words for row in (word, *activations.ALSO_DROPS.get(word, ()))}


def _working(
    config: RunConfig, at: Layout, batch: MicroBatch, held: Counter[str], largest: int, *, last: bool
) -> dict[str, int]:
    """Bytes in use for a moment: those of the loss or of the backward pass of a layer, whichever is more.

    largest: numbers of the rank's part of the largest matrix.
    """
    matrix, hidden = largest * batch.element, batch.tokens * config.shape.hidden
    moments = [matrix + int(max(_backward(config, batch, layer) for layer in held))]
    arithmetic = config.numerics.arithmetic
    tries = arithmetic is not None and arithmetic.tries_products and config.device.kind == "gpu"
    # numerics/gemm/contraction.py tries a sum over shards: two outputs, two sums of pairs, and what fills the
    # operands.
    trial = 6 * hidden * FP32 if tries else 0
    others = 0  # logits of later tokens
    if last:
        logits = config.shape.vocabulary // at.tp * batch.tokens
        gathered = at.tp if arithmetic is not None and arithmetic.gathers_operands else 1
        # The logits, and their softmax in fp32 or their gradient; the gradient of the matrix, and tokens.
        moments.append(logits * (batch.element + FP32) + (gathered * largest + hidden) * batch.element)
        others = config.shape.depths * logits * (batch.element + FP32)
        if tries:
            # numerics/gemm/cublas.py tries the output matrix's first gradient: three of it in fp32, and its
            # operand.
            trial = max(trial, 2 * logits * batch.element + 3 * largest * FP32)
    working = max(moments) + others
    return {LOSS: working, FIRST_STEP: max(0, trial - working)}


def _backward(config: RunConfig, batch: MicroBatch, layer: str) -> float:
    """Return the bytes of a layer's backward pass: what it computes again, and gradients of its widest part."""
    rows = [sum(activations.kept(batch, part).values()) for part in layer]
    return _unit(config) * (sum(rows) - _kept(config, batch, layer)) + max(rows)
