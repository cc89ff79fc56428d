# SPDX-License-Identifier: Apache-2.0
"""On one GPU and more: one ledger for all layouts with invariant numerics, several with stock, and from one checkpoint
of a run to another layout or numerics; in FP8, for families with layers of their own, and in CUDA graphs.

The runs of a suite are trained first, side by side, two ranks to a GPU by Gloo where there are few (side_by_side.py);
with `-k` those alone that the chosen tests read.
Rows that need more GPUs than there are, are skipped.
"""

import functools
import re
from pathlib import Path

import pytest
import torch

from tests.distributed.layouts import rows as layout_rows
from tests.distributed.scenario import STOCK, unequal
from tests.gpu.side_by_side import EXPERTS as SMALL_EXPERTS
from tests.gpu.side_by_side import Run, Trained, folder_of, gpus_for, marks
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.numerics.mode import definition
from tp_invariant_recipes.numerics.precision import DEFINITION, MXFP8

GPUS = torch.cuda.device_count()
pytestmark = marks()
several = pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs")

TOY = "qwen3_toy mbs=2 gbs=8"
FOUR = "iters=4 save=2"
EXPERTS = f"{SMALL_EXPERTS} iters=4 gbs=4"
COMBINED = "model.overlap_moe_expert_parallel_comm=true"
RECOMPUTE = "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1"
BIASES = "model.add_bias_linear=true model.add_qkv_bias=true"
INTERLEAVED = "model.virtual_pipeline_model_parallel_size=2"
UNEVEN = "model.num_layers_in_first_pipeline_stage=1"
PLAIN_OPTIMIZER = "optimizer.use_distributed_optimizer=false"

OVERLAP = (
    "ddp.overlap_grad_reduce=true ddp.bucket_size=100000 ddp.overlap_param_gather=true "
    "optimizer.overlap_param_gather=true"
)
FSDP = "ddp.use_megatron_fsdp=true ddp.data_parallel_sharding_strategy"
ADAPTERS = f"{TOY} iters=4 peft=lora peft.dim=8 checkpoint.pretrained_checkpoint=dense-tp1/checkpoints"

MUON = f"optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated {PLAIN_OPTIMIZER} ledger.state_digests=1"
LAYER_WISE = "optimizer.use_layer_wise_distributed_optimizer=true"

# The latents and heads of the whole model, which the kernels of attention take.
LATENT = (
    "deepseek_v3_toy seq=2048 model.kv_lora_rank=512 model.qk_head_dim=128 model.qk_pos_emb_head_dim=64 "
    "model.v_head_dim=128"
)

