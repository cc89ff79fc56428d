# SPDX-License-Identifier: Apache-2.0
"""Broken hardware, planted: a run notices it, names it, and leaves evidence that another machine judges."""

import json
import os
import re
import time
from contextlib import suppress
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from tests.distributed.guard_faults import InTransit, Planted
from tests.distributed.layouts.rows import NEXT
from tests.distributed.ranks import on_ranks
from tests.distributed.scenario import unequal
from tests.distributed.small_models import RECOMPUTED, small
from tp_invariant_recipes.errors import HardwareFault
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.runs import checkpoints
from tp_invariant_recipes.runs.run_dir import RunDir

TINY = ("seq=32", "gbs=2", "model.num_layers=1", "model.vocab_size=512")
DENSE = ("qwen3_toy", *TINY)
EXPERTS = ("qwen3_moe_toy", *TINY, "model.hidden_size=64", "model.moe_ffn_hidden_size=64")
EVERY_STEP = ("guard=shadow", "guard.every=1")
# A run that several tests compare theirs with.
SOUND = (*DENSE, "iters=4", "numerics.data_shards=2", "ledger.state_digests=1")
ROUTED = " ".join(EXPERTS)
WIDE = "qwen3_toy seq=128 model.num_layers=1 model.vocab_size=512 numerics.virtual_shards=2"


def guard_message(tpi, fault, *words, run="run"):
    """The message of a run with a fault; None: it has not noticed."""
    ended = tpi("train", *words, f"run.dir={run}", before=fault.plant if fault else None)
    if ended.status == 0:
        return None
    assert ended.status == 2, ended.stderr
    return ended.stderr.partition("error: ")[2]


def files(tpi, run="run"):
    return sorted((tpi.folder / run / "guard").glob(f"*{evidence.SUFFIX}"))


def test_a_broken_product_ends_the_run_with_one_message_and_evidence(tpi, scenario):
    """Checkpoints of the last `guard.every` steps are set aside, and the run goes on from the one before."""
    words = (*SOUND, "save=1", "guard=products", "guard.products=32", "guard.every=2")
    message = guard_message(tpi, Planted("product", always=True, step=4, rank=0), *words)
    match = re.match(
        r"silent data corruption at step (\d+): (weight gradient|forward pass|input gradient) of ([\w.]+): ", message
    )
    assert match, message
    step = int(match[1])
    assert "1 bit of 1 of " in message
    assert re.search(r"\nrank 0 on \S+, a CPU ", message)
    run = RunDir(tpi.folder / "run")
    last = checkpoints.finished(run.checkpoints)[-1].step
    assert last == step - 1 - 2
    assert f"the last trusted checkpoint is of step {last}; tpi train --resume run goes on from it" in message
    assert (run.checkpoints / "set-aside" / f"iter_{last + 1:07d}").is_dir()
    assert checkpoints.unsettled(run) is None
    (file,) = files(tpi)
    assert "different: the recorded bits are wrong" in tpi("check", file, status=1).stdout
    recorded, _ = evidence.read(file)
    assert (recorded.step, recorded.trusted, recorded.suspects[0].rank) == (step, last, 0)
    tpi("train", "--resume", "run", status=0)
    assert unequal(list(read(tpi.folder / "run").steps), scenario(*SOUND).ledger()) == []


MOVED = (
    (f"{' '.join(DENSE)} tp=2", "_allgather_base", "all-gather over ranks 0, 1 in the forward pass of "),
    (f"{' '.join(DENSE)} tp=2", "alltoall_base", "all-to-all over ranks 0, 1 in the "),
    (f"{' '.join(DENSE)} dp=2", "alltoall_base", "all-to-all over ranks 0, 1: "),
    (f"{' '.join(DENSE)} pp=2 model.num_layers=2", "recv", "send over ranks 0, 1: "),
    (f"{ROUTED} ep=2 dp=2", "alltoall_base", "all-to-all over ranks 0, 1 in the forward pass of decoder.layers.0.mlp"),
)


