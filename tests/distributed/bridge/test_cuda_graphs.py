# SPDX-License-Identifier: Apache-2.0
"""`cuda_graph=te|off|full` and FP8: what is captured of a model, and that all that cannot be is one message."""

import copy
import functools

import pytest

from tests.rules import table_problems
from tp_invariant_recipes.check import cuda_graphs as graph_rules
from tp_invariant_recipes.check import relations
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError, lines
from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("bridge")  # which types the fields of `model`

PAD = {"model.moe_expert_capacity_factor": 1.0, "model.moe_pad_expert_input_to_capacity": True}
PADDED = ("model.moe_expert_capacity_factor=1.0", "model.moe_pad_expert_input_to_capacity=true")


@functools.cache
def composed(model: str, *overrides: str, device: str = "gpu") -> dict:
    return compose(model, ["numerics=stock", *overrides], device=device).config.sections


def changed(tree: dict, fields: dict) -> dict:
    """A copy of the tree with other fields, by their paths: composing once for each would take a minute in all."""
    tree = copy.deepcopy(tree)
    for path, value in fields.items():
        *sections, name = path.split(".", 2)
        functools.reduce(lambda part, section: part.setdefault(section, {}), sections, tree)[name] = value
    return tree


def refused(model: str, *overrides: str, device: str = "gpu") -> list[str]:
    with pytest.raises(ConfigError) as error:
        compose(model, ["numerics=stock", *overrides], device=device)
    return list(error.value.problems)


# What cuda_graph=te captures of a model.
CAPTURED = (
    ("qwen3_toy", {}, ["attn", "mlp"]),
    ("qwen3_moe_toy", {}, ["attn", "moe_router", "moe_preprocess"]),
    ("qwen3_moe_toy", PAD, ["attn", "moe"]),
    ("qwen3_moe_toy", {"model.moe_layer_freq": [0, 1, 1, 1]}, ["attn", "mlp", "moe_router", "moe_preprocess"]),
    ("nemotron3_nano", {}, ["attn", "mamba", "moe_router", "moe_preprocess"]),
    ("nemotron3_nano", PAD, ["attn", "mamba", "moe"]),
    ("nemotron3_nano", {"model.moe_router_padding_for_fp8": True}, ["attn", "mamba", "moe_router"]),
    ("nemotron3_nano", {"model.hybrid_layer_pattern": "MEME"}, ["mamba", "moe_router", "moe_preprocess"]),
    ("nemotron3_nano", {"model.num_moe_experts": None, "model.hybrid_layer_pattern": "M-M-"}, ["mamba", "mlp"]),
)


@pytest.mark.parametrize("model, fields, modules", CAPTURED)
def test_what_is_captured_follows_the_model(model, fields, modules):
    assert cuda_graphs.graphed_modules(changed(composed(model), fields)["model"], invariant=False) == modules


def test_the_tree_holds_what_is_captured_and_it_can_be_chosen():
    assert composed("nemotron3_nano_toy", "cuda_graph=te", *PADDED)["model"]["cuda_graph_modules"] == [
        "attn",
        "mamba",
        "moe",
    ]
    chosen = composed("nemotron3_nano_toy", "cuda_graph=te", "model.cuda_graph_modules=[mamba]")["model"]
    assert (chosen["cuda_graph_impl"], chosen["cuda_graph_modules"]) == ("transformer_engine", ["mamba"])


def test_off_captures_nothing():
    off = composed("qwen3_toy", "cuda_graph=off")
    assert off["model"]["cuda_graph_impl"] == "none"
    assert "cuda_graph_modules" not in off["model"]
    assert composed("qwen3_toy") == composed("qwen3_toy", "cuda_graph=full")