# What is held fixed, and the layouts that must agree with the first, with digests of all gradients and weights.
LAYOUTS = {
    "dense": (f"{TOY} {FOUR}", ("tp=1", "tp=2", "pp=2", "tp=2 pp=2", "tp=4", "tp=8")),
    "biases": (
        f"{TOY} iters=4 model.attention_backend=unfused {BIASES} {RECOMPUTE}",
        ("tp=1", "tp=2 sp=false", "tp=4"),
    ),
    "gather": (f"{TOY} iters=4 numerics=gather", ("tp=1", "tp=2", "tp=4")),
    "dp": (f"{TOY} iters=4 dp=2", ("tp=1", PLAIN_OPTIMIZER, "tp=2", "pp=2", "tp=4")),
    "vp": (f"{TOY} iters=4 model.num_layers=4", ("tp=1", f"pp=2 {INTERLEAVED}", f"pp=2 {UNEVEN}", "pp=4")),
    "untied": (
        f"{TOY} iters=4 model.num_layers=4 model.share_embeddings_and_output_weights=false",
        ("tp=1", "pp=2", f"tp=2 pp=2 {INTERLEAVED}"),
    ),
    "data": (
        "qwen3_toy gbs=8 iters=4 numerics.data_shards=4",
        (
            "dp=1", "dp=1 mbs=2", "dp=2", f"dp=4 {OVERLAP}", f"dp=4 {PLAIN_OPTIMIZER}", f"tp=2 dp=2 {OVERLAP}",
            "dp=2 pp=2", "tp=2 dp=4",
        ),
    ),
    "fsdp": (
        "qwen3_toy gbs=4 iters=6 numerics.data_shards=4",
        ("dp=1", "dp=2", *(f"dp=2 {FSDP}={s}" for s in ("optim", "optim_grads", "optim_grads_params"))),
    ),
    "fsdp-portable": (
        "qwen3_toy gbs=4 iters=4 numerics=portable numerics.data_shards=4",
        ("dp=2", f"dp=2 {FSDP}=optim_grads_params"),
    ),
    "leaves": (  # a data shard of one sequence
        "qwen3_toy gbs=8 iters=4 numerics.data_shards=8",
        ("dp=1", f"dp=2 {OVERLAP}", "dp=4", "pp=2"),
    ),
    "context": (
        "qwen3_toy gbs=4 iters=4 numerics.data_shards=2 numerics.context_shards=2",
        ("cp=1", "cp=2", "tp=2 cp=2", f"dp=2 cp=2 {OVERLAP}", f"dp=2 cp=2 {PLAIN_OPTIMIZER}", "pp=2 cp=2"),
    ),
    "context-experts": (f"{EXPERTS} numerics.context_shards=2", ("cp=1", "cp=2 ep=2", "tp=2 cp=2 ep=4")),
    "data-experts": (
        f"{EXPERTS} numerics.data_shards=4",
        ("dp=1", "dp=2 ep=2", f"dp=4 ep=4 {OVERLAP}", "tp=2 dp=2 ep=4 mbs=2", f"tp=2 dp=4 ep=8 {OVERLAP}"),
    ),
    "data-hybrid": (
        "nemotron3_nano_0p1b iters=4 gbs=4 seq=128 numerics.data_shards=4 numerics.expert_groups=4",
        ("dp=1", "dp=2 ep=2", f"dp=4 {OVERLAP}", "tp=2 dp=2 ep=4"),
    ),
    "graphs": (
        "qwen3_toy gbs=4 iters=30 numerics.data_shards=4",
        (
            "dp=1",
            *(f"{layout} cuda_graph={kind}" for layout in ("dp=1", "tp=2") for kind in ("full", "te")),
            "pp=2 cuda_graph=te",
            f"dp=2 cuda_graph=full {OVERLAP}",
            f"dp=2 cuda_graph=te {OVERLAP}",
        ),
    ),
    "graphs-context": (
        "qwen3_toy gbs=4 iters=8 numerics.context_shards=2",
        ("cp=1", "cp=1 cuda_graph=full", "cp=2 cuda_graph=full"),
    ),
    "graphs-experts": (
        EXPERTS.replace("iters=4", "iters=8"),
        tuple(
            f"{layout} cuda_graph={kind}"
            for layout in ("tp=1", "tp=2", "tp=2 ep=2")
            for kind in ("off", "te", "full")
        ),
    ),
    "graphs-experts-context": (
        EXPERTS.replace("iters=4", "iters=8") + " seq=512 numerics.context_shards=2 numerics.expert_groups=2",
        tuple(f"{layout} cuda_graph={kind}" for layout in ("cp=2", "cp=2 ep=2") for kind in ("off", "full")),
    ),
    "graphs-experts-data": (
        EXPERTS.replace("iters=4", "iters=8") + " numerics.data_shards=4",
        (
            "dp=1",
            *(f"dp=2 ep=2 cuda_graph={kind}" for kind in ("off", "te", "full")),
            *(f"dp=2 ep=2 cuda_graph={kind} {COMBINED}" for kind in ("off", "full")),
        ),
    ),
    "graphs-experts-capacity": (
        EXPERTS.replace("iters=4", "iters=8") + " numerics.data_shards=4 model.moe_expert_capacity_factor=1.0",
        ("dp=1", *(f"dp=2 ep=2 cuda_graph={kind}" for kind in ("off", "te", "full"))),
    ),
    "graphs-hybrid": (
        "nemotron3_nano_0p1b iters=8 gbs=2 seq=128",
        ("tp=1", "tp=1 cuda_graph=te", "tp=2 ep=2 cuda_graph=te", "tp=2 cuda_graph=full", "tp=2 ep=2 cuda_graph=full"),
    ),
    "latent": (
        "moonlight_1b iters=8 gbs=2",
        (
            "tp=1", "tp=2", "tp=2 ep=2", "pp=2", "tp=1 cuda_graph=te", "tp=2 cuda_graph=full",
            "tp=2 ep=2 cuda_graph=full",
        ),
    ),
    "latent-v3": (f"{LATENT} iters=4 gbs=2", ("tp=1", "tp=2 ep=2", "tp=4 ep=4")),
    "muon": (
        f"{TOY} iters=4 numerics.data_shards=2 {MUON}",
        ("tp=1", "tp=2", "pp=2", f"dp=2 {LAYER_WISE}", f"tp=2 dp=2 {LAYER_WISE}", "tp=4"),
    ),
    "muon-latent": (
        f"{LATENT} iters=4 gbs=2 numerics.data_shards=2 {MUON}",
        ("tp=1", "tp=2 ep=2", f"dp=2 ep=2 {LAYER_WISE}", "tp=4 ep=4"),
    ),
    "llama": ("llama32_toy iters=4 gbs=2", ("tp=1", "tp=2", "tp=4")),
    "llama-1b": ("llama32_1b seq=512 gbs=2 iters=20", ("tp=1", "tp=2", "tp=4")),
    "moonlight-cut": (
        "moonlight_16b_a3b model.num_layers=4 model.moe_layer_freq=[0,1,1,1] seq=512 gbs=2 iters=20",
        ("tp=1", "tp=2 ep=2", "tp=4 ep=4"),
    ),
    "qwen25": ("qwen25_toy iters=4 gbs=2", ("tp=1", "tp=2")),
    "portable": (
        "qwen3_toy numerics=portable iters=8 gbs=2 numerics.data_shards=1",
        ("tp=1", "tp=2", "pp=2", "tp=4 sp=false", "tp=1 cuda_graph=full", "tp=2 cuda_graph=full"),
    ),
    "portable-experts": (
        f"{EXPERTS} numerics=portable",
        ("tp=1", "tp=2 ep=2", "tp=4 ep=4"),
    ),
    "experts": (EXPERTS, ("tp=1", "tp=2 ep=2", "tp=4 ep=2", "tp=2 pp=2")),
    "experts-dp": (f"{EXPERTS} dp=2 numerics.expert_groups=2", ("tp=1", "ep=2", "tp=2 ep=2", "tp=2 ep=4")),
    "adapters": (ADAPTERS, ("tp=1", "tp=2", "tp=2 sp=false", "pp=2", "tp=4")),
    "adapters-data": (
        f"{ADAPTERS} numerics.data_shards=2",
        ("dp=1", f"dp=2 {OVERLAP}", f"dp=2 {PLAIN_OPTIMIZER}", f"tp=2 dp=2 {OVERLAP}"),
    ),
}  # fmt: skip

