# SPDX-License-Identifier: Apache-2.0
"""What two comparable runs have in common: not the layout nor the code that computes, but all that decides a result."""

import copy
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tp_invariant_recipes.config import fingerprint as table
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.fingerprint import fingerprint
from tp_invariant_recipes.fields import catalogue
from tp_invariant_recipes.settings.run_config import RunConfig

MODELS = ("qwen3_8b", "qwen3_moe_toy", "nemotron3_nano_toy", "glm45_toy", "qwen3_next_toy")


@cache
def identity_of(model: str, *overrides: str, device: str = "gpu") -> dict:
    return fingerprint(compose(model, overrides, device=device).config, None)


# Overrides that leave the identity as it is: layout, machine, kernels, files, length of an unchanged schedule.
SAME = (
    ("qwen3_8b", ("tp=2",)),
    ("qwen3_8b", ("tp=8", "sp=false")),
    ("qwen3_8b", ("pp=4", "dp=4", "gbs=4", "cp=2", "numerics=stock")),
    ("qwen3_8b", ("device=cpu",)),
    ("qwen3_toy", ("device=cpu", "numerics=tree", "tp=8")),
    ("qwen3_8b", ("cluster=h100", "logging=wandb", "save=10", "run.dir=x")),
    ("qwen3_moe_toy", ("tp=2", "ep=2", "dp=2", "gbs=4", "mbs=2", "numerics.data_shards=4", "numerics.expert_groups=2")),
    ("qwen3_moe_toy", ("tp=4", "etp=4", "numerics=stock")),
    ("nemotron3_nano_toy", ("tp=2", "ep=2")),
    ("qwen3_8b", ("train.train_sync_interval=1", "train.manual_gc=false", "dataset.pin_memory=false")),
    ("qwen3_8b", ("optimizer.log_num_zeros_in_grad=true", "model.attention_softmax_in_fp32=false")),
)


@pytest.mark.parametrize("model, overrides", SAME, ids=[" ".join((m, *o)) for m, o in SAME])
def test_a_run_of_another_layout_is_the_same_run(model, overrides):
    # These are part of the identity, and here for both.
    batch = [o for o in overrides if o.startswith(("gbs=", "numerics"))]
    assert identity_of(model, *overrides) == identity_of(model, *batch)


# Override, and the keys that it changes.
OTHER = (
    ("seed=1", {"rng.seed", "dataset.random_seed"}),
    ("lr=1e-3", {"optimizer.lr"}),
    ("seq=1024", {"model.seq_length", "dataset.seq_length"}),
    ("gbs=2", {"train.global_batch_size"}),
    ("iters=7", {"scheduler.lr_decay_iters"}),
    (
        "precision=fp32",
        {"mixed_precision", *(f"model.{f}" for f in ("bf16", "fp16", "params_dtype", "autocast_dtype"))},
    ),
)


@pytest.mark.parametrize("override, keys", OTHER, ids=[o for o, _ in OTHER])
def test_a_run_with_another_result_is_another_run(override, keys):
    before, after = identity_of("qwen3_8b"), identity_of("qwen3_8b", override)
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert keys <= changed
    assert changed - keys <= {"optimizer.bf16", "optimizer.fp16"}


def test_data_is_known_by_its_content_and_not_by_its_place():
    def text(path: str, digest: str) -> dict:
        tree = compose("qwen3_toy", ["data=text", f"data.path={path}"]).config.sections
        tree["dataset"]["blend"] = [[path], None]
        tree["dataset"]["path_to_cache"] = f"{path}/cache"
        return fingerprint(RunConfig(tree), digest)

    assert text("a", "1") == text("b", "1") != text("a", "2")
    assert text("a", "1")["data.digest"] == "1"
    assert text("a", "1")["data.kind"] == "text"
    assert fingerprint(compose("qwen3_toy").config, None)["data.kind"] == "mock"


def test_an_unset_decay_is_as_long_as_the_run():
    assert identity_of("qwen3_8b", "iters=7")["scheduler.lr_decay_iters"] == 7
    tree = compose("qwen3_8b", ["iters=7"]).config.sections
    tree["scheduler"]["lr_decay_iters"] = 50
    assert fingerprint(RunConfig(tree), None)["scheduler.lr_decay_iters"] == 50


