"""One ledger for every cp at a fixed number of context shards. In `make test`, with the control: test_invariance.py."""

import pytest

from tests.distributed.scenario import agree
from tests.distributed.small_models import BUCKETS, DISTRIBUTED, GATHER, small

FIXED = "iters=2 gbs=2 numerics.data_shards=2 numerics.context_shards=2 validation.eval_iters=1"
UNTIED = "model.share_embeddings_and_output_weights=false"

pytestmark = [pytest.mark.release, pytest.mark.timeout(2400)]

# Layouts that have one ledger; the first is one rank.
LAYOUTS = (
    "", "cp=2", "cp=2 mbs=2", "cp=4", f"cp=4 tp=2 {DISTRIBUTED}", "tp=2", "tp=2 cp=2", "tp=4 cp=2",
    "tp=2 cp=2 sp=false", f"dp=2 cp=2 {BUCKETS}", f"dp=2 cp=2 {GATHER}", f"tp=2 dp=4 {GATHER}", "pp=2 cp=2",
    f"pp=2 cp=2 dp=2 {GATHER}",
)  # fmt: skip

# Of a model with experts: their owners take part of a tensor-parallel group, of a context-parallel one, and of both and
# data-parallel ranks.
EXPERTS = small("qwen3_moe_toy")
EXPERT_LAYOUTS = (
    "", f"cp=2 dp=2 ep=4 {GATHER}", "cp=2", "cp=2 ep=2", "tp=2", "tp=2 cp=2", "tp=2 cp=2 ep=2",
    f"tp=2 cp=2 ep=4 dp=2 {BUCKETS}", f"tp=2 cp=2 ep=8 dp=2 {GATHER}", f"dp=2 cp=2 ep=2 {DISTRIBUTED}",
    "pp=2 cp=2 ep=2",
)  # fmt: skip


@pytest.mark.parametrize("more", ("", UNTIED, "precision=fp32"))
def test_one_ledger_for_more_layouts(scenario, more):
    fixed = f"iters=3 gbs=8 model.num_layers=2 numerics.data_shards=4 numerics.context_shards=4 {more}"
    agree(scenario("qwen3_toy seq=64", fixed), LAYOUTS)


def test_one_ledger_for_experts(scenario):
    agree(scenario(EXPERTS, FIXED), EXPERT_LAYOUTS)
