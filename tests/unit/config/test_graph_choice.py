# SPDX-License-Identifier: Apache-2.0
"""cuda_graph=auto, the default: the first kind of CUDA graphs that a run allows, and the reason for none."""

import itertools

import pytest

from tp_invariant_recipes.config import graph_choice
from tp_invariant_recipes.config.adjusted import complete
from tp_invariant_recipes.config.compose import _typed, compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.sizing.memory import GIB

FULL, TE, OFF = "full_iteration", "transformer_engine", "none"

# A command on a GPU -> Megatron's implementation, and the beginning of what is said of it.
CHOSEN = {
    "qwen3_0p6b": (FULL, "full"),
    "qwen3_0p6b tp=4 numerics=portable": (FULL, "full"),
    "qwen3_8b tp=2 pp=2": (TE, "te"),
    "qwen3_moe_toy": (FULL, "full"),
    "qwen3_moe_toy dp=2 ep=2 gbs=2": (FULL, "full"),
    "qwen3_moe_toy dp=4 ep=4 gbs=4 model.moe_expert_capacity_factor=1.0": (FULL, "full"),
    "qwen3_moe_toy tp=2 ep=4 dp=2 gbs=2": (TE, "te"),
    "qwen3_moe_toy guard=products": (TE, "te"),
    "qwen3_moe_toy numerics=stock": (TE, "te"),
    "qwen3_8b tp=2 pp=2 numerics=stock": (TE, "te"),
    "qwen3_moe_toy dp=2 ep=2 gbs=2 numerics=stock model.overlap_moe_expert_parallel_comm=true": (TE, "te"),
    "qwen3_toy dp=2 gbs=2 guard=shadow": (OFF, "off: guard=shadow: a captured step takes no other replica's data"),
    "qwen3_moe_toy cp=4 seq=512": (OFF, "off: numerics=tree: a captured layer gets a mask"),
    "qwen3_0p6b ddp.check_for_nan_in_grad=true": (TE, "te"),
    "qwen3_moe_toy numerics=portable": (OFF, "off: numerics=portable: experts have not been captured; "),
    "qwen3_0p6b numerics=gather": (OFF, "off: numerics=gather: its layers have not been captured"),
    "qwen3_0p6b ledger.trace=1:2": (OFF, "off: ledger.trace: a replayed CUDA graph calls no module"),
    "qwen3_0p6b iters=5": (OFF, "off: 5 steps are fewer than the 6"),
    "qwen3_moe_toy iters=9 tp=2 ep=4 dp=2 gbs=2": (OFF, "off: 9 steps are fewer than the 10"),
    "qwen3_toy numerics=stock precision=fp8_tensorwise": (OFF, "off: tpi captures FP8 and FP4 GEMMs only on request"),
    "qwen3_toy model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1": (
        OFF,
        "off: tpi captures recomputation only on request",
    ),
    "qwen3_moe_toy dp=2 ep=2 gbs=2 model.overlap_moe_expert_parallel_comm=true": (
        OFF,
        "off: tpi captures Megatron's combined schedule only on request",
    ),
    "qwen3_toy peft=lora numerics=stock checkpoint.pretrained_checkpoint=x": (OFF, "off: tpi captures adapters"),
    "qwen3_toy peft=lora checkpoint.pretrained_checkpoint=x": (
        OFF,
        "off: numerics=tree: adapters have not been captured",
    ),
    "qwen3_toy seq=64": (OFF, "off: cuda_graph=full: cuDNN's attention computes wrong numbers"),
    "qwen3_toy tp=2 dist.distributed_backend=gloo": (OFF, "off: cuda_graph=full: Gloo sums on the host"),
    # Whoever names a kind gets it, or its problem.
    "qwen3_0p6b cuda_graph=off": (OFF, None),
    "qwen3_0p6b cuda_graph=te": (TE, None),
    "qwen3_0p6b model.cuda_graph_impl=none": (OFF, None),
}


@pytest.mark.parametrize("command", CHOSEN)
def test_the_first_kind_that_a_run_allows_is_chosen(command):
    implementation, message = CHOSEN[command]
    model, *overrides = command.split()
    composed = compose(model, overrides, device="gpu")
    assert composed.config.model["cuda_graph_impl"] == implementation
    assert composed.graphs == message or composed.graphs.startswith(message)