# All that conf/ sets in the sections of the identity and that is left out of it.
_OMITTED = """
model: _target_ apply_rope_fusion attention_backend attention_softmax_in_fp32 batch_p2p_comm
    bias_activation_fusion bias_dropout_fusion context_parallel_size cross_entropy_fusion_impl cross_entropy_loss_fusion
    cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps deterministic_mode disable_bf16_reduced_precision_matmul
    expert_model_parallel_size expert_tensor_parallel_size gradient_accumulation_fusion masked_softmax_fusion
    moe_grouped_gemm moe_permute_fusion moe_shared_expert_overlap moe_token_dispatcher_type overlap_p2p_comm
    persist_layer_norm pipeline_model_parallel_size recompute_granularity sequence_parallel
    tensor_model_parallel_size transformer_impl use_fused_weighted_squared_relu use_te_rng_tracker
    virtual_pipeline_model_parallel_size
rng: te_rng_tracker
dataset: create_attention_mask num_workers
ddp: average_in_collective check_for_nan_in_grad data_parallel_sharding_strategy megatron_fsdp_main_grads_dtype
    overlap_grad_reduce overlap_param_gather use_distributed_optimizer
optimizer: overlap_param_gather use_distributed_optimizer
scheduler: override_opt_param_scheduler
train: exit_signal_handler manual_gc manual_gc_interval micro_batch_size train_iters
"""
OMITTED = {
    f"{section}.{field}"
    for section, fields in (line.split(":") for line in _OMITTED.replace("\n    ", " ").strip().splitlines())
    for field in fields.split()
}


def fields_of(tree: dict) -> dict:
    """Every `section.field` of the sections that count, and its value."""
    sections = {name: tree[name] for name in table.SECTIONS if isinstance(tree[name], dict)}
    return {f"{name}.{field}": value for name, section in sections.items() for field, value in section.items()}


def test_what_is_omitted_is_what_this_list_says():
    trees = [compose(model, device=device).config.sections for model in MODELS for device in ("cpu", "gpu")]
    assert {
        key for tree in trees for key in fields_of(tree).keys() - fingerprint(RunConfig(tree), None).keys()
    } == OMITTED


@pytest.mark.parametrize("model", MODELS)
def test_every_other_field_counts(model):
    tree = compose(model, device="gpu").config.sections
    before = fingerprint(RunConfig(tree), None)
    for key in fields_of(tree).keys() - OMITTED:
        section, field = key.split(".")
        changed = tree | {section: tree[section] | {field: "another"}}
        after = fingerprint(RunConfig(changed), None)
        assert {k for k in before if before[k] != after[k]} == {key}


TREE = {name: {"kept": 1} for name in table.SECTIONS} | {
    "mixed_precision": "bf16_mixed", "train": {"train_iters": 10}, "scheduler": {"lr_decay_iters": 10},
    "data": {"kind": "mock"},
}  # fmt: skip
_ROWS = {name: catalogue._ALL[name].named for name in table.SECTIONS}
MARKED = sorted(f"{name}.{field}" for name, rows in _ROWS.items() for field, row in rows.items() if not row.compared)


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)


@settings(max_examples=300)
@given(key=st.sampled_from(MARKED), value=VALUES)
@example(key="model._target_", value="")  # no provider is no family's
def test_no_field_with_a_mark_changes_the_identity(key, value):
    section, field = key.split(".")
    tree = copy.deepcopy(TREE)
    tree[section][field] = value
    assert fingerprint(RunConfig(tree), None) == fingerprint(RunConfig(TREE), None)


@given(key=st.sampled_from([key for key in MARKED if key[:10] != "tokenizer."]), value=VALUES)
def test_the_same_name_in_another_section_does(key, value):
    field = key.split(".")[1]
    tree = copy.deepcopy(TREE)
    tree["tokenizer"][field] = value
    assert fingerprint(RunConfig(tree), None) == fingerprint(RunConfig(TREE), None) | {f"tokenizer.{field}": value}


@given(st.permutations(list(TREE)), st.permutations("abc"))
def test_the_order_of_sections_and_fields_does_not_matter(sections, names):
    tree = {name: TREE[name] for name in sections}
    tree["model"] = {name: 1 for name in names}
    result = fingerprint(RunConfig(tree), None)
    assert list(result) == sorted(result)
    assert result == fingerprint(RunConfig(TREE | {"model": dict.fromkeys("abc", 1)}), None)


def test_a_mixed_precision_of_fields_counts_field_by_field():
    tree = TREE | {"mixed_precision": {"bf16": True, "grad_reduce_in_fp32": False}}
    assert fingerprint(RunConfig(tree), None)["mixed_precision.grad_reduce_in_fp32"] is False
    assert "mixed_precision" not in fingerprint(RunConfig(tree), None)
