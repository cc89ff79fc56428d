"""FP8 on one GPU and more: one ledger for all layouts and graphs, stock FP8 has several.

Two ranks share a GPU, by Gloo, where there is one (side_by_side.py).
"""

import re
from pathlib import Path

import pytest
import torch

from tests.distributed.layouts import test_fp8
from tests.distributed.scenario import STOCK, unequal
from tests.gpu import side_by_side
from tests.gpu.side_by_side import Run, Trained, folder_of, gpus_for, marks
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.numerics.precision import DEFINITION, MXFP8

pytestmark = marks()

TOY = f"{test_fp8.SMALL} iters=8"
EXPERTS = f"{side_by_side.EXPERTS} iters=4 gbs=2 numerics.virtual_shards=2"
LATENT = f"{test_fp8.LATENT} iters=4"
HYBRID = f"{test_fp8.HYBRID} iters=4 model.hidden_size=208 model.mamba_head_dim=64"
# What is held fixed -> layouts that must agree.
GROUPS = {
    "tensorwise": (
        f"{TOY} precision=fp8_tensorwise",
        ("tp=1", "tp=2", "tp=2 sp=false", "dp=2", "tp=1 cuda_graph=full", "tp=1 cuda_graph=te", "pp=2"),
    ),
    "blockwise": (
        f"{TOY} precision=fp8_blockwise",
        ("tp=1", "tp=2", "tp=2 sp=false", "tp=1 cuda_graph=full", "tp=1 cuda_graph=te"),
    ),
    "context": (
        f"{TOY} seq=256 numerics.context_shards=2 precision=fp8_tensorwise",
        ("cp=1", "cp=2", "cp=1 cuda_graph=full"),
    ),
    "context-blockwise": (f"{TOY} seq=256 numerics.context_shards=2 precision=fp8_blockwise", ("cp=1", "cp=2")),
    "mxfp8": (
        f"{TOY} precision=mxfp8",
        ("tp=1", "tp=2", "tp=2 sp=false", "dp=2", "tp=1 cuda_graph=full", "tp=1 cuda_graph=te", "pp=2"),
    ),
    "context-mxfp8": (f"{TOY} numerics.context_shards=2 precision=mxfp8", ("cp=1", "cp=2", "cp=1 cuda_graph=full")),
    "experts-mxfp8": (f"{EXPERTS} precision=mxfp8", ("tp=1", "tp=2 ep=2")),
    "latent-mxfp8": (f"{LATENT} precision=mxfp8", ("tp=1", "tp=2 ep=2")),
    "portable-mxfp8": (f"{TOY} numerics=portable precision=mxfp8", ("tp=1", "tp=2")),
    "experts": (f"{EXPERTS} precision=fp8_tensorwise", ("tp=1", "tp=2 ep=2")),
    "experts-blockwise": (f"{EXPERTS} precision=fp8_blockwise", ("tp=1", "tp=2 ep=2")),
    "latent": (f"{LATENT} precision=fp8_tensorwise", ("tp=1", "tp=2 ep=2")),
    "latent-blockwise": (f"{LATENT} precision=fp8_blockwise", ("tp=1", "tp=2 ep=2")),
    "hybrid": (f"{HYBRID} mixed_precision=bf16_with_fp8_current_scaling_mixed", ("tp=1", "tp=2 ep=2")),
    "sides of 16": (
        f"{TOY} model.hidden_size=208 model.ffn_hidden_size=416 precision=fp8_tensorwise",
        ("tp=1", "tp=2"),
    ),
    "portable": (f"{TOY} numerics=portable precision=fp8_tensorwise", ("tp=1", "tp=2")),
    "named": (
        f"{TOY} model.num_layers=4 mixed_precision=bf16_with_fp8_current_scaling_mixed",
        ("tp=1", "tp=2"),
    ),
}
# Two steps of a real model, whose certificate a CPU or another GPU has made.
REAL = "qwen3_0p6b tp=1 seq=128 gbs=1 iters=2 numerics=portable precision=fp8_tensorwise ledger.state_digests=1"
CERTIFIED = sorted((Path(__file__).parents[1] / "certificates" / "large").glob("qwen3_0p6b_fp8-*.tpicert"))
CONTROLS = ("tensorwise", "blockwise")
# Transformer Engine's scales of several ranks need NCCL, so two GPUs; on one, a micro-batch of two shares its scales.
STOCK_LAYOUTS = ("tp=1", "tp=2" if torch.cuda.device_count() > 1 else "mbs=2")


def all_runs():
    """Every run of this file."""
    words = {
        f"{group} {layout}": f"{fixed} {layout}" for group, (fixed, layouts) in GROUPS.items() for layout in layouts
    }
    words |= {
        f"stock {group} {tp}": f"{TOY.partition(' numerics.')[0]} precision=fp8_{group} {STOCK} {tp}"
        for group in CONTROLS
        for tp in STOCK_LAYOUTS
    }
    words["bf16 tp=1"] = f"{TOY} precision=bf16 tp=1"
    words["real"] = REAL
    return [Run(folder_of(name), text, gpus_for(text)) for name, text in words.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return Trained.where_they_fit(tmp_path_factory.mktemp("fp8"), all_runs())


@pytest.mark.parametrize(
    "group, layout", [(group, layout) for group, (_, layouts) in GROUPS.items() for layout in layouts[1:]]
)
def test_one_ledger_for_all_layouts(trained, group, layout):
    (header, steps), (other, its) = (trained.ledger(f"{group} {layouts}") for layouts in (GROUPS[group][1][0], layout))
    assert header.initial
    assert header.initial == other.initial
    assert header.device["fp8"] == other.device["fp8"] == (MXFP8 if "mxfp8" in group else DEFINITION)
    assert len(steps) == int(re.findall(r"iters=(\d+)", GROUPS[group][0])[-1])
    assert unequal(steps, its) == []


@pytest.mark.parametrize("group", CONTROLS)
def test_stock_fp8_has_several(trained, group):
    (header, steps), (other, its) = (trained.ledger(f"stock {group} {layouts}") for layouts in STOCK_LAYOUTS)
    assert header.initial
    assert header.initial == other.initial
    assert steps[0].gradients != its[0].gradients


def test_precisions_differ(trained):
    kinds = ("bf16", "tensorwise", "blockwise", "mxfp8")
    assert len({str(trained.ledger(f"{kind} tp=1")[1][0].gradients) for kind in kinds}) == 4


def test_a_real_model_has_the_bits_of_its_certificates(trained):
    header, steps = trained.ledger("real")
    assert CERTIFIED
    for file in CERTIFIED:
        certified = read(file)
        assert certified.header.identity_hash == header.identity_hash
        assert len(steps) == 2
        assert unequal(steps, list(certified.steps)) == []