FP8_TOY = f"{layout_rows.SMALL} iters=8"
FP8_EXPERTS = f"{SMALL_EXPERTS} iters=4 gbs=2 numerics.virtual_shards=2"
FP8_LATENT = f"{layout_rows.LATENT} iters=4"
FP8_HYBRID = f"{layout_rows.HYBRID} iters=4 model.hidden_size=208 model.mamba_head_dim=64"
_TENSORWISE, _BLOCKWISE, _BY_32 = "precision=fp8_tensorwise", "precision=fp8_blockwise", "precision=mxfp8"
_NAMED = "mixed_precision=bf16_with_fp8_current_scaling_mixed"
_GRAPHS, _TWO, _EP = ("tp=1 cuda_graph=full", "tp=1 cuda_graph=te"), ("tp=1", "tp=2"), ("tp=1", "tp=2 ep=2")
_EVERY = ("tp=1", "tp=2", "tp=2 sp=false", "dp=2", *_GRAPHS, "pp=2")
_CUT = f"{FP8_TOY} numerics.context_shards=2"
FP8 = {
    "tensorwise": (f"{FP8_TOY} {_TENSORWISE}", _EVERY),
    "blockwise": (f"{FP8_TOY} {_BLOCKWISE}", ("tp=1", "tp=2", "tp=2 sp=false", *_GRAPHS)),
    "fp8-context": (f"{_CUT} seq=256 {_TENSORWISE}", ("cp=1", "cp=2", "cp=1 cuda_graph=full")),
    "fp8-context-blockwise": (f"{_CUT} seq=256 {_BLOCKWISE}", ("cp=1", "cp=2")),
    "mxfp8": (f"{FP8_TOY} {_BY_32}", _EVERY),
    "context-mxfp8": (f"{_CUT} {_BY_32}", ("cp=1", "cp=2", "cp=1 cuda_graph=full")),
    "experts-mxfp8": (f"{FP8_EXPERTS} {_BY_32}", _EP),
    "latent-mxfp8": (f"{FP8_LATENT} {_BY_32}", _EP),
    "portable-mxfp8": (f"{FP8_TOY} numerics=portable {_BY_32}", _TWO),
    "fp8-experts": (f"{FP8_EXPERTS} {_TENSORWISE}", _EP),
    "fp8-experts-blockwise": (f"{FP8_EXPERTS} {_BLOCKWISE}", _EP),
    "fp8-latent": (f"{FP8_LATENT} {_TENSORWISE}", _EP),
    "fp8-latent-blockwise": (f"{FP8_LATENT} {_BLOCKWISE}", _EP),
    "fp8-hybrid": (f"{FP8_HYBRID} {_NAMED}", _EP),
    "sides of 16": (f"{FP8_TOY} model.hidden_size=208 model.ffn_hidden_size=416 {_TENSORWISE}", _TWO),
    "fp8-portable": (f"{FP8_TOY} numerics=portable {_TENSORWISE}", _TWO),
    "named": (f"{FP8_TOY} model.num_layers=4 {_NAMED}", _TWO),
}
# Two steps of a real model, whose certificate a CPU or another GPU has made.
REAL = "qwen3_0p6b tp=1 seq=128 gbs=1 iters=2 numerics=portable precision=fp8_tensorwise ledger.state_digests=1"
CERTIFIED = sorted((Path(__file__).parents[1] / "certificates" / "large").glob("qwen3_0p6b_fp8-*.tpicert"))