@pytest.mark.parametrize(
    "words, method, where, fault",
    [
        pytest.param(*row, fault, marks=() if row is MOVED[3] and fault == "flip" else pytest.mark.release)
        for row in MOVED
        for fault in ("flip", "swap", "zeros", "stale")
    ],
)
def test_what_a_collective_changes_is_named(tpi, words, method, where, fault):
    """Of the second step of three. Of two partial sums that change places the step's result is the same."""
    planted = InTransit(method, fault)
    more = ("iters=3", "guard=products")
    message = guard_message(tpi, planted, *words.split(), *more, "guard.collectives=all")
    assert message is not None
    assert message.startswith(f"silent data corruption at step 2: {where}"), message
    assert ": sent by 0, received otherwise by 1: digests differ\none of these is wrong:\nrank 0 on " in message
    assert guard_message(tpi, planted, *words.split(), *more, "guard.collectives=off", run="control") is None


@pytest.mark.release
@pytest.mark.parametrize("always", (False, True))
@pytest.mark.parametrize("kernel", ("product", "contraction", "attention", "norm", "activation", "experts"))
def test_a_shadow_step_finds_a_fault_of_its_step(tpi, kernel, always):
    model = EXPERTS if kernel == "experts" else DENSE
    message = guard_message(tpi, Planted(kernel, always=always), *model, "dp=2", "iters=3", *EVERY_STEP)
    assert message.startswith("silent data corruption at step 2: ")
    assert re.search(r"^rank 1 on ", message, re.MULTILINE)
    assert "one of these is wrong" not in message
    proven = kernel in ("product", "contraction", "attention")
    assert ("at other offsets of the launches" in message) is (always and not proven)
    # A fault that comes again is sampled in the repetition, with operands; of any other the file has digests.
    tpi("check", files(tpi)[0], status=1 if always and kernel in ("product", "contraction") else 2)


@pytest.mark.release
def test_what_fails_at_every_place_names_both(tpi):
    """The control: no other place of a launch is sound."""
    message = guard_message(
        tpi, Planted("norm", always=True, element=0, width=1 << 20), *DENSE, "dp=2", "iters=2", *EVERY_STEP
    )
    assert "one of these is wrong:\nrank 0 on " in message
    assert "\nrank 1 on " in message


@pytest.mark.release
def test_a_third_replica_names_the_one_that_always_computes_wrong_bits(tpi):
    fault = Planted("norm", always=True, rank=2)
    message = guard_message(tpi, fault, *DENSE, "gbs=4", "dp=4", "iters=2", *EVERY_STEP)
    assert "one of these" not in message
    assert re.search(r"\nrank 2 on .*\njudged by a third replica", message)


def test_a_shadow_step_sees_faults_of_its_own_step_alone(tpi):
    """A fault of step 2 is the control: in step 1 attention would not repeat its bits when it is tried."""

    class TwoFaults:
        def plant(self) -> None:
            for step in (2, 3):
                Planted("attention", step=step).plant()

    message = guard_message(tpi, TwoFaults(), *DENSE, "dp=2", "iters=3", "guard=shadow", "guard.every=3")
    assert message.startswith("silent data corruption at step 3: ")
    assert re.search(r"\nrank 1 on .*\njudged by its own recomputation, ", message)
    assert "not comparable: nothing was computed again" in tpi("check", files(tpi)[0], status=2).stdout


@pytest.mark.release
@pytest.mark.parametrize("every, noticed", ((3, True), (4, False)))
def test_all_memory_is_looked_at_before_a_shadow_step(tpi, every, noticed):
    """Once, after step 2."""
    fault = Planted("memory", bit=3, width=4096)
    message = guard_message(tpi, fault, *DENSE, "dp=2", "iters=3", "guard=shadow", f"guard.every={every}")
    assert (message is not None) is noticed
    if noticed:
        assert "silent data corruption at step 2: " in message
        assert "changed in memory" in message


@pytest.mark.release
@pytest.mark.parametrize("kernel", ("adam", "moment", "all-gather", "memory"))
@pytest.mark.parametrize("numerics", ("tree", "portable"))
def test_weights_and_the_optimizers_state(tpi, portable_loops, kernel, numerics):
    words = (*DENSE, "seq=64", f"numerics={numerics}", "iters=60", "guard=products", "dp=2")
    message = guard_message(tpi, Planted(kernel, always=True, bit=3, width=4096), *words)
    what = {"adam": "update of ", "moment": "update of ", "all-gather": "weights of ", "memory": "changed in memory"}
    assert what[kernel] in message
    assert re.search(r"^rank 1 on ", message, re.MULTILINE)
    if kernel in ("adam", "moment"):
        tpi("check", files(tpi)[0], status=1)


