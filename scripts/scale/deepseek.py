# SPDX-License-Identifier: Apache-2.0
"""The parameters of DeepSeek-V3 under names as in a ledger, for the simulations beside this file."""

from collections.abc import Iterator

LAYERS, DENSE, EXPERTS, HIDDEN = 61, 3, 256, 7168
EXPERT = {"linear_fc1.gate": (2048, 7168), "linear_fc1.up": (2048, 7168), "linear_fc2": (7168, 2048)}
ATTENTION = {
    "input_layernorm": (7168,),
    "self_attention.linear_q_down_proj": (1536, 7168),
    "self_attention.linear_q_up_proj.layer_norm": (1536,),
    "self_attention.linear_q_up_proj": (24576, 1536),
    "self_attention.linear_kv_down_proj": (576, 7168),
    "self_attention.linear_kv_up_proj.layer_norm": (512,),
    "self_attention.linear_kv_up_proj": (32768, 512),
    "self_attention.linear_proj": (7168, 16384),
    "pre_mlp_layernorm": (7168,),
}
FEED_FORWARD = {"mlp.linear_fc1": (36864, 7168), "mlp.linear_fc2": (7168, 18432)}
SHARED = {
    "mlp.router": (256, 7168),
    "mlp.shared_experts.linear_fc1": (4096, 7168),
    "mlp.shared_experts.linear_fc2": (7168, 2048),
}

Named = tuple[str, tuple[int, ...]]


def dense(layer: int) -> Iterator[Named]:
    """What every rank of a pipeline stage has of a layer."""
    more = FEED_FORWARD if layer < DENSE else SHARED
    for name, shape in (ATTENTION | more).items():
        yield f"decoder.layers.{layer}.{name}.weight", shape


def experts(layer: int, numbers: range) -> Iterator[Named]:
    """The matrices of some experts of a layer."""
    for name, shape in EXPERT.items() if layer >= DENSE else ():
        for number in numbers:
            yield f"decoder.layers.{layer}.mlp.experts.experts.{number}.{name}.weight", shape


def first() -> list[Named]:
    """What the first pipeline stage has besides layers."""
    return [("embedding.word_embeddings.weight", (129280, HIDDEN))]


def last() -> list[Named]:
    """What the last pipeline stage has besides layers."""
    return [("decoder.final_layernorm.weight", (HIDDEN,)), ("output_layer.weight", (129280, HIDDEN))]


def everything() -> Iterator[Named]:
    """All parameters."""
    yield from first()
    for layer in range(LAYERS):
        yield from dense(layer)
        yield from experts(layer, range(EXPERTS))
    yield from last()
