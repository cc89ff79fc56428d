"""Broken hardware, planted: a run notices it, names it, and leaves evidence that another machine judges.

tests/distributed/guard_trials.py has the tables of many trials.
"""

import json
import re

import pytest

from tests.distributed.guard_faults import Planted
from tests.distributed.guard_trials import DENSE, EXPERTS
from tests.distributed.scenario import unequal
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.runs import checkpoints, guard_files
from tp_invariant_recipes.runs.run_dir import RunDir

EVERY_STEP = ("guard=shadow", "guard.every=1")


def said(tpi, fault, *words, run="run"):
    """The message of a run with a fault; None: it has not noticed."""
    ended = tpi("train", *words, f"run.dir={run}", before=fault.plant if fault else None)
    if ended.status == 0:
        return None
    assert ended.status == 2, ended.stderr
    return ended.stderr.partition("error: ")[2]


def files(tpi, run="run"):
    return sorted((tpi.folder / run / "guard").glob(f"*{evidence.SUFFIX}"))


def test_a_broken_product_ends_the_run_with_one_message_and_evidence(tpi):
    """Checkpoints of the last `guard.every` steps are set aside, and the run goes on from the one before."""
    words = (*DENSE, "iters=12", "save=1", "guard=products", "guard.products=8", "guard.every=2")
    message = said(tpi, Planted("product", always=True, step=6, rank=0), *words)
    found = re.match(r"wrong bits at step (\d+): (weight gradient|forward pass|input gradient) of ([\w.]+): ", message)
    assert found, message
    step = int(found[1])
    assert "1 bit of 1 of " in message
    assert re.search(r"\nrank 0 on \S+, a CPU ", message)
    run = RunDir(tpi.folder / "run")
    last = checkpoints.finished(run.checkpoints)[-1].step
    assert last == step - 1 - 2
    assert f"the last trusted checkpoint is of step {last}; tpi train --resume run goes on from it" in message
    assert (run.checkpoints / "set-aside" / f"iter_{last + 1:07d}").is_dir()
    assert guard_files.unsettled(run) is None
    (file,) = files(tpi)
    assert "different: the recorded bits are wrong" in tpi("check", file, status=1).stdout
    described = json.loads(tpi("check", file, "--json", status=1).stdout)["evidence"]
    assert (described["step"], described["trusted"], described["suspects"][0]["rank"]) == (step, last, 0)
    tpi("train", "--resume", "run", status=0)
    tpi("train", *words, "run.dir=sound", status=0)
    assert unequal(list(read(tpi.folder / "run").steps), list(read(tpi.folder / "sound").steps)) == []


@pytest.mark.parametrize(
    "kernel, always",
    (
        ("attention", False),
        *(
            pytest.param(kernel, always, marks=pytest.mark.release)
            for kernel in ("product", "contraction", "norm", "activation", "experts")
            for always in (False, True)
        ),
        pytest.param("attention", True, marks=pytest.mark.release),
    ),
)
def test_a_shadow_step_finds_a_fault_of_its_step(tpi, kernel, always):
    model = EXPERTS if kernel == "experts" else DENSE
    message = said(tpi, Planted(kernel, always=always), *model, "dp=2", "iters=3", *EVERY_STEP)
    assert message.startswith("wrong bits at step 2: ")
    assert re.search(r"^rank 1 on ", message, re.MULTILINE)
    proven = kernel in ("product", "contraction", "attention")
    assert ("one of these is wrong" in message) is (always and not proven)
    tpi("check", files(tpi)[0], status=1)


@pytest.mark.release
def test_a_third_replica_names_the_one_that_always_computes_wrong_bits(tpi):
    fault = Planted("norm", always=True, rank=2)
    message = said(tpi, fault, *DENSE, "gbs=4", "dp=4", "iters=2", *EVERY_STEP)
    assert "one of these" not in message
    assert re.search(r"\nrank 2 on .*\njudged by a third replica", message)


def test_a_fault_between_shadow_steps_is_not_seen(tpi):
    """The control: the step counts, not the fault."""
    assert said(tpi, Planted("norm"), *DENSE, "dp=2", "iters=3", "guard=shadow", "guard.every=3") is None


@pytest.mark.release
@pytest.mark.parametrize("kernel", ("adam", "moment", "all-gather", "memory"))
@pytest.mark.parametrize("numerics", ("tree", "portable"))
def test_weights_and_the_optimizers_state(tpi, portable_loops, kernel, numerics):
    words = (*DENSE, "seq=64", f"numerics={numerics}", "iters=60", "guard=products", "dp=2")
    message = said(tpi, Planted(kernel, always=True, bit=3, width=4096), *words)
    what = {"adam": "update of ", "moment": "update of ", "all-gather": "weights of ", "memory": "changed in memory"}
    assert what[kernel] in message
    assert re.search(r"^rank 1 on ", message, re.MULTILINE)
    if kernel in ("adam", "moment"):
        tpi("check", files(tpi)[0], status=1)