@pytest.mark.release
@pytest.mark.parametrize("late", (0, 1))
def test_the_message_does_not_depend_on_whose_judge_is_faster(tpi, late):
    """Both ranks see that replicas differ, and rank 1 alone sees that its memory has changed."""

    def plant() -> None:
        from tp_invariant_recipes.features.guard import judge

        Planted("memory", always=True, bit=3, width=4096).plant()
        decided = judge._decided

        def decide(*case):
            finding = decided(*case)
            time.sleep(2 if finding and os.environ["RANK"] == str(late) else 0)
            return finding

        judge._decided = decide

    words = (*DENSE, "seq=64", "iters=60", "guard=products", "dp=2")
    message = guard_message(tpi, SimpleNamespace(plant=plant), *words)
    assert "changed in memory" in message
    assert "one of these" not in message
    assert [file.name.partition("-rank-")[2] for file in files(tpi)] == ["1.evidence"]


def endings(mesh, rows):
    """Of each row the message with which a run ends, and how many findings this rank reports."""
    from tp_invariant_recipes.features.guard import callback
    from tp_invariant_recipes.features.guard.judge import Judge, SilentDataCorruption

    def decide(finding, late):
        time.sleep(0.05 if late else 0)
        return finding

    results = []
    for late, (of_ranks, _) in product((0, 1), rows):
        guard = object.__new__(callback.Guard)
        guard.rank, guard._net, guard._gloo, guard._judge = mesh.rank, None, dist.group.WORLD, Judge()
        guard._reported = Mock()
        for step, detector, ranks in of_ranks[mesh.rank]:
            finding = SilentDataCorruption(detector, step, f"by {mesh.rank}", ranks)
            guard._judge.submit(partial(decide, finding, late == mesh.rank))
        guard._judge.begin()
        ends = ""
        with suppress(HardwareFault):
            guard._end_if_any(guard._judge.decided())
            ends = "not"
        guard._judge.close()
        reported = [call.args for call in guard._reported.call_args_list]
        results.append((ends, [(said.step, said.detector, said.where, step) for said, step in reported]))
    return results


BOTH = (3, evidence.REPLICAS, (0, 1))
MEMORY, ADAM = (9, evidence.MEMORY, (1,)), (10, evidence.OPTIMIZER, (1,))
# What ranks 0 and 1 have found -> what is reported: step, detector, rank, and the earliest step of all findings.
ENDINGS = (
    (([], []), None), (([BOTH], [BOTH]), (3, evidence.REPLICAS, "by 0", 3)),
    (([BOTH], [BOTH, MEMORY]), (9, evidence.MEMORY, "by 1", 3)),
    (([BOTH], [ADAM]), (10, evidence.OPTIMIZER, "by 1", 3)),
    (([(10, evidence.PRODUCT, (0,))], [MEMORY]), (9, evidence.MEMORY, "by 1", 9)),
    (([(9, evidence.REPLICAS, (1,))], [ADAM, MEMORY]), (9, evidence.MEMORY, "by 1", 9)),
)  # fmt: skip


def test_the_surest_finding_ends_all_ranks_whosever_judge_is_slow():
    """It has the fewest suspects, is of the earliest step, and the most specific. One rank reports it."""
    results = zip(*on_ranks(2, 2, endings, ENDINGS), strict=True)
    for (late, (_, reported)), of_ranks in zip(product((0, 1), ENDINGS), results, strict=True):
        assert {ends for ends, _ in of_ranks} == {"" if reported else "not"}, (late, reported)
        assert [said for _, all_said in of_ranks for said in all_said] == ([reported] if reported else []), late


@pytest.mark.release
def test_a_fault_that_makes_a_nan_is_named_where_megatron_ends_the_run(tpi):
    """In the passes after the sampled one, before ranks have told each other what they have found."""
    fault = Planted("product", always=True, bit=30, width=4096)
    message = guard_message(tpi, fault, *DENSE, "iters=6", "guard=products", "guard.products=32", "dp=2")
    assert re.match(r"silent data corruption at step [23]: .* wrong\nrank 1 on ", message), message
    assert "found NaN in local grad norm" in (tpi.folder / "run/logs/rank-1.log").read_text()
    tpi("check", files(tpi)[0], status=1)