_SMALL = "gbs=2 iters=3 seq=128 numerics.virtual_shards=2 model.kv_channels=32"
_NEXT = f"qwen3_next_toy {_SMALL} iters=6 numerics.virtual_shards=4 model.mtp_num_layers=null"
MODELS = {
    "gemma3": f"gemma3_toy {_SMALL}",
    "gpt": f"qwen3_toy {_SMALL} model.normalization=LayerNorm model.layernorm_zero_centered_gamma=true "
    "model.qk_layernorm=false model.position_embedding_type=learned_absolute model.gated_linear_unit=false "
    "model.activation_func=torch.nn.functional.gelu model.add_bias_linear=true model.bias_activation_fusion=false",
    "olmoe": f"olmoe_toy {_SMALL}",
    "z-loss": f"qwen3_moe_toy {_SMALL} model.moe_z_loss_coeff=0.01",
    "qwen3_next": f"qwen3_next_toy {_SMALL} numerics.virtual_shards=4 numerics.data_shards=2",
    "super": "nemotron3_nano_0p1b gbs=2 iters=3 seq=128 numerics.virtual_shards=2 model.hybrid_layer_pattern=ME*E "
    "model.moe_latent_size=128 model.mtp_num_layers=2 model.mtp_use_repeated_layer=true "
    "model.mtp_hybrid_override_pattern=*E",
}
# Families, and models with gated delta nets in a kind of CUDA graphs.
FAMILIES = {family: (words, ("tp=1", "tp=2", "dp=2")) for family, words in MODELS.items()} | {
    "next-experts": (
        f"{_NEXT} model.moe_router_load_balancing_type=aux_loss cuda_graph=off",
        ("tp=1", "tp=1 cuda_graph=te", "tp=2 cuda_graph=full", "tp=2 ep=2 cuda_graph=full"),
    ),
    "next-full": (
        f"{_NEXT} model.num_moe_experts=null model.moe_ffn_hidden_size=null "
        "model.moe_shared_expert_intermediate_size=null cuda_graph=off",
        ("tp=1", "tp=1 cuda_graph=full"),
    ),
}
SUITES = {"layouts": LAYOUTS, "fp8": FP8, "families": FAMILIES}
GROUPS = {group: row for suite in SUITES.values() for group, row in suite.items()}

