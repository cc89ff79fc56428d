"""The size of a model: its layers and their parameters, from its dimensions."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

Model = dict[str, Any]  # the section `model` of a composed tree

# One letter a part of a layer, as in Nemotron's pattern. A layer of a GPT model has two parts.
ATTENTION, MLP, EXPERTS, MAMBA = "*", "-", "E", "M"
TAPS = 4  # of Mamba's convolution


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters.

    split:   divided among the ranks of tp.
    whole:   on every rank of tp.
    experts: of all experts, divided among the ranks of ep and etp.
    largest: of the largest single matrix of `split`; 0: none is split.
    """

    split: int = 0
    whole: int = 0
    experts: int = 0
    largest: int = 0

    def __add__(self, other: "Weights") -> "Weights":
        largest = max(self.largest, other.largest)
        return Weights(self.split + other.split, self.whole + other.whole, self.experts + other.experts, largest)

    def __mul__(self, times: int) -> "Weights":
        return Weights(self.split * times, self.whole * times, self.experts * times, self.largest)

    @property
    def total(self) -> int:
        """All of them, once."""
        return self.split + self.whole + self.experts


@dataclass(frozen=True)
class Widths:
    """Features a token has inside a model's parts, with the defaults of Megatron-Core filled in.

    query, key:       of all heads together; key also of the values.
    inner, states:    of a Mamba layer: of x and z; of B and C together.
    gates:            matrices that a feed-forward part has before its activation: 2 with a gate, else 1.
    """

    hidden: int
    query: int
    key: int
    ffn: int
    moe_ffn: int
    shared: int
    gates: int
    inner: int
    states: int
    mamba_heads: int


def widths(model: Model) -> Widths:
    """The widths of a model section."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    channels = model.get("kv_channels") or hidden // heads
    ffn = model.get("ffn_hidden_size") or 4 * hidden
    return Widths(
        hidden=hidden,
        query=heads * channels,
        key=(model.get("num_query_groups") or heads) * channels,
        ffn=ffn,
        moe_ffn=model.get("moe_ffn_hidden_size") or ffn,
        shared=model.get("moe_shared_expert_intermediate_size") or 0,
        gates=2 if model.get("gated_linear_unit") else 1,
        inner=(model.get("mamba_num_heads") or 0) * (model.get("mamba_head_dim") or 0),
        states=2 * (model.get("mamba_num_groups") or 0) * (model.get("mamba_state_dim") or 0),
        mamba_heads=model.get("mamba_num_heads") or 0,
    )


def layers(model: Model) -> Counter[str]:
    """How many layers there are of each kind, by its parts: "*-" is attention and a feed-forward part."""
    pattern = model.get("hybrid_layer_pattern")
    if pattern:
        return Counter(pattern.partition("/")[0].replace("|", ""))
    count = model["num_layers"]
    sparse = 0
    if model.get("num_moe_experts"):
        frequency = model.get("moe_layer_freq") or 1
        sparse = sum(map(bool, frequency)) if isinstance(frequency, list) else -(-count // frequency)
    return +Counter({ATTENTION + EXPERTS: sparse, ATTENTION + MLP: count - sparse})


def weights(model: Model, part: str) -> Weights:
    """The parameters of one part of a layer, with the norm before it."""
    w = widths(model)
    if part == ATTENTION:
        qkv, out = w.hidden * (w.query + 2 * w.key), w.query * w.hidden
        norms = 2 * w.query // model["num_attention_heads"] if model.get("qk_layernorm") else 0
        biases = w.query + 2 * w.key if model.get("add_qkv_bias") or model.get("add_bias_linear") else 0
        return Weights(split=qkv + out + biases, whole=w.hidden + norms, largest=max(qkv, out))
    if part == MLP:
        return Weights(split=(w.gates + 1) * w.hidden * w.ffn, whole=w.hidden, largest=w.gates * w.hidden * w.ffn)
    if part == EXPERTS:
        count, shared = model["num_moe_experts"], (w.gates + 1) * w.hidden * w.shared
        each = (w.gates + 1) * w.hidden * w.moe_ffn
        return Weights(
            split=shared,
            whole=w.hidden + count * w.hidden,  # the norm and the router
            experts=count * each,
            largest=w.gates * w.hidden * w.shared,
        )
    rows = 2 * w.inner + w.states + w.mamba_heads
    convolved = w.inner + w.states
    small = convolved * (TAPS + 1) + 3 * w.mamba_heads + w.inner  # the convolution; A, D and the bias of dt; the norm
    return Weights(split=w.hidden * (rows + w.inner) + small, whole=w.hidden, largest=w.hidden * rows)


def embedding(model: Model) -> Weights:
    """The parameters of one matrix between tokens and features."""
    size = model["vocab_size"] * model["hidden_size"]
    return Weights(split=size, largest=size)


def parameters(model: Model) -> int:
    """How many parameters a model section describes."""
    ends = embedding(model).total * (1 if model.get("share_embeddings_and_output_weights") else 2)
    inside = sum(count * weights(model, part).total for layer, count in layers(model).items() for part in layer)
    return ends + model["hidden_size"] + inside
