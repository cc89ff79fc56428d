"""What a rank keeps of a micro-batch from its forward to its backward pass: one row a group of tensors.

Read from the code of Megatron-Core 0.19 and Transformer Engine 2.20, and from `numerics/`; counted on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings import delta_net, low_precision
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing import size
from tp_invariant_recipes.sizing.size import Widths

FP32 = 4

ROTARY = ("rope", "yarn")  # kinds of positions

# Rows of the tables below. A word of `model.recompute_modules` drops the rows of its name.
INPUT, NORM, ATTENTION, CORE, MLP, EXPERTS, ACTIVATION, SHARED, MAMBA, DELTA_NET, TORCH = (
    "input",
    "layernorm",
    "attention",
    "core_attn",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
    "mamba",
    "delta_net",
    "torch",  # what autograd keeps inside a function of plain torch; its gradients come and go one by one
)
# What else a word drops: recomputing all of the experts' part recomputes these, too.
ALSO_DROPS = {EXPERTS: (ACTIVATION, SHARED)}

SCAN_CHUNK, DELTA_CHUNK = 128, 64  # tokens: of Mamba's scan and of the gated delta rule
# Activation function -> numbers of a feature that it keeps in plain torch, beside the one that every function does.
INSIDE = {"fast_gelu": 6}

Kept = dict[str, int]  # row -> bytes


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on one rank, and what decides which tensors stay.

    tokens:   of the whole tensor-parallel group; with cp, this rank's part of them.
    slice:    of this rank where sequence parallelism divides them, else all.
    sequence: tokens that attend to each other: of one sequence.
    element:  bytes of an activation.
    tp, etp:  as in `Layout`.
    topk:     copies of each token for experts; experts: how many there are.
    tree:     whether layers are our own, not stock ones.
    holds:    whether attention keeps all that one product makes, since it copies no values: `portable`'s on a CPU.
    score:    bytes of one in unfused attention: of the softmax in fp32 and its copy, or of the softmax alone; and of a
              cap.
    fused:    whether attention is a fused kernel: Transformer Engine's, and `portable`.
    plain:    whether functions of single tokens are plain torch: those of a CPU but for `portable`.
    shards:   of this rank, V/t.
    rotary:   features of a head whose angles stay.
    inside:   of `INSIDE`. gated: whether shared experts have a gate. norms: of a part.
    rounds:   whether layers round their operands to MXFP8 in bf16.
    """

    tokens: int
    slice: int
    sequence: int
    element: int
    tp: int
    etp: int
    heads: int
    topk: int
    experts: int
    tree: bool
    holds: bool
    score: int
    fused: bool
    plain: bool
    shards: int
    rotary: int
    inside: int
    gated: bool
    norms: int
    head_norms: bool
    rounds: bool
    widths: Widths

    @property
    def outputs(self) -> int:
        """Copies of attention's output: of fused kernels, and of the projection after it where that rounds."""
        return 2 if self.rounds and self.fused else 1

    @property
    def wide(self) -> int:
        """Bytes that a norm keeps of a feature beside its operand: stock's in plain torch that in fp32, and scaled."""
        return (FP32 if self.element == FP32 else 2 * FP32) if self.plain and not self.tree else 0

    @property
    def pairs(self) -> int:
        """Pairs of tokens of which attention has a score."""
        return self.tokens * self.sequence

    @property
    def rows(self) -> int:
        """Copies of tokens that a rank's experts compute, if the router spreads them evenly."""
        return self.slice * self.topk * self.etp


