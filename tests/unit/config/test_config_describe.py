# SPDX-License-Identifier: Apache-2.0
"""What is said about models and configurations, for people and for Bridge's own command line."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from tests.models import degree, small_ones
from tp_invariant_recipes.config import describe
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.keys import nearest
from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing.size import parameters

MODELS = conf_files.groups()["model"]

# The tensor-parallel degrees that divide models, and their parameters as published.
PUBLISHED = {
    (1, 2, 4, 8): {
        "qwen3_0p6b": 0.596e9, "qwen3_8b": 8.19e9, "qwen3_1p7b": 1.72e9, "qwen3_4b": 4.02e9, "qwen3_14b": 14.77e9,
        "qwen3_32b": 32.76e9, "qwen25_14b": 14.77e9, "qwen25_32b": 32.76e9, "llama3_8b": 8.03e9, "llama3_70b": 70.55e9,
        "llama31_8b": 8.03e9, "llama31_70b": 70.55e9, "llama31_405b": 405.85e9, "llama32_1b": 1.236e9,
        "llama32_3b": 3.213e9, "deepseek_v3": 671.03e9, "moonlight_16b_a3b": 15.96e9, "kimi_k2": 1.026e12,
        "gpt_oss_20b": 20.91e9, "gpt_oss_120b": 116.83e9, "olmoe_1b_7b": 6.919e9,
        "glm45_air": 110.469e9 - 2 * 151552 * 4096,  # less embeddings that the published file repeats
    },
    (1, 2, 4): {"qwen3_30b_a3b": 30.5e9, "qwen3_235b_a22b": 235.1e9, "qwen25_7b": 7.616e9},
    (1, 2): {
        "nemotron3_nano": 31.6e9, "qwen25_0p5b": 0.494e9, "qwen25_1p5b": 1.544e9, "qwen25_3b": 3.086e9,
        "qwen3_next_80b_a3b": 81.32e9,  # with a layer of multi-token prediction
    },
    (1,): {"gemma3_1b": 0.99989e9},
}  # fmt: skip
# The toys', counted by hand: embeddings, attention, dense layers, layers of experts, multi-token prediction.
_DENSE = 512 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256)
_EXPERTS = 2 * 4096 * 256 + 2 * (4 * 256 * 256 + 256 * 8 + 8 * 3 * 256 * 256)
_LATENTS = 4 * (2048 * (16 * 192 + 576 + 16 * 128) + 512 * 16 * 256)
_GLM = 4 * 4 * 256 * 512 + 3 * 256 * 512 + 3 * (256 * 8 + 9 * 3 * 256 * 256) + 2 * 256 * 256
TOYS = {
    (1, 2, 4, 8): {
        **dict.fromkeys(("llama32_toy", "qwen25_toy", "qwen3_toy", "gemma3_toy"), _DENSE),
        **dict.fromkeys(("gpt_oss_toy", "olmoe_toy"), _EXPERTS),
        "moonlight_1b": 2 * 163840 * 2048 + _LATENTS + 3 * 2048 * (11264 + 3 * 1408 * (8 + 2)),
        "moonlight_toy": 256 * (2 * 4096 + 4 * (720 + 128) + 3 * (512 + 8 + 30 * 256)),
        "deepseek_v3_toy": 8.31e6,
        "qwen3_next_toy": 2 * 4096 * 256 + 256 * (2 * 784 + 512) + 2 * 256 * 1280 + 3 * 9 * 3 * 256 * 256 + 2 * 256**2,
        "glm45_toy": 2 * 4096 * 256 + _GLM,
    },
    (1, 2, 4): {
        "qwen3_moe_0p8b": 2 * 151936 * 2048 + 4 * (2048 * 128 * 72 + 3 * 2048 * 768 * 8),
        "qwen3_moe_toy": 2 * 4096 * 256 + 4 * (256 * 32 * 24 + 3 * 256 * 256 * 8),
    },
    (1, 2): {"nemotron3_nano_0p1b": 0.127e9, "nemotron3_nano_toy": 10.2e6},
}
SIZES = [(model, *row) for table in (PUBLISHED, TOYS) for row in table.items() for model in row[1]]

# Beginning of a model's name -> its activation function, where it is not SiLU.
ACTIVATIONS = {"nemotron3": "squared_relu", "gpt_oss": "quick_gelu", "gemma": "fast_gelu"}


@pytest.fixture
def models_by_name(models_table):
    return {row["model"]: row for row in models_table}


def test_every_model_is_in_the_table(models_by_name):
    assert sorted(models_by_name) == sorted(MODELS) == sorted(model for model, *_ in SIZES)


@pytest.mark.parametrize("model, degrees, counts", SIZES, ids=[model for model, *_ in SIZES])
def test_a_model_is_as_large_as_published(models_by_name, model, degrees, counts):
    row = models_by_name[model]
    assert row["parameters"] == pytest.approx(counts[model], rel=0.005)
    assert row["tp"] == [*degrees]
    assert row["cpu"] is True


def test_dimensions_that_megatron_derives_are_counted():
    model = compose("qwen3_8b").config.model
    unset = model | {"num_query_groups": None, "ffn_hidden_size": None, "kv_channels": None}
    spelt = model | {"num_query_groups": 32, "ffn_hidden_size": 4 * 4096, "kv_channels": 128}
    assert parameters(ModelShape(unset)) == parameters(ModelShape(spelt))


@pytest.mark.parametrize("model", small_ones(MODELS))
def test_bridge_overrides_are_overrides_with_the_trees_values(model):
    tree = compose(model, [f"tp={degree(model)}"], device="gpu").config
    tree = tree.with_fields("dataset", blend=[["/data/a b"], None])
    lines = describe.bridge_overrides(tree)
    results = {}
    for override in OverridesParser.create().parse_overrides(lines):
        assert not override.is_sweep_override(), override.input_line
        results[override.key_or_group] = override.value()
    sections = describe.BRIDGE_SECTIONS.keys() & tree.sections.keys()
    expected = {f"{s}.{field}": value for s in sections for field, value in tree.section(s).items()}
    expected["mixed_precision"] = tree.sections["mixed_precision"]
    expected["model.activation_func"] = next((f for name, f in ACTIVATIONS.items() if model.startswith(name)), "silu")
    del expected["model._target_"], expected["tokenizer.vocab_includes_eod"]
    assert results == expected


TEXTS = st.text("abé1,=:'[]{} .*~", max_size=6) | st.sampled_from(
    ("true", "False", "null", "nan", "inf", "1e3", "x/y.z")
)


@given(st.none() | st.booleans() | st.integers() | TEXTS)
def test_any_value_is_an_override_of_itself(value):
    (line,) = describe.bridge_overrides(RunConfig({"logger": {"wandb_project": value}, "mixed_precision": None}))[:1]
    parsed = OverridesParser.create().parse_override(line)
    assert not parsed.is_sweep_override()
    assert parsed.value() == value


@pytest.mark.parametrize(
    "name, names, hint",
    (
        ("tpp", ("tp", "pp", "lr"), "; did you mean 'tp'?"),
        ("qwen3_8", ("qwen3_8b", "qwen3_toy"), "; did you mean 'qwen3_8b'?"),
        ("zzz", ("tp", "lr"), "; there are: lr, tp"),
        ("zzz", (), ""),
        ("zzz", tuple(f"key{n}" for n in range(13)), ""),
        ("optim.weight_decay", ("optimizer.weight_decay", "scheduler.x"), "; did you mean 'optimizer.weight_decay'?"),
        ("x.weight_decay", ("optimizer.weight_decay", "scheduler.end"), "; did you mean 'optimizer.weight_decay'?"),
        ("zzzzzzzzzzzz.lr", ("optimizer.lr", "scheduler.end"), "; did you mean 'optimizer.lr'?"),
    ),
)
def test_the_nearest_name(name, names, hint):
    assert nearest(name, names) == hint
