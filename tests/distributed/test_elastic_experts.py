"""A model with experts goes on between one rank and several, with the bits of the run that nothing interrupted."""

import pytest

from tests.distributed.small_models import small
from tests.ledgers import steps

RUN = ("train", *small("qwen3_moe_toy").split(), "iters=6", "save=2")


@pytest.mark.release  # in `make test`: test_elastic.py, dense
@pytest.mark.parametrize("distributed", ("true", "false"))
def test_experts_go_on_with_one_rank_and_with_several_again(tpi, distributed):
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
