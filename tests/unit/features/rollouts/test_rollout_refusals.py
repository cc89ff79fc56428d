# SPDX-License-Identifier: Apache-2.0
"""What rollouts refuse, by name and with its key: configurations, models and sizes. How ranks share requests."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tp_invariant_recipes.check import finetuning
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.inference.model import _composed
from tp_invariant_recipes.features.rollouts import engine
from tp_invariant_recipes.features.rollouts.requests import Request, Sampling

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
    listed = "\n".join(finetuning.problems(config))
    assert all(part in listed for part in parts)
    assert bool(listed) == bool(parts)


FAMILIES = (
    ("qwen3_moe_toy", None),
    ("gemma3_toy", "sliding-window attention has no portable version"),
    ("gpt_oss_toy", "attention sinks have no portable version"),
    ("nemotron3_nano_toy", "Mamba layers have no portable version"),
    ("qwen3_next_toy", "gated delta nets are covered by numerics=tree only"),
    ("moonlight_toy", "multi-latent attention is covered by numerics=tree only"),
    ("gemma3_toy", "families with own layers are covered by numerics=tree only"),
)


@pytest.mark.parametrize("family, why", FAMILIES)
def test_families_are_taken_or_refused_by_name(family, why):
    with nullcontext() if why is None else pytest.raises(ConfigError, match=why):
        assert finetuning.problems(_composed(family, parse_all(["device=cpu"]), "portable").config) == []


def model(attention=engine.PortableDotProductAttention, mtp=False, **fields):
    config = {"pipeline_model_parallel_size": 1, "invariant_mode": "portable", "fp8": None}
    core = attention.__new__(attention)
    layer = SimpleNamespace(self_attention=SimpleNamespace(core_attention=core))
    return SimpleNamespace(
        config=SimpleNamespace(**(config | fields)), decoder=SimpleNamespace(layers=[layer]), mtp_process=mtp
    )


class OtherAttention:
    pass


MODELS = (
    ([model()], None),
    ([model(), model()], "pp=1"),
    ([model(invariant_mode=None)], "numerics=stock: a cached row is not shown"),
    ([model(attention=OtherAttention)], "OtherAttention has no cache of its keys"),
)


@pytest.mark.parametrize("chunks, why", MODELS)
def test_models_are_refused_by_name(chunks, why):
    listed = engine._uncovered(chunks)
    assert (listed == []) if why is None else (why in listed[0])


def test_all_that_a_model_has_is_listed():
    listed = engine._uncovered([model(invariant_mode="tree", fp8="e4m3", pipeline_model_parallel_size=2, mtp=True)])
    assert [problem.partition(":")[0] for problem in listed] == [
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