def micro_batch(config: RunConfig) -> MicroBatch:
    """Return the micro-batch of a run on one of its ranks."""
    model, at, fp8 = config.model, config.layout, low_precision.fp8_layers(config)
    tokens = sequences(config) * model["seq_length"] // at.cp
    return MicroBatch(
        tokens=tokens,
        slice=tokens // at.tp if at.sp else tokens,
        sequence=model["seq_length"],
        element=element(config),
        tp=at.tp,
        etp=at.etp,
        heads=model["num_attention_heads"] // at.tp,
        topk=model.get("moe_router_topk") or 2,
        experts=config.shape.experts,
        tree=config.numerics.invariant,
        shards=max(1, (config.numerics.virtual_shards or 1) // at.tp),
        inside=INSIDE.get(str(model.get("activation_func")).rpartition(".")[2], 0),
        gated=bool(model.get(delta_net.EXPERT_GATE)),
        norms=size.norms(config.shape),
        head_norms=config.shape.head_norms,
        rounds=fp8 is not None and fp8.recipe == low_precision.MXFP8,
        widths=size.widths(config.shape),
        **_attention_fields(config),
    )


def _attention_fields(config: RunConfig) -> dict[str, Any]:
    """Return the fields of a MicroBatch that depend on which attention computes."""
    model, arithmetic, of_element = config.model, config.numerics.arithmetic, element(config)
    te = model.get("transformer_impl") != "local"
    stated = arithmetic is not None and arithmetic.any_machine  # its attention keeps no scores
    capped = FP32 if model.get("attn_logit_softcapping") else 0  # numerics/megatron/families/gemma.py, on any device
    half = not te and not model.get("attention_softmax_in_fp32") and not capped
    unfused = model.get("attention_backend") in ("unfused", "local") or (capped and config.numerics.invariant)
    plain = not te and not stated
    return {
        "holds": stated and config.device.kind == "cpu",
        "score": capped + (of_element if half or of_element == FP32 else FP32 + of_element),
        "fused": stated or (te and not unfused),
        "plain": plain,
        "rotary": size.turned(config.shape) if plain and model.get("position_embedding_type") in ROTARY else 0,
    }


def sequences(config: RunConfig) -> int:
    """Sequences that are computed at once: the invariant numerics take those of a micro-batch one by one."""
    return 1 if config.numerics.invariant else config.train["micro_batch_size"]


def element(config: RunConfig) -> int:
    """Bytes of a weight and of an activation."""
    return FP32 if config.mixed_precision is None and not _half(config) else 2


def _half(config: RunConfig) -> bool:
    return bool(config.model.get("bf16") or config.model.get("fp16"))


def kept(batch: MicroBatch, part: str) -> Kept:
    """Bytes that a part of a layer keeps, by row."""
    return PARTS[part](batch)


def _input_and_norm(b: MicroBatch) -> Kept:
    """Return what every part keeps: its input, and the norm's output; of a norm after the part, too, the operand."""
    size = b.slice * b.element * b.widths.hidden
    return {INPUT: size, NORM: size * b.norms + b.slice * b.widths.hidden * b.wide * b.norms}


def _attention(b: MicroBatch) -> Kept:
    query, key = b.widths.query // b.tp, b.widths.key // b.tp
    if b.widths.kv_latent:
        return _latent_attention(b)
    before_norms = query + key if b.head_norms else 0  # copies, so that what the one product makes does not stay
    after = query + 2 * key + b.widths.gate // b.tp
    core = b.heads * b.tokens * FP32  # of the softmax, a number a row
    if not b.fused:
        repeated = 2 * query if query > key else 0
        core = _scores(b) + b.tokens * b.element * repeated
    # The values are a part of what one product makes, and keep all of it; the tree's core attention copies them.
    held = b.tokens * b.element * (query + key) if b.tree else 0
    in_fp32 = b.tokens * (FP32 * b.widths.gate // b.tp + b.wide * before_norms)  # the gate's sigmoid
    return {
        **_input_and_norm(b),
        ATTENTION: b.tokens * b.element * (before_norms + after + query * b.outputs + 4 * b.rotary) + held + in_fp32,
        CORE: core - (0 if b.holds else held),
    }


def _scores(b: MicroBatch) -> int:
    """Of unfused attention: the scores of all heads and one mask."""
    return b.pairs * (b.heads * b.score + 1)


def _latent_attention(b: MicroBatch) -> Kept:
    w = b.widths
    query, value, out = w.query // b.tp, w.value // b.tp, w.core // b.tp
    latents = w.q_latent + w.kv_latent + w.shared_key
    # Latents before and after their norms on each rank's slice; query and key with their turned parts, and the values
    # apart: of what the up-projections make nothing stays.
    features = 2 * query + value + out * b.outputs + 4 * b.rotary
    return {
        **_input_and_norm(b),
        ATTENTION: b.element * (b.slice * 2 * latents + b.tokens * features)
        + b.slice * b.wide * (w.q_latent + w.kv_latent),
        CORE: b.heads * b.tokens * FP32 if b.fused else _scores(b),
    }


def _feed_forward(b: MicroBatch, width: int, tokens: int) -> int:
    """Before and after the activation function; in plain torch also both factors of a gated one."""
    inside = 2 * (b.widths.gates - 1) + b.inside if b.plain else 0
    return tokens * b.element * width * (b.widths.gates + 1 + inside)


def _mlp(b: MicroBatch) -> Kept:
    return {
        **_input_and_norm(b),
        MLP: _feed_forward(b, b.widths.ffn // b.tp, b.tokens),
    }


def _experts(b: MicroBatch) -> Kept:
    width = b.widths.moe_ffn // b.etp
    # Of the router, in fp32: logits, scores, and both once more for its loss.
    routed = b.slice * b.experts * 4 * FP32
    # Stock in plain torch: tokens in the order of senders, too; both factors of the activation and their product.
    more = b.rows * b.element * (b.widths.hidden + 3 * width) if b.plain and not b.tree else 0
    out = b.slice * b.element * b.widths.hidden if b.gated else 0  # before the gate
    return {
        **_input_and_norm(b),
        EXPERTS: routed + b.rows * b.element * (b.widths.hidden + b.widths.gates * width) + more,
        ACTIVATION: b.rows * b.element * width,
        SHARED: _feed_forward(b, b.widths.shared // b.tp, b.tokens) + out,
    }


def _mamba(b: MicroBatch) -> Kept:
    w = b.widths
    inner, states, heads = w.inner // b.tp, w.states // b.tp, w.mamba_heads // b.tp
    if b.plain:
        # Tree: x, B and C before the convolution; y before and after its norm. Stock: the latter.
        features = 3 * inner + states if b.tree else inner
        around = 0 if b.tree else 2 * (inner + states) + 2 * inner  # of stock's convolution and norm
        return {
            **_input_and_norm(b),
            MAMBA: b.tokens * b.element * features,
            TORCH: b.tokens * FP32 * (_in_scan(inner, states, heads, w.mamba_state) + around),
        }
    # Stock: z, x, B, C and dt as in_proj makes them; the scan's y before and after its gate; the norm's.
    # Tree: x, B and C before and after the convolution; z and dt; y before and after its gate, twice; the norm's.
    y = 4 * inner + states if b.tree else 3 * inner
    features = 2 * inner + states + heads + y
    return {
        **_input_and_norm(b),
        MAMBA: b.tokens * (b.element * features + FP32 * heads),
    }


def _in_scan(inner: int, states: int, heads: int, state: int) -> int:
    """Numbers that cpu_host/stand_ins/mamba.py's scan keeps of a token.

    Of a pair of a chunk: a decay and a weight of each head, and C Bᵀ of each group. B and C of each group and of each
    head; x eight times, at its steps and with its gate; two states of a chunk.
    """
    pairs = SCAN_CHUNK * (2 * heads + states // (2 * state))
    return pairs + states + 2 * heads * state + 8 * inner + 2 * inner * state // SCAN_CHUNK


def _delta_net(b: MicroBatch) -> Kept:
    w = b.widths
    keys, values, heads = (size // b.tp for size in (w.delta_key, w.delta_value, w.delta_heads))
    # Before and after the convolution; z, beta and alpha; the rule's output, before and after its norm and its gate.
    # Stock also keeps normed queries and keys, once for each head of values, in place of copies of y.
    rows = {
        **_input_and_norm(b),
        DELTA_NET: b.tokens * b.element * (2 * (2 * keys + values) + values + 2 * heads + 4 * values),
    }
    if b.tree:
        # Before and after the convolution; beta and alpha; the rule's output, out_proj's input; in fp32 the gate's own.
        features = 2 * (2 * keys + values) + 2 * heads + 2 * values
        return rows | {DELTA_NET: b.tokens * (b.element * features + FP32 * 3 * values)}
    if not b.plain:
        return rows
    # Megatron-Core's rule. Of a pair of a chunk six numbers; the inverse of each system keeps a square of every smaller
    # size. Of a token seven keys and eight values.
    chunk = DELTA_CHUNK
    squares = 6 * chunk + (chunk - 1) * (2 * chunk - 1) // 6
    return rows | {
        DELTA_NET: b.tokens * b.element * (2 * (2 * keys + values) + values),
        TORCH: b.tokens * FP32 * (heads * (squares + 7 * w.delta_key_head) + 8 * values),
    }


def backward(b: MicroBatch, part: str) -> int:
    """Bytes that a part's backward pass needs for itself: the gradients of its widest features, or of a function's.

    Gradients that are rounded are so along both sides. Unfused attention has four gradients of its scores at once, but
    no longer their softmax. A gated delta net computes its rule again (`_of_rule`).
    """
    features = max(amount for row, amount in kept(b, part).items() if row not in (CORE, TORCH))
    of_function = 0
    if part == size.ATTENTION and not b.fused:
        of_function = 3 * b.pairs * b.heads * b.element
    if part == size.DELTA_NET and b.tree:
        of_function = _of_rule(b)
    return max(features * (2 if b.rounds else 1), of_function)


def _of_rule(b: MicroBatch) -> int:
    """Bytes of the backward pass of a gated delta rule.

    On a GPU what kernels/delta_rule.py allocates. Of a token and a head in fp32, rows of two matrices of 64 by 64, N,
    its gradient and the output's, and 1/64 of a state and its gradient; of a token and a group, a query and a key. The
    gradient of x has the features' own dtype. On a CPU of one shard what autograd keeps and the first gradients:
    six numbers of a pair of a chunk, ten keys, thirteen values and a state.
    """
    w, chunk = b.widths, DELTA_CHUNK
    key, value = w.delta_key_head, w.delta_value // max(1, w.delta_heads)
    if b.plain:
        of_head = 6 * chunk + 10 * key + 13 * value + key * value // chunk
        return b.tokens * FP32 * of_head * w.delta_heads // (b.tp * b.shards)
    of_head = 2 * chunk + 16 + 3 * value + 2 * key * value // chunk  # 16: p, β, gates and their gradients
    in_fp32 = w.delta_heads * of_head + 2 * w.delta_key
    return b.tokens * (FP32 * in_fp32 + b.element * (2 * w.delta_key + w.delta_value)) // b.tp


PARTS: dict[str, Callable[[MicroBatch], Kept]] = {
    size.ATTENTION: _attention,
    size.MLP: _mlp,
    size.EXPERTS: _experts,
    size.MAMBA: _mamba,
    size.DELTA_NET: _delta_net,
}
