"""What a rank keeps of a micro-batch from its forward to its backward pass: one row a group of tensors.

Read from the code of Megatron-Core 0.19 and Transformer Engine 2.20, and from `numerics/`. In the comments [s] are the
tokens of a sequence, [s/t] those of a rank with sequence parallelism.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tp_invariant_recipes.settings import layout, low_precision
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing import size
from tp_invariant_recipes.sizing.size import Widths

FP32 = 4

# Rows of the tables below. A word of `model.recompute_modules` drops the rows of its name.
INPUT, NORM, ATTENTION, CORE, MLP, EXPERTS, ACTIVATION, SHARED, MAMBA, DELTA_NET = (
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
)
# What else a word drops: recomputing all of the experts' part recomputes these, too.
ALSO_DROPS = {EXPERTS: (ACTIVATION, SHARED)}

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
    score:    bytes of one in unfused attention: of the softmax in fp32 and its copy, or of the softmax alone.
    fused:    whether attention and activation functions are fused kernels: Transformer Engine's layers, and `portable`.
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
    score: int
    fused: bool
    head_norms: bool
    rounds: bool
    widths: Widths

    @property
    def outputs(self) -> int:
        """Copies of attention's output: of fused kernels, and of the projection after it where that rounds."""
        return 2 if self.rounds and self.fused else 1

    @property
    def rows(self) -> int:
        """Copies of tokens that a rank's experts compute, if the router spreads them evenly."""
        return self.slice * self.topk * self.etp


def micro_batch(config: RunConfig) -> MicroBatch:
    """The micro-batch of a run on one of its ranks."""
    model, at, fp8 = config.model, layout.of(config), low_precision.fp8_layers(config)
    tokens = sequences(config) * model["seq_length"] // at.cp
    te = model.get("transformer_impl") != "local"
    arithmetic = config.numerics.arithmetic
    of_element, half = element(config), not te and not model.get("attention_softmax_in_fp32")
    stated = arithmetic is not None and arithmetic.any_machine  # its attention keeps no scores
    return MicroBatch(
        tokens=tokens,
        slice=tokens // at.tp if at.sp else tokens,
        sequence=model["seq_length"],
        element=of_element,
        tp=at.tp,
        etp=at.etp,
        heads=model["num_attention_heads"] // at.tp,
        topk=model.get("moe_router_topk") or 2,
        experts=model.get("num_moe_experts") or 0,
        tree=config.numerics.invariant,
        score=of_element if half or of_element == FP32 else FP32 + of_element,
        fused=stated or (te and model.get("attention_backend") not in ("unfused", "local")),
        head_norms=bool(model.get("qk_layernorm")),
        rounds=fp8 is not None and fp8.recipe == low_precision.MXFP8,
        widths=size.widths(model),
    )


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
    """What every part keeps: its input, and the norm's output."""
    size = b.slice * b.element * b.widths.hidden
    return {INPUT: size, NORM: size}


def _attention(b: MicroBatch) -> Kept:
    query, key = b.widths.query // b.tp, b.widths.key // b.tp
    if b.widths.kv_latent:
        return _latent_attention(b)
    before_norms = query + key if b.head_norms else 0  # copies, so that what the one product makes does not stay
    after = query + 2 * key + b.widths.gate // b.tp
    core = b.heads * b.tokens * FP32  # of the softmax, a number a row
    if not b.fused:
        repeated = 2 * query if query > key else 0
        scores = b.heads * b.tokens * b.sequence * b.score
        core = scores + b.tokens * b.element * repeated
    return {
        **_input_and_norm(b),
        ATTENTION: b.tokens * b.element * (before_norms + after + query * b.outputs),
        CORE: core,
    }


