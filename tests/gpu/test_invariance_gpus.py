"""On two to eight GPUs: one ledger for all layouts with invariant numerics, several with stock, and from one checkpoint
of a run to another layout or numerics.

All runs are trained first, side by side (side_by_side.py). Rows that need more GPUs than there are, are skipped.
"""

import re

import pytest
import torch

from tests.distributed.scenario import STOCK, unequal
from tests.gpu.side_by_side import EXPERTS as SMALL_EXPERTS
from tests.gpu.side_by_side import Run, Trained, folder_of, gpus_for
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.numerics.mode import definition

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(900),
]

TOY = "qwen3_toy mbs=2 gbs=8"
FOUR = "iters=4 save=2"
EXPERTS = f"{SMALL_EXPERTS} iters=4 gbs=4"
# The latents and heads of the whole model, which the kernels of attention take.
LATENT = (
    "deepseek_v3_toy seq=2048 model.kv_lora_rank=512 model.qk_head_dim=128 model.qk_pos_emb_head_dim=64 "
    "model.v_head_dim=128"
)
RECOMPUTE = "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1"
BIASES = "model.add_bias_linear=true model.add_qkv_bias=true"
INTERLEAVED = "model.virtual_pipeline_model_parallel_size=2"
UNEVEN = "model.num_layers_in_first_pipeline_stage=1"
PLAIN_OPTIMIZER = "optimizer.use_distributed_optimizer=false"

OVERLAP = (
    "ddp.overlap_grad_reduce=true ddp.bucket_size=100000 ddp.overlap_param_gather=true "
    "optimizer.overlap_param_gather=true"
)
ADAPTERS = f"{TOY} iters=4 peft=lora peft.dim=8 checkpoint.pretrained_checkpoint=dense-tp1/checkpoints"

MUON = f"optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated {PLAIN_OPTIMIZER} ledger.state_digests=1"
LAYER_WISE = "optimizer.use_layer_wise_distributed_optimizer=true"

# What is held fixed, and the layouts that must agree with the first, with digests of all gradients and weights.
GROUPS = {
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
        tuple(f"{layout} cuda_graph={kind}" for layout in ("tp=1", "tp=2 ep=2") for kind in ("off", "te", "full")),
    ),
    "graphs-experts-data": (
        EXPERTS.replace("iters=4", "iters=8") + " numerics.data_shards=4 model.moe_expert_capacity_factor=1.0",
        ("dp=1", *(f"dp=2 ep=2 cuda_graph={kind}" for kind in ("off", "te", "full"))),
    ),
    "graphs-hybrid": (
        "nemotron3_nano_0p1b iters=8 gbs=2 seq=128",
        ("tp=1", "tp=1 cuda_graph=te", "tp=2 ep=2 cuda_graph=te", "tp=2 ep=2 cuda_graph=full"),
    ),
    "latent": (
        "moonlight_1b iters=8 gbs=2",
        ("tp=1", "tp=2", "tp=2 ep=2", "pp=2", "tp=1 cuda_graph=te", "tp=2 ep=2 cuda_graph=full"),
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
# Groups that begin with the weights of a run that saves.
BEGIN = {"adapters": "dense tp=1", "adapters-data": "dense tp=1"}
# The control: a group, and a layout that has other bits than tp=1 with stock numerics, from equal weights.
CONTROLS = (("dense", "tp=2"), ("dense", "pp=2"), ("dense", "dp=2"), ("experts", "tp=2 ep=2"), ("adapters", "tp=2"))
# A run that saves at its second step, and the layout in which another goes on from there.
RESUMED = {"dense tp=2": "tp=1", "dense tp=1": "tp=2", "dense pp=2": "tp=2 pp=1", "dense tp=2 pp=2": "tp=1 pp=1"}
# Runs whose last weights both numerics read.
READ = ("dense tp=1", "stock dense tp=1")


def all_runs():
    """Every run of this file."""
    words = {
        f"{group} {layout}": (f"{fixed} {layout}", group)
        for group, (fixed, layouts) in GROUPS.items()
        for layout in layouts
    }
    words |= {
        f"stock {group} {layout}": (f"{GROUPS[group][0]} {STOCK} {layout}", group)
        for group, other in CONTROLS
        for layout in ("tp=1", other)
    }
    results = []
    for name, (source, group) in words.items():
        after = (folder_of(BEGIN[group]),) if group in BEGIN else ()
        results.append(_run(name, source, after=after))
    for saved, layout in RESUMED.items():
        going_on = f"{layout} checkpoint.ckpt_step=2"
        results.append(_run(f"{saved} to {layout}", going_on, after=(folder_of(saved),), resumes=folder_of(saved)))
    for saved in READ:
        for numerics in ("stock", "tree"):
            start = f"checkpoint.pretrained_checkpoint={folder_of(saved)}/checkpoints"
            reading = f"{TOY} iters=1 numerics={numerics} {start}"
            results.append(_run(f"{saved} read by {numerics}", reading, after=(folder_of(saved),)))
    return results


def _run(name, words, **fields):
    return Run(folder_of(name), words, gpus_for(words), **fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return Trained.where_they_fit(tmp_path_factory.mktemp("runs"), all_runs())


@pytest.mark.parametrize(
    "group, layout", [(group, layout) for group, (_, layouts) in GROUPS.items() for layout in layouts[1:]]
)
def test_one_ledger_for_all_layouts(trained, group, layout):
    (header, steps), (other, its) = (trained.ledger(f"{group} {layouts}") for layouts in (GROUPS[group][1][0], layout))
    assert header.initial
    assert header.device.get("product") == definition(header.numerics["mode"], "gpu")
    assert header.initial == other.initial
    assert len(steps) == int(re.search(r"iters=(\d+)", GROUPS[group][0])[1])
    assert unequal(steps, its) == []


@pytest.mark.parametrize("group, layout", CONTROLS)
def test_stock_has_several(trained, group, layout):
    (header, steps), (other, its) = (trained.ledger(f"stock {group} {layouts}") for layouts in ("tp=1", layout))
    assert header.initial
    assert header.initial == other.initial == trained.ledger(f"{group} tp=1")[0].initial
    assert steps[0].gradients != its[0].gradients
    assert steps[-1].masters
    assert steps[-1].masters != its[-1].masters


@pytest.mark.parametrize("saved", RESUMED)
def test_a_run_goes_on_in_another_layout(trained, saved):
    """With its optimizer's state: the steps after the checkpoint are those of the run that was never interrupted."""
    resumed = f"{saved} to {RESUMED[saved]}"
    steps = trained.ledger(resumed)[1]
    assert (trained.folder / folder_of(resumed) / "ledger.replaced-1.jsonl").exists()
    assert unequal(steps, trained.ledger("dense tp=1")[1]) == []


@pytest.mark.parametrize("saved", READ)
def test_checkpoints_move_both_ways(trained, saved):
    """Weights saved under one numerics are read under the other: the first loss hardly moves."""
    names = (f"{saved} read by stock", f"{saved} read by tree", "dense tp=1")
    stock, tree, drawn = (bits_float(trained.ledger(name)[1][0].loss) for name in names)
    assert stock == pytest.approx(tree, rel=1e-3)
    assert stock != pytest.approx(drawn, rel=1e-3)  # the loss of weights that were not read