@pytest.mark.parametrize(
    "command, gib, message",
    (
        ("qwen3_8b tp=2", 79.6, "off: memory is tight: with graphs this run needs about 8"),
        ("qwen3_8b tp=2 device.check_memory=false", 79.6, "full"),
        ("qwen3_8b tp=2", 139.8, "full"),
        ("qwen3_8b tp=2 pp=2", 40, "off: memory is tight: with graphs this run needs about 4"),
        ("qwen3_0p6b", None, "full"),
        # Of which the slots for any choice of experts are 7 GiB.
        ("qwen3_30b_a3b model.num_layers=8 dp=4 ep=4 gbs=4 seq=4096", 54, "full"),
        ("qwen3_30b_a3b model.num_layers=8 dp=4 ep=4 gbs=4 seq=4096", 40, "off: memory is tight: with graphs this run"),
    ),
)
def test_where_memory_is_tight_nothing_is_captured(monkeypatch, command, gib, message):
    """As seen on two H100s: three steps, and then a capture without memory."""
    gpu = [gpus.Gpu("GPU", (9, 0), int(gib * GIB))] if gib else []
    monkeypatch.setattr(gpus, "visible", lambda: gpu)
    model, *overrides = command.split()
    assert compose(model, overrides, device="gpu").graphs.startswith(message)


def test_a_cpu_has_none():
    composed = compose("qwen3_toy", device="cpu")
    assert composed.graphs == "off: graphs need a GPU"
    assert composed.config.model["cuda_graph_impl"] == OFF


NAMED = {"qwen3_0p6b": "rng.te_rng_tracker=false", "qwen3_moe_toy": "numerics=stock", "nemotron3_nano_toy": "seed=1"}


@pytest.mark.parametrize(
    "model, override",
    (
        pytest.param(model, override, marks=() if NAMED[model] == override else pytest.mark.release)
        for model in NAMED
        for override in NAMED.values()
    ),
)
@pytest.mark.parametrize("option", graph_choice.OPTIONS)
def test_a_chosen_kind_is_as_if_it_were_named(model, override, option):
    """Hydra composes a named option, and not one that tpi chooses."""
    auto, named = (
        _typed(model, parse_all([override, "device=gpu", f"cuda_graph={it}"]), [], None)[0] for it in ("auto", option)
    )
    typed = {path.path for path in parse_all([override])}
    assert complete(graph_choice.captured(auto, option, typed)).sections == named.sections
    assert auto != named


# A model with experts -> the degrees of tp, cp and ep at which graphs of the whole step were compared with eager runs.
COMPARED = {
    "qwen3_moe_toy": "111 112 114 121 122 211 212",
    "moonlight_toy": "111 112 211 212",
    "nemotron3_nano_toy": "112",
    "qwen3_next_toy": "111 112 211 212",
}


@pytest.mark.parametrize("model", COMPARED)
def test_experts_are_captured_whole_when_asked_where_no_graph_was_compared(model):
    """The layers beside them decide, too."""
    config = compose(model, ["cuda_graph=off"], device="gpu").config.with_fields("model", cuda_graph_impl=FULL)
    names = [SHORT_KEYS[key].path.removeprefix("model.") for key in ("tp", "cp", "ep")]
    whys = {
        "".join(map(str, degrees)): graph_choice.beyond(
            config.with_fields("model", **dict(zip(names, degrees, strict=True))), "full"
        )
        for degrees in itertools.product((1, 2, 4), (1, 2), (1, 2, 4))
    }
    assert {degrees for degrees, why in whys.items() if not why} == {*COMPARED[model].split()}
    assert whys["421"] == ["of such a run with experts tpi captures the whole step when asked"]


def test_a_recipe_decides_unless_auto_is_named():
    assert not graph_choice.decides([], recipe=True)
    assert graph_choice.decides(parse_all(["cuda_graph=auto"]), recipe=True)
    assert not graph_choice.decides(parse_all(["cuda_graph=full"]), recipe=True)
