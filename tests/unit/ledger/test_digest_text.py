# SPDX-License-Identifier: Apache-2.0
"""Digests as text: what they depend on, groups, and the order of parameters."""

import itertools

import pytest

from tp_invariant_recipes.ledger.digests import (
    Parameter,
    check_digests,
    group_of,
    in_order,
    stacked,
    stacks,
    start_lanes,
    summaries,
    tensor_digest,
)


def summarized(digests):
    """The digest of all, and one a group."""
    return summaries(tuple(digests), tuple(digests.values()))


def test_a_digest_depends_on_lanes_dtype_and_shape():
    cases = itertools.product(((1, 2), (2, 1), (-1, 2)), ("float32", "bfloat16"), ((4, 2), (2, 4), (8,), ()))
    texts = [tensor_digest(*case) for case in cases]
    assert len(set(texts)) == len(texts)
    check_digests(texts)


def test_a_digest_is_its_start_and_its_lanes_modulo_two_to_the_64():
    start = start_lanes("float32", (3,))
    text = tensor_digest((-5, 1 << 63), "float32", (3,))
    assert int(text[:16], 16) == (start[0] - 5) % 2**64
    assert int(text[16:], 16) == (start[1] + 2**63) % 2**64


@pytest.mark.parametrize("text", (None, "", "0" * 31, "0" * 33, "G" * 32, "A" * 32, 5))
def test_what_is_no_digest_is_refused(text):
    with pytest.raises(ValueError, match="32"):
        check_digests(["0" * 32, text])


def test_the_digest_of_many_depends_on_names_and_not_on_their_order():
    a, b = {"x": "0" * 32, "y": "1" * 32}, {"y": "1" * 32, "x": "0" * 32}
    assert summarized(a)[0] == summarized(b)[0]
    assert summarized(a)[0] != summarized({"x": "1" * 32, "y": "0" * 32})[0]
    assert summarized(a)[0] != summarized({"x": "0" * 32})[0]


@pytest.mark.parametrize(
    "name, group",
    (
        ("embedding.word_embeddings.weight", "embedding.word_embeddings"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", "decoder.layers.3"),
        ("decoder.layers.12.mlp.experts.7.linear_fc1.weight", "decoder.layers.12"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm"),
        ("output_layer.weight", "output_layer"),
        ("bias", "bias"),
    ),
)
def test_groups_are_layers_and_the_modules_around_them(name, group):
    assert group_of(name) == group


def test_parameters_are_sorted_as_a_forward_pass_meets_them():
    names = [
        "embedding.word_embeddings.weight", "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.self_attention.linear_qkv.weight", "decoder.layers.2.self_attention.q_layernorm.weight",
        "decoder.layers.2.self_attention.linear_proj.weight", "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.weight", "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.10.mlp.router.weight", "decoder.layers.10.mlp.experts.2.linear_fc1.weight",
        "decoder.layers.10.mlp.experts.10.linear_fc1.weight", "decoder.layers.10.mlp.experts.2.linear_fc2.weight",
        "decoder.final_layernorm.weight", "output_layer.weight",
    ]  # fmt: skip
    assert in_order(sorted(names)) == names


NAMES = ("layers.0.mlp.experts.10.fc", "layers.0.mlp.experts.2.fc", "layers.0.mlp.router", "exp_avg/l.experts.0.fc.a")


def test_experts_of_a_layer_are_a_stack_in_the_order_of_their_numbers():
    assert stacks(NAMES) == {
        "layers.0.mlp.experts.*.fc": [1, 0],
        "layers.0.mlp.router": [2],
        "exp_avg/l.experts.*.fc.a": [3],
    }


def test_a_stack_has_its_experts_as_first_dimension_and_they_must_be_alike():
    results = stacked([Parameter(name, (4, 2), "float32", "bfloat16", "float32") for name in NAMES[:3]])
    assert [(result.name, result.shape) for result in results] == [
        ("layers.0.mlp.experts.*.fc", (2, 4, 2)),
        ("layers.0.mlp.router", (4, 2)),
    ]
    with pytest.raises(ValueError, match=r"experts\.\*\.fc: its experts have other shapes or dtypes: ledger.experts=e"):
        stacked([Parameter(name, (n,), "float32", "bfloat16") for n, name in enumerate(NAMES[:2])])
