"""Digests as text: what they depend on, groups, and the order of parameters."""

import itertools

import pytest

from tp_invariant_recipes.ledger.digests import (
    check_digest,
    digest_texts,
    group_digests,
    group_of,
    in_order,
    start_lanes,
    tensor_digest,
    whole_digest,
)


def test_a_digest_depends_on_lanes_dtype_and_shape():
    cases = itertools.product(((1, 2), (2, 1), (-1, 2)), ("float32", "bfloat16"), ((4, 2), (2, 4), (8,), ()))
    texts = [tensor_digest(*case) for case in cases]
    assert len(set(texts)) == len(texts)
    assert all(check_digest(text) == text for text in texts)


def test_a_digest_is_its_start_and_its_lanes_modulo_two_to_the_64():
    start = start_lanes("float32", (3,))
    text = tensor_digest((-5, 1 << 63), "float32", (3,))
    assert int(text[:16], 16) == (start[0] - 5) % 2**64
    assert int(text[16:], 16) == (start[1] + 2**63) % 2**64


def test_digests_side_by_side_have_the_texts_that_each_has_alone():
    """As callbacks have them, of all parameters at once."""
    cases = (((1, 2), "float32", (3,)), ((-1, 1 << 63), "bfloat16", (4, 2)), ((0, 0), "float32", ()))
    sums = b""
    for lanes, dtype, shape in cases:
        for start, lane in zip(start_lanes(dtype, shape), lanes, strict=True):
            sums += ((start + lane) % 2**64).to_bytes(8, "big")
    assert digest_texts(sums) == [tensor_digest(*case) for case in cases]
    assert digest_texts(b"") == []


@pytest.mark.parametrize("text", (None, "", "0" * 31, "0" * 33, "G" * 32, "A" * 32, 5))
def test_what_is_no_digest_is_refused(text):
    with pytest.raises(ValueError, match="32"):
        check_digest(text)


def test_the_digest_of_many_depends_on_names_and_not_on_their_order():
    a, b = {"x": "0" * 32, "y": "1" * 32}, {"y": "1" * 32, "x": "0" * 32}
    assert whole_digest(a) == whole_digest(b)
    assert whole_digest(a) != whole_digest({"x": "1" * 32, "y": "0" * 32})
    assert whole_digest(a) != whole_digest({"x": "0" * 32})


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


def test_one_group_changes_with_its_parameters_alone():
    digests = {f"decoder.layers.{n}.{part}": f"{n}" * 32 for n in range(3) for part in ("a", "b")}
    changed = digests | {"decoder.layers.1.b": "f" * 32}
    before, after = group_digests(digests), group_digests(changed)
    assert [name for name in before if before[name] != after[name]] == ["decoder.layers.1"]


def test_parameters_are_sorted_as_a_forward_pass_meets_them():
    names = [
        "embedding.word_embeddings.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.2.self_attention.q_layernorm.weight",
        "decoder.layers.2.self_attention.linear_proj.weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.weight",
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.10.mlp.router.weight",
        "decoder.layers.10.mlp.experts.2.linear_fc1.weight",
        "decoder.layers.10.mlp.experts.10.linear_fc1.weight",
        "decoder.layers.10.mlp.experts.2.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    assert in_order(sorted(names)) == names