# Another layout, model or mode.
QUIET = (
    "dp=2 tp=2", "dp=2 pp=2 gbs=4 model.num_layers=2", "dp=2 cp=2", "dp=2 gbs=8 numerics.data_shards=4",
    "dp=2 gbs=4 numerics.data_shards=4 ddp.overlap_grad_reduce=true",
    "dp=2 gbs=4 optimizer.use_distributed_optimizer=false", "dp=4 gbs=4", "dp=2 seq=64 numerics=portable",
    f"{ROUTED} tp=2 ep=2 dp=2", f"{ROUTED} tp=1 ep=2 dp=4 gbs=4",
)  # fmt: skip


# The second has no shadow pass in step 1, where Megatron counts the gradients after which it reduces a bucket.
@pytest.mark.parametrize(
    "words, layout",
    (
        (SOUND, EVERY_STEP),
        (
            (*SOUND, "gbs=4", "numerics.data_shards=4"),
            ("guard=shadow", "guard.every=2", "ddp.overlap_grad_reduce=true"),
        ),
    ),
)
def test_a_guard_of_two_replicas_changes_no_bit_and_finds_nothing(scenario, words, layout):
    single = scenario(*words)
    guarded = single("dp=2", *layout, "train.exit_interval=2")
    assert unequal(guarded.ledger(), single.ledger()[:2]) == []
    assert guarded.header().identity_hash == single.header().identity_hash
    assert checks(guarded.run) > 15


@pytest.mark.release
@pytest.mark.parametrize("words", QUIET)
def test_a_guard_changes_no_bit_and_finds_nothing(scenario, portable_loops, words):
    experts = words.startswith(ROUTED)
    single = scenario(*(() if experts else DENSE), words, "iters=3")
    guarded = single(*EVERY_STEP, *(("guard.products=16",) if "portable" in words else ()))
    assert unequal(guarded.ledger(), single.ledger()) == []
    assert experts or checks(guarded.run) > 20


# What a model keeps from one pass to the next, or counts by sequence -> a model that does.
KEEPING = {
    "aux_loss": f"{ROUTED} model.moe_z_loss_coeff=0.01",
    "seq_aux_loss": f"{ROUTED} model.moe_router_load_balancing_type=seq_aux_loss",
    "global_aux_loss": f"{ROUTED} model.moe_router_load_balancing_type=global_aux_loss",
    "capacity": f"{ROUTED} model.moe_expert_capacity_factor=1.0 model.moe_pad_expert_input_to_capacity=true",
    "experts' bias": f"{ROUTED} model.moe_router_enable_expert_bias=true model.moe_router_bias_update_rate=0.1 "
    "model.moe_router_score_function=sigmoid model.moe_router_load_balancing_type=none",
    "MTP": f"{' '.join(DENSE)} model.mtp_num_layers=2",
    "gated delta nets": NEXT,
    "mamba": small("nemotron3_nano_toy"),
    "FP8": f"{WIDE} precision=fp8_tensorwise",
    "MXFP8": f"{WIDE} precision=mxfp8",
    "recomputation": f"{ROUTED} {RECOMPUTED} model.moe_router_load_balancing_type=global_aux_loss",
}
SEVERAL = ("dp=2", "gbs=4", "numerics.data_shards=2")  # sequences of each data shard
LOGGED = re.compile(r"\| ([\w ]*loss): (\S+)")


@pytest.mark.release
@pytest.mark.parametrize("kept", KEEPING)
def test_what_a_model_keeps_is_as_without_a_guard(scenario, kept):
    """Also what is logged, of which the ledger has the main loss alone."""
    single = scenario(KEEPING[kept], *SEVERAL, "iters=3")
    guarded = single(*EVERY_STEP)
    assert unequal(guarded.ledger(), single.ledger()) == []
    logs = [LOGGED.findall((run / "logs" / "rank-1.log").read_text()) for run in (guarded.run, single.run)]
    assert logs[0] == logs[1]
    assert {"lm loss"} < {name for name, _ in logs[0]} or kept in ("experts' bias", "FP8", "MXFP8")


