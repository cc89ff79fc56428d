# SPDX-License-Identifier: Apache-2.0
"""What rollouts refuse, by name and with its key: configurations, models and sizes. How ranks share requests."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tp_invariant_recipes.check import rollouts
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.inference.model import _composed
from tp_invariant_recipes.features.rollouts import engine
from tp_invariant_recipes.features.rollouts.requests import Request, Sampling
from tp_invariant_recipes.numerics.megatron import families

CONFIGURATIONS = (
    ("numerics=portable", ()),
    ("numerics=tree", ("numerics=tree: a cached row is not shown", "numerics=portable")),
    ("numerics=stock", ("numerics=stock: a cached row is not shown", "numerics=portable")),
    (
        "numerics=tree pp=2 precision=mxfp8",
        (
            "numerics=portable", "pp=2: a rank of rollouts computes all layers", "pp=1", "precision: FP8 scales",
            "precision=bf16",
        ),
    ),
)  # fmt: skip


@pytest.mark.parametrize("words, parts", CONFIGURATIONS)
def test_configurations_are_refused_by_name(words, parts):
    config = compose("qwen3_toy", ["model.kv_channels=32", "seq=128", *words.split()], device="cpu").config
    listed = "\n".join(rollouts.problems(config))
    assert all(part in listed for part in parts)
    assert bool(listed) == bool(parts)


FAMILIES = (
    ("qwen3_moe_toy", None),
    ("moonlight_toy", None),
    ("gpt_oss_toy", "attention sinks have no portable version"),
    ("nemotron3_nano_toy", "Mamba layers have no portable version"),
    ("qwen3_next_toy", None),
    ("glm45_toy", None),
    ("qwen3_next_toy model.layernorm_zero_centered_gamma=false", None),
    ("deepseek_v3_toy", None),
    ("deepseek_v3_toy model.mscale_all_dim=0.5", "YaRN that multiplies cosines has no portable version"),
    ("gemma3_toy", "families with own layers are covered by numerics=tree only"),
)


@pytest.mark.parametrize("family, why", FAMILIES)
def test_families_are_taken_or_refused_by_name(family, why):
    model, *words = family.split()
    with nullcontext() if why is None else pytest.raises(ConfigError, match=why):
        assert rollouts.problems(_composed(model, parse_all(["device=cpu", *words]), "portable").config) == []


FAMILY = families.FAMILIES["OLMoE"]


class OtherAttention:
    pass


# Each row of the table: what breaks it of a configuration (as typed, or fields of the model that portable refuses
# sooner), and of a module.
BROKEN = {
    "numerics": ("numerics=tree", {"invariant_mode": "tree"}),
    "pp": ("pp=2", {"pipeline_model_parallel_size": 2}),
    "fp8": ("precision=mxfp8", {"fp8": "e4m3"}),
    "mtp": ({"mtp_num_layers": 1}, {"mtp": True}),
    "windows": ({"window_size": [63, 0]}, {"window_size": (63, 0)}),
    "sinks": ({"softmax_type": "learnable"}, {"softmax_type": "learnable"}),
    "mamba": ({"hybrid_layer_pattern": "ME*"}, {"hybrid_layer_pattern": "ME*"}),
    "layers": ({families.FIELD: FAMILY.spec}, {"attention": OtherAttention}),
}


def model(attention=engine.PortableDotProductAttention, mtp=False, **fields):
    config = {"pipeline_model_parallel_size": 1, "invariant_mode": "portable", "fp8": None}
    core = attention.__new__(attention)
    layer = SimpleNamespace(self_attention=SimpleNamespace(core_attention=core))
    return SimpleNamespace(
        config=SimpleNamespace(**(config | fields)), decoder=SimpleNamespace(layers=[layer]), mtp_process=mtp
    )


def test_each_row_refuses_a_configuration_and_a_module():
    """One table: both refuse with one text, and neither refuses anything without what breaks the row."""
    assert {*BROKEN} == {*rollouts.ROWS}
    assert rollouts.uncovered(engine._rolled([model()])) == []
    assert "pp=2" in rollouts.uncovered(engine._rolled([model(), model()]))[0]
    words = ["model.kv_channels=32", "seq=128", "numerics=portable"]
    for name, (word, fields) in BROKEN.items():
        typed = [word] if isinstance(word, str) else []
        config = compose("qwen3_toy", [*words, *typed], device="cpu").config
        config = config if typed else config.with_fields("model", **word)
        listed, of_module = rollouts.problems(config), rollouts.uncovered(engine._rolled([model(**fields)]))
        assert len(listed) == len(of_module) == 1, name
        why = rollouts.ROWS[name][2]
        assert why in listed[0], name
        assert why in of_module[0], name


def test_all_that_a_model_has_is_listed():
    wrong = model(invariant_mode="tree", fp8="e4m3", pipeline_model_parallel_size=2, mtp=True)
    assert [problem.partition(":")[0] for problem in rollouts.uncovered(engine._rolled([wrong]))] == [
        "numerics=tree", "pp=2", "precision", "model.mtp_num_layers",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sizes, wrong",
    (
        ({}, []),
        ({"sequences": 0, "chunk": -1}, ["sequences=0", "chunk=-1"]),
        ({"block": 48}, ["block=48: must be a power of two"]),
        ({"block": 64, "tokens": 63}, ["tokens=63: must be at least a block, 64"]),
    ),
)
def test_wrong_sizes_are_all_listed(sizes, wrong):
    listed = engine._wrong_sizes(**({"sequences": 4, "chunk": 8, "block": 4, "tokens": 64} | sizes))
    assert len(listed) == len(wrong)
    assert all(line.startswith(part) for line, part in zip(listed, wrong, strict=True))


def test_sizes_are_refused_before_a_model_is_read():
    with pytest.raises(ConfigError, match=r"chunk=0(.|\n)*block=3"):
        engine.Engine(None, chunk=0, block=3)


def test_equal_prompts_have_one_rank_and_loads_are_balanced():
    made = [Request(f"r{n}", (n % 5, 1), Sampling(max_new_tokens=8)) for n in range(20)]
    shares = engine._shares(made, 3)
    assert sorted(request.id for share in shares for request in share) == sorted(request.id for request in made)
    homes = [{request.tokens for request in share} for share in shares]
    assert not any(homes[a] & homes[b] for a, b in ((0, 1), (0, 2), (1, 2)))
    assert all(homes)
    assert max(map(len, shares)) <= 8