# Groups with graphs whose first step lacks slots for experts, and is computed again.
VOID = {
    "graphs-experts": "tp=2 ep=2 cuda_graph=full",
    "graphs-experts-data": f"dp=2 ep=2 cuda_graph=full {OVERLAP}",
    "latent": "tp=2 ep=2 cuda_graph=full",
}
AGAIN = "a step needs more slots for experts than its CUDA graph has"
# Groups that begin with the weights of a run that saves.
BEGIN = {"adapters": "dense tp=1", "adapters-data": "dense tp=1"}
# Transformer Engine's scales of several ranks need NCCL, so two GPUs; on one, a micro-batch of two shares its scales.
_OTHER = "tp=2" if GPUS > 1 else "mbs=2"
# The control: a group, and a layout that has other bits than tp=1 with stock numerics, from equal weights.
CONTROLS = {
    "layouts": (
        ("dense", "tp=2"),
        ("dense", "pp=2"),
        ("dense", "dp=2"),
        ("experts", "tp=2 ep=2"),
        ("adapters", "tp=2"),
    ),
    "fp8": (("tensorwise", _OTHER), ("blockwise", _OTHER)),
}
# A run that saves at its second step, and the layout in which another goes on from there.
RESUMED = {"dense tp=2": "tp=1", "dense tp=1": "tp=2", "dense pp=2": "tp=2 pp=1", "dense tp=2 pp=2": "tp=1 pp=1"}
# Runs whose last weights both numerics read.
READ = ("dense tp=1", "stock dense tp=1")


def _run(name, words, **fields):
    return Run(folder_of(name), words, gpus_for(words), **fields)


def _stock(family):
    """Stock; of gated delta nets other shards, which are other sums: stock needs a package that tpi lacks."""
    return "numerics.virtual_shards=2" if family == "qwen3_next" else STOCK


def runs_of(suite):
    """Every run of a suite, with the group whose tests read it."""
    for group, (fixed, layouts) in SUITES[suite].items():
        after = (folder_of(BEGIN[group]),) if group in BEGIN else ()
        for layout in layouts:
            yield group, _run(f"{group} {layout}", f"{fixed} {layout}", after=after)
    for group, layout in dict.fromkeys((g, at) for g, other in CONTROLS.get(suite, ()) for at in ("tp=1", other)):
        after = (folder_of(BEGIN[group]),) if group in BEGIN else ()
        fixed = GROUPS[group][0].replace("numerics.virtual_shards=2", "")
        yield group, _run(f"stock {group} {layout}", f"{fixed} {STOCK} {layout}", after=after)
    if suite == "fp8":
        yield from ((None, _run("bf16 tp=1", f"{FP8_TOY} precision=bf16 tp=1")), (None, _run("real", REAL)))
    if suite == "families":
        for family, words in MODELS.items():
            yield family, _run(f"stock {family}", f"{words} {_stock(family)} tp=1")
    if suite != "layouts":
        return
    for group, layout in VOID.items():
        yield group, _run(f"void {group}", f"{GROUPS[group][0]} {layout}", margin=0.4)
    for saved, layout in RESUMED.items():
        going_on = f"{layout} checkpoint.ckpt_step=2"
        yield "dense", _run(f"{saved} to {layout}", going_on, after=(folder_of(saved),), resumes=folder_of(saved))
    for saved in READ:
        for numerics in ("stock", "tree"):
            start = f"checkpoint.pretrained_checkpoint={folder_of(saved)}/checkpoints"
            reading = f"{TOY} iters=1 numerics={numerics} {start}"
            yield "dense", _run(f"{saved} read by {numerics}", reading, after=(folder_of(saved),))


def chosen_runs(suite, tests):
    """The runs that the chosen tests read, so that `pytest -k graphs` trains no others."""
    wanted, begun = set(), {group: name.split()[0] for group, name in BEGIN.items()}
    for test in tests:
        read = test.callspec.params if hasattr(test, "callspec") else {}
        if not read.keys() & {"group", "family", "saved"}:
            return [run for _, run in runs_of(suite)]
        wanted.add(read.get("group") or read.get("family") or "dense")
    wanted |= {begun[group] for group in wanted & begun.keys()}
    return [run for group, run in runs_of(suite) if group in wanted]


@pytest.fixture(scope="module")
def suites(request, tmp_path_factory):
    """A suite's runs, trained when a test asks for the first of them."""
    tests = [test for test in request.session.items if test.module is request.module]
    return functools.cache(
        lambda suite: Trained.where_they_fit(tmp_path_factory.mktemp(suite), chosen_runs(suite, tests))
    )


