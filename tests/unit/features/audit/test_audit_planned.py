"""`tpi audit` up to the point where Bridge would be imported: mistakes, and the reference that it plans."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.features.audit import reference as audit_reference

pytestmark = pytest.mark.usefixtures("here")


def test_a_reference_is_the_simplest_of_what_the_configuration_has():
    config = compose(
        "qwen3_moe_toy",
        ["numerics=stock", "tp=2", "pp=2", "ep=2", "dp=2", "gbs=4", "mbs=2", "ddp.overlap_grad_reduce=true"],
    ).config
    result = audit_reference.overrides(config, [])
    assert {"train.micro_batch_size=1", "ddp.overlap_grad_reduce=false", "sp=false"} <= set(result)
    assert "parallel.data_parallel_size=1" in result
    own = parse_all(["mbs=2", "sp=true"])
    assert not {"train.micro_batch_size=1", "sp=false"} & set(audit_reference.overrides(config, own))
    assert "model.expert_model_parallel_size=4" in audit_reference.overrides(config, [], 4)
    assert audit_reference.overrides(compose("qwen3_toy", ["numerics=stock"]).config, []) == []


DEFINITIONS = (
    ("qwen3_toy", "dp=2", "numerics.data_shards=2"),
    ("qwen3_toy", "cp=2", "numerics.context_shards=2"),
    ("qwen3_moe_toy", "dp=2", "numerics.expert_groups=2"),
)


@pytest.mark.parametrize("model, word, count", DEFINITIONS)
def test_a_reference_of_invariant_numerics_has_their_definition(model, word, count):
    config = compose(model, ["numerics=tree", word, "gbs=4"]).config
    words = audit_reference.overrides(config, [])
    assert count in words
    assert count not in audit_reference.overrides(config, parse_all([count.replace("2", "1")]))
    name = count.partition("=")[0].partition(".")[2]
    defined = compose(model, ["numerics=tree", "gbs=4", *words]).config
    assert getattr(defined.numerics, name) == getattr(config.numerics, name)
    assert compose(model, ["numerics=tree", "gbs=4"]).config.numerics != defined.numerics
    stock = compose(model, ["numerics=stock", word, "gbs=4"]).config
    assert count not in audit_reference.overrides(stock, [])