# Model, what is changed under cuda_graph=te, and what the one line about it says.
TE = (
    ("qwen3_toy", {"model.cuda_graph_modules": []}, "=[]: a list of what to capture, as in [attn,mlp]"),
    ("qwen3_toy", {"model.cuda_graph_modules": "full"}, "a list of what to capture"),
    ("qwen3_toy", {"model.cuda_graph_modules": ["attm"]}, "'attm' is none of attn, mamba, mlp, moe"),
    ("qwen3_toy", {"model.cuda_graph_modules": ["mamba"]}, "mamba: this model has no Mamba layers"),
    ("qwen3_toy", {"model.cuda_graph_modules": ["moe"]}, "moe: this model has no experts"),
    ("qwen3_toy", {"model.cuda_graph_modules": ["attn", "moe_router"]}, "moe_router: this model has no experts"),
    ("nemotron3_nano", {"model.cuda_graph_modules": ["mlp"]}, "mlp: for dense layers"),
    ("nemotron3_nano", {"model.cuda_graph_modules": ["moe"]}, "model.moe_pad_expert_input_to_capacity=true"),
    ("nemotron3_nano", PAD | {"model.cuda_graph_modules": ["moe", "moe_router"]}, "leave one or the others out"),
    ("nemotron3_nano", {"model.cuda_graph_modules": ["moe_preprocess"]}, "captured with moe_router only"),
    ("nemotron3_nano", {"model.moe_expert_capacity_factor": 1.0}, "model.moe_expert_capacity_factor=null"),
    ("nemotron3_nano", {"model.hybrid_layer_pattern": "MEME"}, "attn: this model has no attention layers"),
    ("qwen3_toy", {"model.recompute_granularity": "full"}, "model.recompute_granularity=null, or cuda_graph=full"),
    (
        "qwen3_moe_toy",
        {"model.recompute_granularity": "selective", "model.recompute_modules": ["moe"]},
        "leave moe out of model.recompute_modules",
    ),
    ("qwen3_toy", {"model.cpu_offloading": True}, "model.cpu_offloading=false"),
    ("qwen3_toy", {"model.overlap_moe_expert_parallel_comm": True}, "model.overlap_moe_expert_parallel_comm=false"),
    (
        "qwen3_moe_toy",
        {"model.overlap_moe_expert_parallel_comm": True, "model.cuda_graph_modules": ["attn"], "numerics.mode": "tree"},
        "cuda_graph=full or off",
    ),
    ("qwen3_toy", {"rng.te_rng_tracker": False}, "rng.te_rng_tracker=true"),
    ("qwen3_toy", {"model.use_te_rng_tracker": None}, "model.use_te_rng_tracker=true"),
    ("qwen3_toy", {"model.cuda_graph_warmup_steps": 0}, "model.cuda_graph_warmup_steps=0: must be"),
    (
        "qwen3_toy",
        {"cluster.environment.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "cluster.environment.NCCL_GRAPH_REGISTER=0",
    ),
    ("qwen3_toy", {"dist.distributed_backend": "gloo"}, "dist.distributed_backend=nccl, or cuda_graph=off"),
    ("qwen3_toy", {"model.seq_length": 64}, "128, model.attention_backend=unfused, or cuda_graph=off"),
    ("qwen3_toy", {"model.cuda_graph_impl": "local"}, "model.cuda_graph_impl=local: cuda_graph=off, cuda_graph=te"),
    ("qwen3_toy", {"model.cuda_graph_scope": "attn"}, "model.cuda_graph_scope=attn: cuda_graph=te"),
    ("qwen3_toy", {"device.kind": "cpu"}, "cuda_graph=te: CUDA graphs need a GPU; device=gpu, or cuda_graph=off"),
)  # fmt: skip

FULL = (
    ("nemotron3_nano", PAD | {"model.moe_pad_expert_input_to_capacity": False}, "capacity=true"),
    ("qwen3_toy", {"model.seq_length": 192, "numerics.mode": "stock"}, "seq= a multiple of 128, model.attention"),
    ("qwen3_toy", {"model.cuda_graph_modules": ["attn"]}, "model.cuda_graph_modules=[]"),
    ("qwen3_toy", {"ddp.check_for_nan_in_grad": True}, "ddp.check_for_nan_in_grad=false"),
    ("qwen3_toy", {"rerun_state_machine.check_for_nan_in_loss": None}, "check_for_nan_in_loss=false"),
    ("qwen3_toy", {"rerun_state_machine.check_for_spiky_loss": True}, "check_for_spiky_loss=false"),
    ("qwen3_toy", {"rng.te_rng_tracker": False}, "rng.te_rng_tracker=true"),
    ("qwen3_toy", {"device.kind": "cpu"}, "cuda_graph=full: CUDA graphs need a GPU; device=gpu, or cuda_graph=off"),
)  # fmt: skip

ROWS = (*(("te", *row) for row in TE), *(("full", *row) for row in FULL))


def run(kind: str, model: str, fields: dict) -> RunConfig:
    padded = PADDED if kind == "full" and model == "nemotron3_nano" else ()
    return RunConfig(changed(composed(model, f"cuda_graph={kind}", *padded), fields))


def wrong(kind: str, model: str, fields: dict) -> list[str]:
    return table_problems(graph_rules, run(kind, model, fields))


@pytest.mark.parametrize("kind, model, fields, says", ROWS)
def test_what_cannot_be_captured_is_refused_with_the_key_to_change(kind, model, fields, says):
    (problem,) = wrong(kind, model, fields)
    assert says in problem


def test_every_rule_is_tried():
    runs = [run(kind, model, fields) for kind, model, fields, _ in ROWS]
    assert [rule for rule in graph_rules.RULES if not any(map(rule.broken, runs))] == []


def test_what_is_refused_for_layers_is_let_through_for_a_whole_step():
    assert wrong("full", "qwen3_toy", {"model.recompute_granularity": "full"}) == []


@pytest.mark.parametrize(
    "kind, fields",
    (
        ("full", {"model.seq_length": 128}),
        ("full", {"model.attention_backend": "unfused"}),
        ("full", {"numerics.mode": "portable"}),
        ("te", {"model.cuda_graph_modules": ["mlp"]}),
    ),
)
def test_other_attention_than_cudnns_is_replayed_on_any_number_of_tokens(kind, fields):
    assert wrong(kind, "qwen3_toy", {"model.seq_length": 64} | fields) == []


def test_an_allocator_that_moves_nothing_is_let_through(monkeypatch):
    moving = {"cluster.environment.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert wrong("te", "qwen3_toy", moving | {"cluster.environment.NCCL_GRAPH_REGISTER": "0"}) == []
    assert table_problems(graph_rules, RunConfig(changed(composed("qwen3_toy"), moving))) == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert len(wrong("te", "qwen3_toy", {})) == 1


def test_all_that_is_wrong_is_one_message():
    overrides = ("model.cuda_graph_modules=[mamba,mlq]", "model.recompute_granularity=full", "rng.te_rng_tracker=false")
    assert len(refused("qwen3_toy", "cuda_graph=te", "seq=0.5", *overrides)) == 5


def test_fp8_is_a_whole_class_of_which_fields_can_be_set():
    result = composed("nemotron3_nano_toy", "precision=fp8_tensorwise", "mixed_precision.fp8_wgrad=false")
    fields = ("bf16", "fp8", "fp8_recipe", "fp8_wgrad")
    assert [result["mixed_precision"][name] for name in fields] == [True, "hybrid", "tensorwise", False]


def fp8_problems(config: RunConfig) -> list[str]:
    return lines(broken_rules(config, relations.PRECISION_RULES))


@pytest.mark.parametrize(
    "model, fields, says",
    (
        ("qwen3_toy", {"model.seq_length": 72}, "seq * mbs / cp is 72"),
        ("qwen3_toy", {"model.ffn_hidden_size": 264}, "model.ffn_hidden_size / tp is 264"),
        ("qwen3_moe_toy", {"model.moe_ffn_hidden_size": 776}, "model.moe_ffn_hidden_size / etp is 776"),
        ("nemotron3_nano", {"model.tensor_model_parallel_size": 8}, "the width of Mamba's in_proj / tp is 1288"),
        ("qwen3_toy", {"model.num_attention_heads": 9, "model.kv_channels": 24}, "keys and values / tp is 600"),
        ("qwen3_next_toy", {"model.tensor_model_parallel_size": 4}, "a gated delta net's in_proj / tp is 392"),
    ),
)
def test_fp8_products_have_sides_that_can_be_multiplied(model, fields, says):
    tree = composed(model, "precision=fp8_tensorwise", "numerics=stock")
    assert fp8_problems(RunConfig(tree)) == []
    (problem,) = fp8_problems(RunConfig(changed(tree, fields)))
    assert says in problem
    assert fp8_problems(RunConfig(changed(composed(model), fields))) == []
