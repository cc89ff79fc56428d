# SPDX-License-Identifier: Apache-2.0
"""The size of a model: its layers and their parameters, from its dimensions."""

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import delta_net
from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.schema import LEARNED

# One letter a part of a layer, as in Nemotron's pattern. A layer of a GPT model has two parts.
ATTENTION, MLP, EXPERTS, MAMBA, DELTA_NET = "*", "-", "E", "M", "G"
TAPS = 4  # of the convolution of Mamba and of gated delta nets


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

    query, key:       of all heads together.
    value:            of the values of all groups, which are the keys', but for multi-latent attention.
    core:             what attention makes of a token, all heads together.
    q_latent:         of multi-latent attention: features of a query's latent; 0: it has none.
    kv_latent, shared_key: its latent of keys and values; the key that all heads share. 0: no such attention.
    inner, states:    of a Mamba layer: of x and z; of B and C together.
    gate:             of attention's output; 0: it has none.
    delta_key, delta_value: of a gated delta net: of its keys, and of its values, of all heads; delta_heads: of values.
    """

    query: int
    key: int
    value: int
    core: int
    q_latent: int
    kv_latent: int
    shared_key: int
    inner: int
    states: int
    gate: int
    delta_key: int
    delta_value: int
    delta_heads: int


def widths(model: ModelShape) -> Widths:
    """Return the widths of a model section."""
    heads, latent = model.heads, model.latent
    query = core = heads * model.head_width
    key = value = model.groups * model.head_width
    if latent:
        query = key = heads * (model.key_width + model.turned_key)
        value = core = heads * model.value_width
    delta_key, delta_value, delta_heads = families.delta_widths(model.fields)
    return Widths(
        query=query,
        key=key,
        value=value,
        core=core,
        q_latent=model.query_latent if latent else 0,
        kv_latent=model.key_latent if latent else 0,
        shared_key=model.turned_key if latent else 0,
        inner=model.mamba_heads * model.mamba_width,
        states=2 * model.mamba_groups * model.mamba_state,
        gate=query if model.fields.get(delta_net.ATTENTION_GATE) else 0,
        delta_key=delta_key,
        delta_value=delta_value,
        delta_heads=delta_heads,
    )


def layers(model: ModelShape) -> Counter[str]:
    """How many layers there are of each kind, by its parts: "*-" is attention and a feed-forward part."""
    if model.pattern:
        return Counter(model.pattern.partition("/")[0].replace("|", ""))
    count, kind, period = model.layers, *_kinds(model)
    turns, rest = divmod(count, period)
    each = Counter(map(kind, range(period if turns else 0)))
    return Counter({layer: times * turns for layer, times in each.items()}) + Counter(map(kind, range(rest)))


def _kinds(model: ModelShape) -> tuple[Callable[[int], str], int]:
    """Return the kind of a GPT model's layer by its number, and after how many layers kinds repeat."""
    net = delta_net.has_it(model.fields)
    sparse = model.expert_layers if model.experts else [0]
    linear = (model.fields.get(delta_net.FREQUENCY) or 1) if net else [0]

    def kind(n: int) -> str:
        of_experts = sparse[n % len(sparse)] if isinstance(sparse, list) else n % sparse == 0
        of_net = linear[n % len(linear)] if isinstance(linear, list) else (n + 1) % linear != 0
        return (DELTA_NET if of_net else ATTENTION) + (EXPERTS if of_experts else MLP)

    return kind, math.lcm(*(len(pattern) if isinstance(pattern, list) else pattern for pattern in (sparse, linear)))


def weights(model: ModelShape, part: str) -> Weights:
    """Return the parameters of one part of a layer, with the norm before it."""
    return matrices(model, part) + _others(model, part)


def matrices(model: ModelShape, part: str) -> Weights:
    """Return the matrices of one part of a layer, which Muon updates."""
    if part == EXPERTS:
        shared, latent = model.hidden * model.shared_width, model.expert_latent
        gate = bool(model.shared_width and model.fields.get(delta_net.EXPERT_GATE))
        return Weights(
            split=(model.gates + 1) * shared,
            whole=model.hidden * (model.experts + 2 * latent + gate),  # router, projections to latents, shared gate
            experts=model.experts * (model.gates + 1) * (latent or model.hidden) * model.expert_width,
            largest=model.gates * shared,
        )
    split, whole = [], 0
    for name, (inputs, outputs) in _linear_layers(model, part).items():
        if name.endswith("_down_proj"):  # every rank of tp makes the latents
            whole += inputs * outputs
        else:
            split.append(inputs * outputs)
    return Weights(split=sum(split), whole=whole, largest=max(split))


def _linear_layers(model: ModelShape, part: str) -> dict[str, tuple[int, int]]:
    """Name of each linear layer of a part but EXPERTS -> its features in and out."""
    w, hidden = widths(model), model.hidden
    if part == MLP:
        return _feed_forward(model, model.ffn)
    if part == DELTA_NET:
        rows = 2 * (w.delta_key + w.delta_value + w.delta_heads)
        return {"delta_in_proj": (hidden, rows), "delta_out_proj": (w.delta_value, hidden)}
    if part != ATTENTION:
        rows = 2 * w.inner + w.states + model.mamba_heads
        return {"in_proj": (hidden, rows), "out_proj": (w.inner, hidden)}
    if not model.latent:
        return {"linear_qkv": (hidden, w.query + w.gate + 2 * w.key), "linear_proj": (w.core, hidden)}
    query = {"linear_q_proj": (hidden, w.query)}
    if w.q_latent:
        query = {"linear_q_down_proj": (hidden, w.q_latent), "linear_q_up_proj": (w.q_latent, w.query)}
    return {
        **query,
        "linear_kv_down_proj": (hidden, w.kv_latent + w.shared_key),
        "linear_kv_up_proj": (w.kv_latent, w.key - model.heads * w.shared_key + w.value),
        "linear_proj": (w.core, hidden),
    }


