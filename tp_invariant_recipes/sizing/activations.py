# SPDX-License-Identifier: Apache-2.0
"""How many bytes a rank keeps of a micro-batch from its forward to its backward pass.

As Megatron's own formula does (megatron.bridge.training.utils.theoretical_memory_utils), it counts the operands of the
products of a layer. `SAFE` covers what a mode, a backend or the precision keeps beside them.
"""

import math
from dataclasses import dataclass

from tp_invariant_recipes.settings import cuda_graphs, low_precision
from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing import size
from tp_invariant_recipes.sizing.size import Widths

FP32 = 4

# Rows of `kept`. A word of `model.recompute_modules` drops the row of its name.
INPUT, NORM, ATTENTION, CORE, MLP = "input", "layernorm", "attention", "core_attn", "mlp"
EXPERTS, ACTIVATION, SHARED, MAMBA, DELTA_NET = "moe", "moe_act", "shared_experts", "mamba", "delta_net"
# What else a word drops: recomputing all of the experts' part recomputes these, too.
ALSO_DROPS = {EXPERTS: (ACTIVATION, SHARED)}

# Measured bytes over counted ones, at most (docs/memory.md): on a GPU; of plain torch on a CPU; of rounded operands.
SAFE, SAFE_PLAIN, SAFE_ROUNDED = 1.15, 2.0, 1.5

Kept = dict[str, int]  # row -> bytes


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on one rank.

    tokens:   of the whole tensor-parallel group; with cp, this rank's part of them.
    slice:    of this rank where sequence parallelism divides them, else all.
    sequence: tokens that attend to each other: of one sequence.
    element:  bytes of an activation. score: of one of unfused attention; 0: attention is fused.
    tp, etp:  as in `Layout`.
    rows:     copies of tokens that a rank's experts compute, if the router spreads them evenly.
    norms:    of a part.
    factor:   one of `SAFE`.
    """

    tokens: int
    slice: int
    sequence: int
    element: int
    score: int
    tp: int
    etp: int
    heads: int
    rows: int
    norms: int
    factor: float
    shape: ModelShape
    widths: Widths


def micro_batch(config: RunConfig) -> MicroBatch:
    """Return the micro-batch of a run on one of its ranks."""
    model, at, arithmetic = config.model, config.layout, config.numerics.arithmetic
    tokens = sequences(config) * model["seq_length"] // at.cp
    of_rank = tokens // at.tp if at.sp else tokens
    stated = arithmetic is not None and arithmetic.any_machine  # its attention keeps no scores
    local = model.get("transformer_impl") == "local" and not stated
    unfused = local or model.get("attention_backend") in ("unfused", "local")
    # The softmax in fp32 and its copy, or the softmax alone.
    wide = model.get("attention_softmax_in_fp32") or not local
    score = element(config) + FP32 * bool(wide)
    fp8 = low_precision.fp8_layers(config)
    rounds = fp8 is not None and fp8.recipe == low_precision.MXFP8
    return MicroBatch(
        tokens=tokens,
        slice=of_rank,
        sequence=model["seq_length"],
        element=element(config),
        score=score if unfused and not stated else 0,
        tp=at.tp,
        etp=at.etp,
        heads=model["num_attention_heads"] // at.tp,
        rows=math.ceil(of_rank * (model.get("moe_router_topk") or 2) * at.etp * cuda_graphs.rows_of_experts(config)),
        norms=size.norms(config.shape),
        factor=SAFE_ROUNDED if rounds else SAFE_PLAIN if local else SAFE,
        shape=config.shape,
        widths=size.widths(config.shape),
    )


def sequences(config: RunConfig) -> int:
    """Sequences that are computed at once: the invariant numerics take those of a micro-batch one by one."""
    return 1 if config.numerics.invariant else config.train["micro_batch_size"]


def element(config: RunConfig) -> int:
    """Bytes of a weight and of an activation."""
    half = config.model.get("bf16") or config.model.get("fp16") or config.mixed_precision is not None
    return 2 if half else FP32


def kept(b: MicroBatch, part: str) -> Kept:
    """Bytes that a part of a layer keeps, by row: its input, the norm's output, and the operands of its products."""
    hidden, rows = b.slice * b.shape.hidden, _OF_PART[part](b)
    counted = {INPUT: hidden * b.element, NORM: hidden * b.norms * b.element, **rows}
    return {row: amount if row in (INPUT, CORE) else int(amount * b.factor) for row, amount in counted.items()}


