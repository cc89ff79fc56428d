# SPDX-License-Identifier: Apache-2.0
"""Trainings under Megatron-FSDP: their ledgers, and the digests of what the ranks hold in shards."""

import json
import shutil

import pytest
import torch

from tests.distributed.commands.test_digests import digest_of
from tests.distributed.small_models import DENSE, small
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.settings.run_config import STRATEGIES

RUN = "gbs=4 iters=2 numerics=deterministic ledger.state_digests=1"
SHARDED = "ddp.use_megatron_fsdp=true ddp.data_parallel_sharding_strategy="
KINDS = ("gradients", "clipped", "moments", "masters", "weights")


def _digests(scenario):
    return [{kind: getattr(step, kind) for kind in KINDS} for step in scenario.ledger()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", (DENSE, f"{DENSE} tp=2", small("qwen3_moe_toy")), ids=("dense", "tp", "experts"))
def test_one_data_parallel_rank_has_the_ledger_of_ddp(scenario, run, strategy):
    """Stock computes the same there; in bf16, which FSDP adds gradients in by default, it does not."""
    ddp, fsdp = scenario(run, RUN), scenario(run, RUN, f"{SHARDED}{strategy}")
    assert fsdp.header().parameters == ddp.header().parameters
    ddp.compared(fsdp, status=0)
    assert _digests(fsdp) == _digests(ddp)
    if (run, strategy) == (DENSE, "optim"):
        rounded = scenario(run, RUN, f"{SHARDED}{strategy}", "ddp.megatron_fsdp_main_grads_dtype=null")
        assert rounded.header().parameters != ddp.header().parameters
        assert rounded.ledger()[0].grad_norm != ddp.ledger()[0].grad_norm


MORE = (
    "precision=fp32", "model.mtp_num_layers=1", "model.share_embeddings_and_output_weights=true",
    "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",
    "validation.eval_iters=1 validation.eval_interval=1",
)  # fmt: skip


@pytest.mark.release
@pytest.mark.parametrize("option", MORE)
def test_other_options_have_the_ledger_of_ddp(scenario, option):
    ddp, fsdp = scenario(DENSE, RUN, option), scenario(DENSE, RUN, option, f"{SHARDED}optim_grads_params")
    ddp.compared(fsdp, status=0)
    assert _digests(fsdp) == _digests(ddp)


def test_several_ranks_add_as_ddp_does_where_gradients_are_added_once(scenario):
    """With sharded gradients each micro-batch is summed over ranks, and then added."""
    ddp = scenario("qwen3_toy", RUN, "dp=2")
    for strategy, alike in zip(STRATEGIES, (True, True, False, False), strict=True):
        first, other = (run.ledger()[0] for run in (ddp, scenario("qwen3_toy", RUN, f"{SHARDED}{strategy} dp=2")))
        assert (first.gradients == other.gradients) == alike, strategy


FLIPPED = "decoder.layers.0.self_attention.linear_qkv.weight"


def _gathered(folder, *, flip):
    """Write digests of what Megatron gathers of the shards. flip: one bit of a master weight before, on rank 1."""

    def plant():
        import torch.distributed as dist
        from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

        from tp_invariant_recipes.observe.digests.callback import Digests

        original = Digests.finish

        def gathered(dtensor, local):
            """Megatron says in a DTensor where its part begins."""
            update_uneven_dtensor_chunk_metadata(dtensor)
            (chunk,) = dtensor.__create_chunk_list__()
            whole, parts = torch.zeros(dtensor.shape), [None] * dist.get_world_size()
            dist.all_gather_object(parts, (tuple(chunk.offsets), None if local is None else local.to_local().detach()))
            for offsets, part in parts:
                if part is not None and part.numel():
                    whole[offsets[0] : offsets[0] + len(part)] = part
            return digest_of(whole)

        def finish(self):
            whole, names = {kind: {} for kind in ("masters", "clipped", "moments")}, {}
            names |= {part.owner: part.name for part in self.plan.shards.parts}
            for slot in self.plan.optimizer.slots:
                name, state = names[slot.owner], slot.wrapped.state.get(slot.updated, {})
                if flip and name == FLIPPED and dist.get_rank() == 1:
                    slot.updated.to_local().detach().view(-1).view(torch.int32)[-1] ^= 1 << 16
                whole["masters"][name] = gathered(slot.updated, slot.updated)
                whole["clipped"][name] = gathered(slot.updated, slot.updated.grad)
                for moment in ("exp_avg", "exp_avg_sq"):
                    whole["moments"][f"{moment}/{name}"] = gathered(slot.updated, state.get(moment))
            if dist.get_rank() == 0:
                folder.write_text(json.dumps(whole))
            original(self)

        Digests.finish = finish

    return plant


@pytest.mark.parametrize("strategy", ("optim", "optim_grads_params"))
@pytest.mark.parametrize("flip", (False, True), ids=("as it is", "one bit flipped"))
def test_digests_of_the_union_are_those_of_gathered_tensors(tpi, strategy, flip):
    model = f"{DENSE} dp=2 {RUN} iters=1 {SHARDED}{strategy}"
    file = tpi.folder / "gathered.json"
    done = tpi("train", *model.split(), "run.dir=run", before=_gathered(file, flip=flip), status=0)
    (step,), whole = read(tpi.folder / "run").steps, json.loads(file.read_text())
    named = {name: digest for name, digest in step.moments.items() if not name.startswith("step/")}
    assert whole == {"masters": step.masters, "clipped": step.clipped, "moments": named}
    (copied,) = step.diverged or ((),)
    assert copied == (("copies", FLIPPED, ((1,),)) if flip else ()), done.stderr


SAVED = f"{DENSE} {RUN} scheduler.lr_decay_iters=4 save=2 dp=2"


def test_a_run_resumes_from_shards_under_any_strategy_that_can_save_and_not_without_fsdp(tpi):
    whole, half = "optim_grads_params", "optim"
    tpi("train", *f"{SAVED} iters=4 {SHARDED}{whole} run.dir=whole".split(), status=0)
    tpi("train", *f"{SAVED} {SHARDED}{whole} run.dir=run".split(), status=0)
    for name in ("other", "ddp", "lost"):
        shutil.copytree(tpi.folder / "run", tpi.folder / name)
    tpi("train", "--resume", "run", "iters=4", status=0)
    tpi("compare", "whole", "run", status=0)
    # The digests of what is loaded are those of the ledger, or the run would end.
    tpi("train", "--resume", "other", "iters=4", f"ddp.data_parallel_sharding_strategy={half}", status=0)
    refused = tpi("train", "--resume", "ddp", "iters=4", "ddp.use_megatron_fsdp=false", status=2)
    assert "it holds DTensors of Megatron-FSDP; ddp.use_megatron_fsdp=true" in refused.stderr
    (tpi.folder / "lost/checkpoints/iter_0000002/__1_0.distcp").unlink()
    refused = tpi("train", "--resume", "lost", "iters=4", status=2)
    assert "__1_0.distcp is missing" in refused.stderr


def test_a_checkpoint_without_shards_is_not_read_under_fsdp(tpi):
    tpi("train", *SAVED.split(), "run.dir=run", status=0)
    refused = tpi("train", "--resume", "run", "iters=4", *f"{SHARDED}optim".split(), status=2)
    assert "it holds no DTensors of Megatron-FSDP; ddp.use_megatron_fsdp=false" in refused.stderr


@pytest.mark.release
def test_an_invariant_run_resumes_on_other_ranks_and_has_the_ledger_of_ddp(tpi):
    words = f"{DENSE} gbs=4 numerics.data_shards=4 scheduler.lr_decay_iters=6 validation.eval_iters=1"
    tpi("train", *f"{words} iters=6 run.dir=ddp".split(), status=0)
    tpi("train", *f"{words} iters=2 save=2 dp=2 {SHARDED}optim_grads_params run.dir=run".split(), status=0)
    tpi("train", "--resume", "run", "iters=4", "dp=4", status=0)
    tpi("train", "--resume", "run", "iters=6", "dp=2", "ddp.data_parallel_sharding_strategy=optim", status=0)
    tpi("compare", "ddp", "run", status=0)
