"""Settings of layers that tree refuses, of fields that Bridge checks. Others: tests/unit/check/refusals.py."""

import pytest

from tests.distributed.layouts.families import GPT
from tests.unit.check.refusals import problems

REFUSED = (
    (f"{GPT} numerics=portable", "LayerNorm is covered by numerics=tree only; model.normalization=RMSNorm"),
    (
        f"{GPT} model.qk_layernorm=true",
        "of norms of queries and keys only RMSNorm is covered",
    ),
    (f"{GPT} model.mtp_num_layers=1", "LayerNorm is covered for GPT models without multi-token prediction"),
    (f"{GPT} model.mtp_num_layers=1", "learned positions are covered for GPT models of numerics=tree"),
    ("gemma2_toy model.attention_backend=unfused", "soft-capped attention is computed by Megatron's own products"),
)


@pytest.mark.parametrize("words, says", REFUSED)
def test_what_is_refused(bridge, words, says):
    assert any(says in problem for problem in problems(words))


@pytest.mark.parametrize("words", (GPT, "gemma2_toy"))
def test_without_it_they_compose(bridge, words):
    assert problems(words) == []