def _latent_attention(b: MicroBatch) -> Kept:
    w = b.widths
    query, value, out = w.query // b.tp, w.value // b.tp, w.core // b.tp
    latents = w.q_latent + w.kv_latent + w.shared_key
    # Latents before and after their norms on each rank's slice; what the up-projections make of a token; query and key
    # with their turned parts, and the values apart.
    made = query + (query - b.heads * w.shared_key + value)
    core = b.heads * b.tokens * FP32
    if not b.fused:
        core = b.heads * b.tokens * b.sequence * b.score
    return {
        **_input_and_norm(b),
        ATTENTION: b.element * (b.slice * 2 * latents + b.tokens * (made + 2 * query + value + out * b.outputs)),
        CORE: core,
    }


def _feed_forward(b: MicroBatch, width: int, tokens: int) -> int:
    """Before and after the activation function; unfused ones keep what is between, too."""
    return tokens * b.element * width * (b.widths.gates + 1 + (0 if b.fused else 1))


def _mlp(b: MicroBatch) -> Kept:
    return {
        **_input_and_norm(b),
        MLP: _feed_forward(b, b.widths.ffn // b.tp, b.tokens),
    }


def _experts(b: MicroBatch) -> Kept:
    width = b.widths.moe_ffn // b.etp
    # Of the router, in fp32: logits, scores, and both once more for its loss.
    routed = b.slice * b.experts * 4 * FP32
    unfused = 0 if b.fused or b.tree else b.rows * b.element * width
    return {
        **_input_and_norm(b),
        EXPERTS: routed + b.rows * b.element * (b.widths.hidden + b.widths.gates * width) + unfused,
        ACTIVATION: b.rows * b.element * width,
        SHARED: _feed_forward(b, b.widths.shared // b.tp, b.tokens),
    }


def _mamba(b: MicroBatch) -> Kept:
    inner, states = b.widths.inner // b.tp, b.widths.states // b.tp
    heads = b.widths.mamba_heads // b.tp
    # Stock: z, x, B, C and dt as in_proj makes them; the scan's y before and after its gate; the norm's.
    # Tree: x, B and C before and after the convolution; z and dt; y before and after its gate, twice; the norm's.
    y = 4 * inner + states if b.tree else 3 * inner
    features = 2 * inner + states + heads + y
    return {
        **_input_and_norm(b),
        MAMBA: b.tokens * (b.element * features + FP32 * heads),
    }


def _delta_net(b: MicroBatch) -> Kept:
    keys, values, heads = (size // b.tp for size in (b.widths.delta_key, b.widths.delta_value, b.widths.delta_heads))
    # Before and after the convolution; z, beta and alpha; the rule's output, before and after its norm and its gate.
    # Stock also keeps normed queries and keys, once for each head of values, in place of copies of y.
    return {
        **_input_and_norm(b),
        DELTA_NET: b.tokens * b.element * (2 * (2 * keys + values) + values + 2 * heads + 4 * values),
    }


def temporary(b: MicroBatch, part: str) -> int:
    """Bytes that a part's backward pass needs for itself, where that is more than the gradients of its features.

    A gated delta net's on a GPU: what kernels/delta_rule.py allocates. Of a token and a head in fp32, rows of two
    matrices of 64 by 64, N, its gradient and the output's, and 1/64 of a state and its gradient; of a token and a
    group, a query and a key. The gradient of x has the features' own dtype.
    """
    if part != size.DELTA_NET or not b.tree:
        return 0
    w = b.widths
    value = w.delta_value // w.delta_heads
    of_head = 2 * 64 + 16 + 3 * value + 2 * w.delta_key_head * value // 64  # 16: p, β, gates and their gradients
    in_fp32 = w.delta_heads * of_head + 2 * w.delta_key
    return b.tokens * (FP32 * in_fp32 + b.element * (2 * w.delta_key + w.delta_value)) // b.tp


PARTS: dict[str, Callable[[MicroBatch], Kept]] = {
    size.ATTENTION: _attention,
    size.MLP: _mlp,
    size.EXPERTS: _experts,
    size.MAMBA: _mamba,
    size.DELTA_NET: _delta_net,
}
