"""A model with experts goes on between one rank and several, with the bits of the run that nothing interrupted."""

import pytest

from tests.distributed.small_models import MUON, small
from tests.ledgers import steps

RUN = ("train", *small("qwen3_moe_toy").split(), "iters=6", "save=2")


@pytest.mark.release  # in `make test`: test_elastic.py, dense
@pytest.mark.parametrize("distributed", ("true", "false"))
def test_experts_go_on_with_one_rank_and_with_several_afterwards(tpi, distributed):
    tpi(*RUN, "tp=2", "ep=2", f"optimizer.use_distributed_optimizer={distributed}", "run.dir=run", status=0)
    whole = steps(tpi.folder / "run")
    for start, layout in ((2, "tp=1 ep=1"), (4, "tp=2 ep=2")):
        tpi("train", "--resume", "run", *layout.split(), f"checkpoint.ckpt_step={start}", status=0)
        assert steps(tpi.folder / "run") == whole


@pytest.mark.release
def test_stock_experts_do_not(tpi):
    """Megatron's own: on one rank there is one optimizer."""
    tpi(*RUN, "tp=2", "ep=2", "numerics=stock", "run.dir=run", status=0)
    alone = tpi("train", "--resume", "run", "tp=1", "ep=1", "checkpoint.ckpt_step=2", status=2)
    assert "it holds the optimizer state of experts apart from all other state" in alone.stderr


@pytest.mark.release
@pytest.mark.parametrize("first, then", (("tp=2 ep=1", "ep=2"), ("tp=2 ep=2", "ep=1"), ("dp=4 ep=2", "dp=2")))
def test_ranks_of_experts_and_data_come_and_go(tpi, first, then):
    """Bridge looks for the random states of as many ranks as there are, and finds those of as many as there were."""
    tpi(*RUN, *first.split(), "iters=4", "gbs=4", "numerics.data_shards=4", "run.dir=run", status=0)
    whole = steps(tpi.folder / "run")
    tpi("train", "--resume", "run", *then.split(), "checkpoint.ckpt_step=2", status=0)
    assert steps(tpi.folder / "run") == whole


@pytest.mark.release
def test_stocks_bits_change_with_the_number_of_ranks(tpi):
    tpi(*RUN, "dp=4", "ep=2", "iters=4", "gbs=4", "numerics=stock", "run.dir=run", status=0)
    whole = steps(tpi.folder / "run")
    tpi("train", "--resume", "run", "dp=2", "checkpoint.ckpt_step=2", status=0)
    assert steps(tpi.folder / "run")[:2] == whole[:2]
    assert steps(tpi.folder / "run")[2:] != whole[2:]


# The first layer is dense, so that the first stage of two has no experts.
DENSE_FIRST = ("train", *small("deepseek_v3_toy").split(), "numerics.virtual_shards=4", "iters=2", "save=1")
DISTRIBUTED = "optimizer.use_distributed_optimizer=true"


@pytest.mark.release
@pytest.mark.parametrize(
    "more, first, layouts",
    (
        ("", "pp=2", ("pp=2",)),
        pytest.param("", "tp=2", ("pp=2 tp=1", "pp=2 dp=1"), marks=pytest.mark.release),
        pytest.param(DISTRIBUTED, "pp=2", ("pp=2", "pp=1 tp=2"), marks=pytest.mark.release),
        pytest.param("precision=fp32", "pp=2", ("pp=2", "pp=1"), marks=pytest.mark.release),
        pytest.param(MUON, "pp=2", ("pp=2", "pp=1"), marks=pytest.mark.release),
        pytest.param(
            "numerics=stock numerics.virtual_shards=null", "pp=2 ep=2 dp=2", ("pp=2",), marks=pytest.mark.release
        ),
    ),
)
def test_a_stage_without_experts_goes_on(tpi, more, first, layouts):
    tpi(*DENSE_FIRST, "gbs=2", *more.split(), *first.split(), "run.dir=run", status=0)
    whole = steps(tpi.folder / "run")
    for layout in layouts:
        tpi("train", "--resume", "run", *layout.split(), "checkpoint.ckpt_step=1", status=0)
        assert steps(tpi.folder / "run") == whole


@pytest.mark.release
def test_without_the_patch_it_does_not(tpi):
    tpi(*DENSE_FIRST, "pp=2", "patches.off=[core-empty-optimizer]", "run.dir=run", status=0)
    assert "Cannot merge" in tpi("train", "--resume", "run", "checkpoint.ckpt_step=1", status=2).stderr