def _attention(b: MicroBatch) -> Kept:
    w = b.widths
    features = (w.query + 2 * w.key + w.gate + w.core) // b.tp + (b.shape.head_norms and (w.query + w.key) // b.tp)
    whole = 0
    if w.kv_latent:
        features = (2 * w.query + w.value + w.core) // b.tp
        whole = 2 * (w.q_latent + w.kv_latent + w.shared_key)  # latents before and after their norms
    core = b.tokens * b.heads * (b.sequence * b.score if b.score else FP32)  # scores, or a number a row
    return {ATTENTION: b.element * (b.tokens * features + b.slice * whole), CORE: core}


def _feed_forward(b: MicroBatch, width: int) -> int:
    """Before and after the activation function."""
    return b.tokens * b.element * width * (b.shape.gates + 1)


def _mlp(b: MicroBatch) -> Kept:
    return {MLP: _feed_forward(b, b.shape.ffn // b.tp)}


def _experts(b: MicroBatch) -> Kept:
    width = b.shape.expert_width // b.etp
    return {
        EXPERTS: b.rows * b.element * (b.shape.hidden + b.shape.gates * width),
        ACTIVATION: b.rows * b.element * width,
        SHARED: _feed_forward(b, b.shape.shared_width // b.tp),
    }


def _mamba(b: MicroBatch) -> Kept:
    """Return z, x, B, C and dt as in_proj makes them, x, B and C after the convolution, y before and after its gate."""
    w = b.widths
    return {MAMBA: b.tokens * b.element * (6 * w.inner + 2 * w.states + b.shape.mamba_heads) // b.tp}


def _delta_net(b: MicroBatch) -> Kept:
    """Return queries, keys and values before and after the convolution; z, beta, alpha; y before and after its gate."""
    w = b.widths
    features = 2 * (2 * w.delta_key + w.delta_value) + 5 * w.delta_value + 2 * w.delta_heads
    return {DELTA_NET: b.tokens * b.element * features // b.tp}


_OF_PART = {
    size.ATTENTION: _attention,
    size.MLP: _mlp,
    size.EXPERTS: _experts,
    size.MAMBA: _mamba,
    size.DELTA_NET: _delta_net,
}


# Tensors of hidden size that modules return or send back, for each token and layer; counted on the toys.
TENSORS = 35
SCORES = 4  # of each head and pair of positions, where attention is not fused
GRADIENT, UPDATE = 4, 4  # bytes of a parameter's


def recorded(config: RunConfig, steps: int, *, weights: bool) -> int:
    """Bytes of a recording, by every replica, of some steps, and of the `weights` before the first."""
    width, at = element(config), config.layout
    tokens = config.train["global_batch_size"] * config.shape.sequence
    layers = sum(size.layers(config.shape).values())
    local = config.device.kind == "cpu" and not config.numerics.invariant
    scores = SCORES * config.shape.heads * config.shape.sequence if local else 0
    of_tokens = tokens * (layers * (TENSORS * config.shape.hidden + scores) + 2 * config.shape.vocabulary)
    whole = size.parameters(config.shape)
    held = whole * at.dp * at.cp
    updated = held if not config.section("optimizer").get("use_distributed_optimizer") else whole
    return steps * (of_tokens * width + updated * (GRADIENT + UPDATE)) + weights * held * width