@pytest.fixture
def trained(suites):
    return suites("layouts")


def rows(choose):
    return [
        pytest.param(suite, *row, marks=[several] * (suite == "layouts"))
        for suite, groups in SUITES.items()
        for row in choose(suite, groups)
    ]


@pytest.mark.parametrize(
    "suite, group, layout",
    rows(lambda suite, groups: ((group, layout) for group, (_, all_of) in groups.items() for layout in all_of[1:])),
)
def test_one_ledger_for_all_layouts(suites, suite, group, layout):
    fixed, layouts = GROUPS[group]
    (header, steps), (other, its) = (suites(suite).ledger(f"{group} {at}") for at in (layouts[0], layout))
    assert header.initial
    assert header.initial == other.initial
    assert header.device.get("product") == definition(header.numerics["mode"], "gpu")
    if suite == "fp8":
        assert header.device["fp8"] == other.device["fp8"] == (MXFP8 if "mxfp8" in group else DEFINITION)
    assert len(steps) == int(re.findall(r"iters=(\d+)", fixed)[-1])
    assert unequal(steps, its) == []


@several
@pytest.mark.parametrize("group", VOID)
def test_a_step_that_lacks_slots_is_computed_again(trained, group):
    first = GROUPS[group][1][0]
    assert AGAIN in (trained(folder_of(f"void {group}")) / "logs" / "rank-0.log").read_text()
    assert unequal(trained.ledger(f"{group} {first}")[1], trained.ledger(f"void {group}")[1]) == []


@pytest.mark.parametrize("suite, group, layout", rows(lambda suite, groups: CONTROLS.get(suite, ())))
def test_stock_has_several(suites, suite, group, layout):
    trained = suites(suite)
    (header, steps), (other, its) = (trained.ledger(f"stock {group} {layouts}") for layouts in ("tp=1", layout))
    assert header.initial
    assert header.initial == other.initial
    assert steps[0].gradients != its[0].gradients
    if suite == "layouts":
        assert header.initial == trained.ledger(f"{group} tp=1")[0].initial
        assert steps[-1].masters
        assert steps[-1].masters != its[-1].masters


@several
@pytest.mark.parametrize("saved", RESUMED)
def test_a_run_goes_on_in_another_layout(trained, saved):
    """With its optimizer's state: the steps after the checkpoint are those of the run that was never interrupted."""
    resumed = f"{saved} to {RESUMED[saved]}"
    steps = trained.ledger(resumed)[1]
    assert (trained.folder / folder_of(resumed) / "ledger.replaced-1.jsonl").exists()
    assert unequal(steps, trained.ledger("dense tp=1")[1]) == []


@several
@pytest.mark.parametrize("saved", READ)
def test_checkpoints_move_both_ways(trained, saved):
    """Weights saved under one numerics are read under the other: the first loss hardly moves."""
    names = (f"{saved} read by stock", f"{saved} read by tree", "dense tp=1")
    stock, tree, drawn = (bits_float(trained.ledger(name)[1][0].loss) for name in names)
    assert stock == pytest.approx(tree, rel=1e-3)
    assert stock != pytest.approx(drawn, rel=1e-3)  # the loss of weights that were not read


def test_precisions_differ(suites):
    kinds = ("bf16", "tensorwise", "blockwise", "mxfp8")
    assert len({str(suites("fp8").ledger(f"{kind} tp=1")[1][0].gradients) for kind in kinds}) == 4


def test_a_real_model_has_the_bits_of_its_certificates(suites):
    header, steps = suites("fp8").ledger("real")
    assert CERTIFIED
    for file in CERTIFIED:
        certified = read(file)
        assert certified.header.identity_hash == header.identity_hash
        assert len(steps) == 2
        assert unequal(steps, list(certified.steps)) == []


@pytest.mark.parametrize("family", MODELS)
def test_a_familys_model_is_bridges(suites, family):
    """Stock's layers compute the same to rounding, and other bits."""
    tree, stock = (suites("families").ledger(name)[1][0] for name in (f"{family} tp=1", f"stock {family}"))
    assert bits_float(tree.loss) == pytest.approx(bits_float(stock.loss), rel=2e-3)
    assert tree.gradients != stock.gradients
