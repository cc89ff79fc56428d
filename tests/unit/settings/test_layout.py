# SPDX-License-Identifier: Apache-2.0
"""The rules of a parallel layout: exactly what divides is accepted, and every message says what would be."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules import table_problems
from tp_invariant_recipes.check import layout as layout_rules
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.settings import run_config
from tp_invariant_recipes.settings.run_config import RunConfig

DEGREES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size", "sp": "sequence_parallel",
    "seq": "seq_length",
}  # fmt: skip
TRAIN = {"mbs": "micro_batch_size", "gbs": "global_batch_size", "iters": "train_iters"}
DENSE = {"num_layers": 8, "num_attention_heads": 16, "num_query_groups": 8, "ffn_hidden_size": 96, "vocab_size": 512}
MOE = {"num_moe_experts": 8, "moe_ffn_hidden_size": 32}
ACCOUNTED = dict.fromkeys(run_config.ACCOUNTED, True)
HYBRID = {"hybrid_layer_pattern": "MEM*EMEM", "mamba_num_heads": 8, "mamba_num_groups": 4}


def layout_config(**changes) -> RunConfig:
    """Just what the rules look at, on a GPU. Keys as typed; whatever else is named is a model's field."""
    model = {field: 1 for field in DEGREES.values()} | {"sequence_parallel": False, "seq_length": 64} | DENSE
    train = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 10}
    made = {
        "model": model, "train": train, "parallel": {"data_parallel_size": changes.pop("dp", 1)},
        "optimizer": {"lr": changes.pop("lr", 1e-3), "min_lr": changes.pop("min_lr", 1e-4)},
        "checkpoint": {"save_interval": changes.pop("save", 0)},
        "data": {"kind": changes.pop("data", "mock"), "path": changes.pop("path", None)},
        "device": {"kind": changes.pop("device", "gpu")}, "numerics": {"mode": changes.pop("mode", "tree")},
    }  # fmt: skip
    for key, value in changes.items():
        if key in TRAIN:
            train[TRAIN[key]] = value
        else:
            model[DEGREES.get(key, key)] = value
    return RunConfig(made)