def _feed_forward(model: ModelShape, ffn: int) -> dict[str, tuple[int, int]]:
    return {"linear_fc1": (model.hidden, model.gates * ffn), "linear_fc2": (ffn, model.hidden)}


def _others(model: ModelShape, part: str) -> Weights:
    """Return the norms, biases, convolutions and numbers of heads of one part of a layer."""
    w, biased = widths(model), model.biased
    own_norm, more = norm(model), (norms(model) - 1) * norm(model)
    if part == ATTENTION and model.latent:
        return Weights(whole=own_norm + ((w.q_latent + w.kv_latent) if model.head_norms else 0))
    if part == ATTENTION:
        biases = w.query + w.gate + 2 * w.key if model.fields.get("add_qkv_bias") or biased else 0
        sinks = model.heads if model.fields.get("softmax_type") == "learnable" else 0
        return Weights(split=biases + sinks, whole=own_norm + more + _head_norms(model, w) + biased * model.hidden)
    if part == DELTA_NET:
        # The convolution; A and the bias of dt; the norm of all heads.
        convolved = TAPS * (2 * w.delta_key + w.delta_value)
        return Weights(split=convolved + 2 * w.delta_heads, whole=own_norm + w.delta_value // w.delta_heads)
    if part == MLP:
        return Weights(split=biased * model.gates * model.ffn, whole=own_norm + more + biased * model.hidden)
    if part == EXPERTS:
        count = model.experts * biased
        shared = biased * bool(model.shared_width)
        return Weights(
            split=shared * model.gates * model.shared_width,
            whole=own_norm + count + shared * model.hidden,  # count: the router's
            experts=count * (model.gates * model.expert_width + model.hidden),
        )
    convolved = (TAPS + 1) * (w.inner + w.states)
    return Weights(
        split=convolved + 3 * model.mamba_heads + w.inner, whole=own_norm
    )  # A, D, the bias of dt; its own norm


def norm(model: ModelShape) -> int:
    """Parameters of a norm over the hidden size."""
    return model.hidden * (2 if model.fields.get("normalization") == "LayerNorm" else 1)


def _head_norms(model: ModelShape, w: Widths) -> int:
    if not model.head_norms:
        return 0
    return w.query + w.key if families.family_of(model.fields) == families.OF_ALL_HEADS else 2 * w.query // model.heads


def norms(model: ModelShape) -> int:
    """Norms of a layer's part."""
    family = families.family_of(model.fields)
    return families.FAMILIES[family].norms if family else 1


def adapters(model: ModelShape, part: str, dim: int, targets: Collection[str], *, shared: bool = True) -> Weights:
    """Return the parameters of a part's adapters on the layers `targets`. shared: experts of a layer share theirs."""

    def adapted(layers: dict[str, tuple[int, int]]) -> int:
        return dim * sum(sum(features) for name, features in layers.items() if name in targets)

    if part != EXPERTS:
        return Weights(split=adapted(_linear_layers(model, part)))
    each = adapted(_feed_forward(model, model.expert_width))
    beside = adapted(_feed_forward(model, model.shared_width)) if model.shared_width else 0
    return Weights(split=beside, whole=each) if shared else Weights(beside, experts=model.experts * each)


def embedding(model: ModelShape) -> Weights:
    """Return the parameters of one matrix between tokens and features."""
    size = model.vocabulary * model.hidden
    return Weights(split=size, largest=size)


def positions(model: ModelShape) -> Weights:
    """Return the parameters of learned positions, which every rank of tp has whole."""
    learned = model.fields.get("position_embedding_type") == LEARNED
    return Weights(whole=model.sequence * model.hidden if learned else 0)


def ahead(model: ModelShape, counted: Callable[[ModelShape, str], Weights] = weights) -> Weights:
    """Return the parameters of MTP, or its matrices: by depth layers, a projection, three norms."""
    depths, hidden = model.depths, model.hidden
    if not depths:
        return Weights()
    layers = sum((counted(model, part) for part in mtp_layers(model)), Weights())
    norms = 3 * norm(model) if counted is weights else 0
    projection = Weights(split=2 * hidden * hidden, whole=norms, largest=2 * hidden * hidden)
    return (layers + projection) * (1 if model.fields.get("mtp_use_repeated_layer") else depths)


def mtp_layers(model: ModelShape) -> str:
    """Return the parts of the layers of one depth: of one like the model's last, or of a hybrid model's pattern."""
    pattern = model.fields.get("mtp_hybrid_override_pattern")
    if pattern is not None:
        return str(pattern)
    frequency = model.expert_layers
    sparse = bool(model.experts) and (bool(frequency[-1]) if isinstance(frequency, list) else True)
    return ATTENTION + (EXPERTS if sparse else MLP)


def parameters(model: ModelShape) -> int:
    """How many parameters a model section describes."""
    ends = embedding(model).total * (1 if model.tied else 2)
    inside = sum(count * weights(model, part).total for layer, count in layers(model).items() for part in layer)
    return ends + positions(model).total + norm(model) + inside + ahead(model).total