def _joined(fault):
    """A fault, and routers that count what is computed side by side as one sequence."""

    def plant() -> None:
        from tp_invariant_recipes.numerics.megatron.router import InvariantTopKRouter

        fault.plant()
        InvariantTopKRouter.of_other_shards = lambda self, shards: {}

    return SimpleNamespace(plant=plant)


@pytest.mark.release
@pytest.mark.parametrize("kept", ("global_aux_loss", "aux_loss", "capacity"))
def test_routers_count_each_data_shard_by_itself(tpi, kept):
    """In the other layout of a place that always fails. The control has routers that count all together.

    Of 32 tokens MKL's AVX2 products have other bits beside another sequence, on every rank; of 64 they have not.
    """
    fault = Planted("norm of heads", always=True, bit=6)
    words = (*KEEPING[kept].replace("seq=32", "seq=64").split(), *SEVERAL, "iters=2", *EVERY_STEP)
    message = guard_message(tpi, fault, *words)
    assert "silent data corruption at step 2: backward pass at the " in message
    assert re.search(r"\nrank 1 on .*\njudged by its own recomputation at other offsets", message)
    assert "one of these is wrong" in guard_message(tpi, _joined(fault), *words, run="control")


@pytest.mark.release
@pytest.mark.parametrize("always", (False, True))
@pytest.mark.parametrize("kept", ("experts' bias", "seq_aux_loss", "MTP", "mamba"))
def test_a_repetition_begins_as_the_step_did(tpi, kept, always):
    """The passes of a step end with other biases of experts."""
    words = (*KEEPING[kept].split(), *SEVERAL, "iters=2", *EVERY_STEP)
    message = guard_message(tpi, Planted("norm", always=always), *words)
    assert re.search(r"\nrank 1 on .*\njudged by its own recomputation", message)
    assert ("at other offsets" in message) is always


def checks(run):
    """How many checks the last rank has made, without a finding."""
    log = (run / "logs" / "rank-1.log").read_text()
    match = re.search(r"guard: (\d+) checks, 0 of them detected silent data corruption", log)
    assert match
    return int(match[1])


@pytest.mark.release
def test_a_portable_product_is_judged_by_its_definition(tpi, portable_loops):
    """By one that keeps a bit less of each sum: the judge is in another process, and sound."""
    fault = Planted("defined", always=True, rank=0)
    words = (*DENSE, "seq=64", "numerics=portable", "iters=40", "guard=products", "guard.products=16")
    message = guard_message(tpi, fault, *words)
    assert "judged by the definition of the GEMM, computed by the host's CPU" in message
    judged = tpi("check", files(tpi)[0], status=1)
    assert "its definition, computed on this CPU" in judged.stdout


@pytest.mark.release
def test_a_referee_says_which_run_is_correct(tpi, scenario):
    """A fault that no guard was there to see: the run with it does not repeat itself."""
    sound = scenario(*SOUND)
    sound.ledger()
    tpi("train", *SOUND, "run.dir=broken", before=Planted("norm", rank=0).plant, status=0)
    completed = tpi("bisect", "broken", sound.run, "--referee", "--dir", "bisect", status=1)
    assert f"referee: {sound.run} is right: it repeats its bits here, and broken does not" in completed.stdout
    assert json.loads((tpi.folder / "bisect/bisect.json").read_text())["referee"]["right"] == ["b"]


@pytest.mark.release
def test_a_referee_computes_what_both_runs_repeat(tpi, portable_loops):
    """A fault of one layout, which training again repeats."""
    words = ("qwen3_toy", "seq=64", "gbs=1", "model.num_layers=1", "numerics=portable", "iters=3")
    plant = Planted("defined", always=True, step=3, rank=1).plant
    for tp in (1, 2):
        tpi("train", *words, f"tp={tp}", f"run.dir=tp{tp}", before=plant, status=0)
    completed = tpi("bisect", "tp1", "tp2", "--referee", "--dir", "bisect", before=plant, status=1)
    assert "referee: tp1 is right, and tp2 is wrong, by the definition of decoder.layers.0" in completed.stdout