GOOD = (
    {},
    {"ep": 4, "etp": 2, "tp": 8, "sp": True, **MOE},
    {"pp": 4, **HYBRID, "num_layers": None},
    {"pp": 3, **HYBRID, "num_layers": None, "hybrid_layer_pattern": "MEM|*E|M"},
    {"pp": 3, **HYBRID, "num_layers": None, "hybrid_layer_pattern": "MEM/E"},
    {"pp": 3, "pipeline_model_parallel_layout": "Et*3|t*3|t*2L"},
    {"pp": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E(tt|)*3,ttL"},
    {"pp": 2, "pipeline_model_parallel_layout": [["embedding", *4 * ["decoder"]], [*4 * ["decoder"], "loss"]]},
    {"pp": 3, "num_layers_in_first_pipeline_stage": 2},
    {"pp": 3, "num_layers_in_last_pipeline_stage": 2},
    {"pp": 2, "num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 3},
    {"pp": 5, **ACCOUNTED},
    {"num_layers": 94, "pp": 16, **ACCOUNTED},  # Bridge's recipe of Qwen3-235B-A22B
    {"pp": 2, "virtual_pipeline_model_parallel_size": 2},
    {"pp": 2, "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "device": "cpu"},
    {"pp": 4, "virtual_pipeline_model_parallel_size": 2, "batch_p2p_comm": True},
    {"pp": 4, "gbs": 6, "virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 6},
    {"num_query_groups": None, "tp": 16},
    {"lr": 0.0, "min_lr": None},
    {"data": "text", "path": "books"},
)


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_accepted(changes):
    assert table_problems(layout_rules, layout_config(**changes)) == []


# The rule that refuses -> layouts.
REFUSED = {
    "tp_divides": (
        {"tp": 16},
        {**HYBRID, "tp": 8, "num_layers": None},
        {**HYBRID, "tp": 4, "num_layers": None, "mamba_num_heads": 6},
    ),
    "etp_divides": ({**MOE, "etp": 3, "dp": 3, "gbs": 3},),
    "sequence_parallel": ({"sp": True}, {"tp": 2, "mode": "stock", "num_moe_experts": 8},),
    "sequence": ({"tp": 2, "sp": True, "seq": 63}, {"cp": 2, "seq": 66}, {"cp": 2, "tp": 2, "sp": True, "seq": 68},),
    "interleaved": (
        {"pp": 2, "virtual_pipeline_model_parallel_size": 2, "batch_p2p_comm": True},
        {"pp": 4, "virtual_pipeline_model_parallel_size": 2, "batch_p2p_comm": True, "overlap_p2p_comm": True},
        {"virtual_pipeline_model_parallel_size": 2},
        {"pp": 4, "gbs": 6, "virtual_pipeline_model_parallel_size": 2},
        {**HYBRID, "num_layers": None, "pp": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "layers": (
        {"pp": 4, "num_layers_in_first_pipeline_stage": 3},
        {"pp": 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 3},
        {"num_layers_in_last_pipeline_stage": 8, "pp": 2},
        {"pp": 3},
        {**ACCOUNTED, "pp": 4},
        {"pp": 3, "num_layers_in_first_pipeline_stage": 2, "account_for_loss_in_pipeline_split": True},
        {"pp": 2, "virtual_pipeline_model_parallel_size": 3},
        {"pp": 2, "pipeline_model_parallel_layout": "Ett|tt|tt|ttL"},
        {"pp": 2, "pipeline_model_parallel_layout": "E(tt|)*2,ttttL"},
        {"pp": 2, "pipeline_model_parallel_layout": [["embedding"], 8 * ["decoder"], ["loss"]]},
        {"pipeline_model_parallel_layout": "Et*4|t*4L"},
        {"pp": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*4|t*4L"},
    ),
    "context": ({"cp": 2, "device": "cpu", "mode": "stock", "multi_latent_attention": True},),
    "pattern": (
        {**HYBRID, "pp": 3, "num_layers": None},
        {**HYBRID, "pp": 2, "num_layers": None, "hybrid_layer_pattern": "ME|M*|EM|M*/E"},
        {**HYBRID, "num_layers": None, "hybrid_layer_pattern": "MEM|*EM"},
    ),
    "stages_without_experts": ({**HYBRID, "pp": 4, "num_layers": None, "num_moe_experts": 8},),
    "experts": ({"ep": 2}, {"ep": 2, "etp": 4}, {**MOE, "ep": 3, "dp": 3, "gbs": 3}, {**MOE, "ep": 4, "dp": 2},),
    "batch": ({"gbs": 6, "dp": 4},),
    "lr": ({"lr": 1e-05}, {"lr": -1.0, "min_lr": None},),
    "data": ({"data": "text"}, {"path": "books"},),
}  # fmt: skip


@pytest.mark.parametrize(
    "rule, changes", [(rule, changes) for rule, rows in REFUSED.items() for changes in rows], ids=str
)
def test_refused_by_one_rule(rule, changes):
    (problem,) = broken_rules(layout_config(**changes), layout_rules.RULES)
    assert problem.rule == rule


def test_every_rule_has_its_say():
    everything = {"tp": 5, "sp": True, "pp": 7, "cp": 3, "dp": 3, "ep": 5, "etp": 9, "device": "cpu", "data": "text"}
    everything |= {"virtual_pipeline_model_parallel_size": 2, "mode": "stock", "multi_latent_attention": True}
    problems = table_problems(layout_rules, layout_config(**everything, **MOE, lr=1e-9))
    keys = [re.match(r"data=text|model\.virtual|\w+", problem)[0] for problem in problems]
    assert keys == ["tp", "etp", "seq", "cp", "model.virtual", "pp", "ep", "gbs", "lr", "data=text"]


def test_a_layout_counts_its_ranks():
    at = layout_config(tp=2, pp=3, cp=5, dp=7, ep=2, etp=2, sp=True).layout
    assert at.world == 2 * 3 * 5 * 7
    assert at.as_dict() == {"tp": 2, "pp": 3, "cp": 5, "dp": 7, "ep": 2, "etp": 2, "sp": True}


SMALL = st.integers(1, 6)


@st.composite
def asked(draw) -> dict:
    """A model, a batch and a layout that divide about as often as not."""
    multiple = st.sampled_from((1, 2, 3, 4, 6, 8, 12, 24))
    return {
        **{name: draw(SMALL) for name in ("tp", "pp", "cp", "dp", "ep", "etp")},
        **{name: draw(multiple) for name in DENSE},
        "num_moe_experts": draw(st.none() | multiple),
        "moe_ffn_hidden_size": draw(multiple),
        "sp": draw(st.booleans()),
        "seq": draw(multiple) * draw(multiple),
        "mbs": draw(SMALL),
        "gbs": draw(multiple) * draw(SMALL),
        "device": draw(st.sampled_from(("cpu", "gpu"))),
        "mode": draw(st.sampled_from(("stock", "tree"))),
    }


def divides(want: dict) -> dict[str, bool]:
    """What each key has to divide or be a multiple of, worked out once more: key -> whether it does."""
    tp, pp, cp, dp, ep, etp = (want[name] for name in ("tp", "pp", "cp", "dp", "ep", "etp"))
    local = want["seq"] / (2 * cp if cp > 1 else 1) / (tp if want["sp"] else 1)
    experts = want["num_moe_experts"]
    shards = (want[name] / tp for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size"))
    spread = tp * pp * cp * dp / (etp * ep * pp)
    return {
        "tp": all(shard.is_integer() for shard in shards),
        "sp": tp > 1 if want["sp"] else tp == 1 or experts is None,
        "seq": local.is_integer(),
        "pp": (want["num_layers"] / pp).is_integer(),
        "etp": (want["moe_ffn_hidden_size"] / etp).is_integer(),
        "experts": ep == etp == 1 if experts is None else (experts / ep).is_integer() and spread.is_integer(),
        "gbs": (want["gbs"] / want["mbs"] / dp).is_integer(),
    }


@settings(max_examples=5 * settings.default.max_examples)
@given(asked())
def test_exactly_what_divides_is_accepted(want):
    expected = divides(want)
    problems = table_problems(layout_rules, layout_config(**want))
    assert len(problems) == list(expected.values()).count(False)
    for key, fits in expected.items():
        starts = ("ep=", "etp=", "etp * ep * pp") if key == "experts" else (f"{key}=",)
        named = [p for p in problems if p.startswith(starts) and (key != "etp" or "moe_ffn_hidden_size" in p)]
        assert fits or named, key


@settings(max_examples=5 * settings.default.max_examples)
@given(asked())
def test_what_a_message_suggests_is_accepted(want):
    for problem in table_problems(layout_rules, layout_config(**want)):
        if match := re.search(r"; (\w+) can be ([\d, ]+)$", problem):
            key, values = match[1], match[2].split(", ")
            rest = [table_problems(layout_rules, layout_config(**want | {key: int(value)})) for value in values]
            assert not any(line.startswith(f"{key}=") and " divide " in line for lines in rest for line in lines)
        elif match := re.search(r"the next that is: (\w+)=(\d+)$", problem):
            key, value = match[1], int(match[2])
            assert value > want[key]
            assert not any(
                line.startswith(f"{key}=")
                for line in table_problems(layout_rules, layout_config(**want | {key: value}))
            )