QUIET = (
    "dp=2",
    *(
        pytest.param(layout, marks=pytest.mark.release)
        for layout in (
            "dp=2 tp=2",
            "dp=2 pp=2 gbs=4 model.num_layers=2",
            "dp=2 cp=2",
            "dp=2 gbs=8 numerics.data_shards=4",
            "dp=2 gbs=4 numerics.data_shards=4 ddp.overlap_grad_reduce=true",
            "dp=2 gbs=4 optimizer.use_distributed_optimizer=false",
            "dp=4 gbs=4",
        )
    ),
)


@pytest.mark.parametrize("layout", QUIET)
def test_a_guard_changes_no_bit_and_finds_nothing(scenario, layout):
    one = scenario(*DENSE, "iters=3", layout)
    guarded = one(*EVERY_STEP)
    assert unequal(guarded.ledger(), one().ledger()) == []
    assert guarded.header().identity_hash == one().header().identity_hash
    assert checks(guarded.run) > 20


@pytest.mark.release
@pytest.mark.parametrize("layout", ("tp=2 ep=2 dp=2", "tp=1 ep=2 dp=4 gbs=4"))
def test_experts_have_other_replicas(scenario, layout):
    one = scenario(*EXPERTS, "iters=3", layout)
    assert unequal(one(*EVERY_STEP).ledger(), one().ledger()) == []


@pytest.mark.release
def test_a_portable_run_is_guarded(scenario, portable_loops):
    one = scenario(*DENSE, "seq=64", "iters=3", "dp=2", "numerics=portable")
    guarded = one(*EVERY_STEP, "guard.products=16")
    assert unequal(guarded.ledger(), one().ledger()) == []
    assert checks(guarded.run) > 50


@pytest.mark.release
def test_a_thousand_quiet_steps(scenario):
    one = scenario(*DENSE, "iters=1000", "dp=2", "ledger.digests=10")
    guarded = one("guard=shadow", "guard.every=10")
    assert unequal(guarded.ledger(), one().ledger()) == []
    assert checks(guarded.run) > 5000


def checks(run):
    """How many checks the last rank has made, without a finding."""
    found = re.search(r"guard: (\d+) checks, 0 of them found wrong bits", (run / "logs" / "rank-1.log").read_text())
    assert found
    return int(found[1])


@pytest.mark.release
def test_a_portable_product_is_judged_by_its_definition(tpi, portable_loops):
    """By one that keeps a bit less of each sum: the judge is in another process, and sound."""
    fault = Planted("defined", always=True, rank=0)
    words = (*DENSE, "seq=64", "numerics=portable", "iters=40", "guard=products", "guard.products=16")
    message = said(tpi, fault, *words)
    assert "judged by the product's definition, computed by the host's CPU" in message
    judged = tpi("check", files(tpi)[0], status=1)
    assert "its definition, computed on this CPU" in judged.stdout


def test_a_referee_says_which_run_is_right(tpi):
    """A fault that no guard was there to see: the run with it does not repeat itself."""
    words = (*DENSE, "iters=3")
    tpi("train", *words, "run.dir=broken", before=Planted("norm", rank=0).plant, status=0)
    tpi("train", *words, "run.dir=sound", status=0)
    found = tpi("bisect", "broken", "sound", "--referee", "--dir", "bisect", status=1)
    assert "referee: sound is right: it repeats its bits here, and broken does not" in found.stdout
    assert json.loads((tpi.folder / "bisect/bisect.json").read_text())["referee"]["right"] == ["b"]


@pytest.mark.release
def test_a_referee_computes_what_both_runs_repeat(tpi, portable_loops):
    """A fault of one layout, which training again repeats."""
    words = ("qwen3_toy", "seq=64", "gbs=1", "model.num_layers=1", "numerics=portable", "iters=3")
    plant = Planted("defined", always=True, step=3, rank=1).plant
    for tp in (1, 2):
        tpi("train", *words, f"tp={tp}", f"run.dir=tp{tp}", before=plant, status=0)
    found = tpi("bisect", "tp1", "tp2", "--referee", "--dir", "bisect", before=plant, status=1)
    assert "referee: tp1 is right, and tp2 is wrong, by the definition of decoder.layers.0" in found.stdout
