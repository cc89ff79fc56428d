# SPDX-License-Identifier: Apache-2.0
"""`tpi bisect` trains runs again as they were, and names module, pass and step of a planted fault."""

import json
import shutil
import signal
from contextlib import contextmanager

import pytest

from tests.distributed.faults import stop

SMALL = ("qwen3_toy", "model.num_layers=1", "seq=32", "gbs=1", "numerics=tree", "precision=fp32")
FC1, FC2 = (f"decoder.layers.0.mlp.linear_fc{n}" for n in (1, 2))


def train(tpi, run, *overrides, before=None):
    tpi("train", *SMALL, *overrides, f"run.dir={run}", before=before, status=0)


def wrong_output(step, name, tp):
    """At a step of this degree, a module gives twice what it computes."""

    def plant():
        from tp_invariant_recipes.observe.digests.callback import Digests
        from tp_invariant_recipes.observe.shards import unwrapped

        begin = Digests.on_train_step_start

        def on_train_step_start(self, context):
            module = dict(unwrapped(context.model[0]).named_modules())[name]
            if (context.state.train_state.step + 1, module.config.tensor_model_parallel_size) == (step, tp):
                module.register_forward_hook(lambda _, inputs, out: (out[0] * 2, *out[1:]), prepend=True)
            begin(self, context)

        Digests.on_train_step_start = on_train_step_start

    return plant


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.release
def test_a_forward_output_that_is_wrong_in_one_layout(tpi):
    """tp=1 against tp=4, from the checkpoint before; the runs stay as they are."""
    plant = wrong_output(3, FC2, tp=4)
    for tp in (1, 4):
        train(tpi, f"tp{tp}", f"tp={tp}", "iters=4", "save=2", before=plant)
    compared = tpi("compare", "tp1", "tp4", status=1)
    assert "different at step 3: " in compared.stdout
    before = [files(tpi.folder / run) for run in ("tp1", "tp4")]

    completed = tpi("bisect", "tp1", "tp4", "--dir", "bisect", before=plant, status=1)
    assert f"different at step 3: forward of {FC2}: output differs, its inputs and weights matched" in completed.stdout
    assert f"forward/{FC2}/output: " in completed.stdout
    assert "elements differ, by at most" in completed.stdout
    assert "does not repeat" not in completed.stdout
    assert "traced-a: tp1 from step 2" in completed.stderr
    assert [files(tpi.folder / run) for run in ("tp1", "tp4")] == before

    result = json.loads((tpi.folder / "bisect/bisect.json").read_text())
    assert result["placed"]["first_difference"]["name"] == f"forward/{FC2}/output"
    assert result["dumped"] == [f"forward/{FC2}/output", f"forward/{FC2}/input"]
    assert result["distances"][f"forward/{FC2}/output"]["differing"] > 0
    assert result["same_place"] is True
    traced = tpi("compare", "bisect/traced-a", "bisect/traced-b")
    assert f"step 3: forward of {FC2}: output differs" in traced.stdout
    repeated = tpi("bisect", "tp1", "tp4", "--dir", "bisect", status=2)
    assert "--dir bisect is there and is not an empty directory" in repeated.stderr


@pytest.mark.release
def test_what_there_is_nothing_to_retrain_for(tpi):
    train(tpi, "a", "tp=1", "iters=1")
    train(tpi, "b", "tp=2", "iters=1")
    train(tpi, "seed", "tp=1", "iters=1", "seed=5")
    train(tpi, "drawn", "tp=2", "iters=1", "numerics=stock", "numerics.initial_weights=megatron")
    equal = tpi("bisect", "a", "b", "--dir", "bisect")
    assert (equal.status, equal.stdout.partition(":")[0]) == (0, "identical")
    other = tpi("bisect", "a", "seed", "--dir", "bisect", status=2)
    assert "rng.seed is 1234 and 5" in other.stderr
    tpi("bisect", "a", "b/ledger.jsonl", "--dir", "bisect", status=0)  # the ledger of a run directory is that run
    (tpi.folder / "copy.jsonl").write_bytes((tpi.folder / "b/ledger.jsonl").read_bytes())
    copied = tpi("bisect", "a", "copy.jsonl", "--dir", "bisect", status=2)
    assert "copy.jsonl: to train a step again takes the run directory" in copied.stderr
    begun = tpi("bisect", "a", "drawn", "--dir", "bisect", status=1)
    assert "initial weight of embedding.word_embeddings.weight differs" in begun.stdout
    assert not (tpi.folder / "bisect").exists()


# Two runs that compute the same bits, each in one rank, which is the cheapest. The second has faults.
PAIR = {"plain": "tp=1", "recomputed": "model.recompute_granularity=selective"}


def train_pair(tpi, *overrides, before):
    for run, override in PAIR.items():
        train(tpi, run, override, *overrides, before=before)


def gradient_of_fc1(step):
    """Another sign of the weight gradient of FC1, which no norm shows, at one step of a run with recomputation."""

    def plant():
        from tp_invariant_recipes.observe import recorder

        original = recorder.recording

        def recording(*args):
            from tp_invariant_recipes.observe.optimizer_step import AroundOptimizerStep
            from tp_invariant_recipes.observe.shards import unwrapped

            class Fault(AroundOptimizerStep):
                """Comes last of the callbacks, so that it changes the gradient before its digest is taken."""

                def on_train_start(self, context):
                    self.context = context

                @contextmanager
                def around_optimizer_step(self):
                    now = self.context.state.train_state.step + 1
                    if (now, self.context.state.cfg.model.recompute_granularity) == (step, "selective"):
                        model = unwrapped(self.context.model[0])
                        model.decoder.layers[0].mlp.linear_fc1.weight.main_grad.neg_()
                    yield

            return [*original(*args), Fault()]

        recorder.recording = recording

    return plant


@pytest.fixture(scope="module")
def runs(shared):
    """Both: two steps, of which the second has the fault. No test changes them."""
    train_pair(shared, "iters=2", before=gradient_of_fc1(step=2))
    return shared


# What both runs record, the step of the fault, and the step from which they are trained again first.
SPARSE = (("ledger.digests=2 save=2", 3, 2), ("ledger.digests=3 save=4", 2, 0), ("ledger.digests=0", 2, 0))


@pytest.mark.release
@pytest.mark.parametrize("recorded, step, start", SPARSE)
def test_the_step_is_looked_for_where_digests_were_not_recorded_at_every_step(tpi, recorded, step, start):
    """The loss shows it a step later; a checkpoint from after it would make an innocent module look guilty."""
    plant = gradient_of_fc1(step=step)
    train_pair(tpi, "iters=5", *recorded.split(), before=plant)
    assert f"different at step {step + 1}: loss" in tpi("compare", *PAIR).stdout
    completed = tpi("bisect", *PAIR, "--dir", "bisect", before=plant, status=1)
    assert f"different at step {step}: gradient of {FC1}.weight differs, the inputs of {FC1} and" in completed.stdout
    assert f"the operation: the weight gradient of {FC1}: " in completed.stdout
    assert f"equal: forward/{FC1}/input, backward/{FC1}/input" in completed.stdout
    assert f"known to agree up to step {start}" in completed.stdout
    assert f"traced-a: plain from step {start}\n" in completed.stderr
    result = json.loads((tpi.folder / "bisect/bisect.json").read_text())
    assert (result["step"], result["module"], result["repeats"]) == (step, FC1, [True, True])
    assert result["traced"] == [f"bisect/traced-step-{step}-{side}" for side in "ab"]


@pytest.mark.release  # in `make test`: the other repetitions of this file
def test_text_that_is_read_several_times_keeps_its_order(tpi):
    """Megatron shuffles as many passes through the text as the whole run needs, all together."""
    words = tpi.folder / "words"
    words.mkdir()
    for n in range(5):  # the run goes through it almost three times, its first two steps not once
        (words / f"{n}.txt").write_text(f"It was the best of times number {n}. " * (1 + n))
    plant = gradient_of_fc1(step=2)
    train_pair(tpi, "iters=6", "gbs=4", "data=text", f"data.path={words}", before=plant)
    completed = tpi("bisect", *PAIR, "--dir", "bisect", before=plant, status=1)
    assert "does not repeat" not in completed.stdout
    assert f"different at step 2: gradient of {FC1}.weight" in completed.stdout


@pytest.mark.release
def test_what_fails_after_the_step_does_not_matter(tpi):
    """A run that diverges at a step may well fail at the next."""
    plant = gradient_of_fc1(step=2)

    def failing():
        from tp_invariant_recipes.observe.recorder import Recorder

        plant()
        start = Recorder.on_train_step_start

        def fail(self, context):
            if context.state.train_state.step == 2:
                raise RuntimeError("planted")
            start(self, context)

        Recorder.on_train_step_start = fail

    train_pair(tpi, "iters=3", before=plant)
    result = tpi("bisect", *PAIR, "--dir", "failing", before=failing, status=1)
    assert f"different at step 2: gradient of {FC1}.weight" in result.stdout
    assert "failing/traced-a failed after step 2: rank 0 failed: RuntimeError: planted" in result.stdout


def test_the_operation_is_named_from_runs_as_they_were(runs):
    result = runs("bisect", *PAIR, "--dir", "named", before=gradient_of_fc1(step=2), status=1)
    assert f"different at step 2: gradient of {FC1}.weight differs, the inputs of {FC1} and" in result.stdout
    assert f"the operation: the weight gradient of {FC1}: " in result.stdout
    assert "does not repeat" not in result.stdout


@pytest.mark.release
def test_a_run_in_cuda_graphs_is_trained_again_without_them(runs, tpi):
    for run in PAIR:
        shutil.copytree(runs.folder / run, tpi.folder / run)
    file = tpi.folder / "plain/run.json"
    was = json.loads(file.read_text())
    file.write_text(json.dumps(was | {"overrides": [*was["overrides"], "cuda_graph=full"]}))
    result = tpi("bisect", *PAIR, "--dir", "bisect", before=gradient_of_fc1(step=2), status=1)
    assert f"different at step 2: gradient of {FC1}.weight differs, the inputs of {FC1} and" in result.stdout


@pytest.mark.release
def test_the_answer_about_a_run_that_does_not_repeat_itself_comes_first(runs):
    actual = runs("bisect", *PAIR, "--dir", "sound", status=1)
    first, second = actual.stdout.splitlines()[:2]
    assert first.startswith("recomputed does not repeat itself here: different at step 2: gradient of ")
    assert second == "trained again, the two do not differ: their difference is not reproducible here"
    assert "plain does not repeat itself" not in actual.stdout
    result = json.loads((runs.folder / "sound/bisect.json").read_text())
    assert (result["repeats"], result["module"], result["operation"]) == ([True, False], None, None)


@pytest.mark.release
def test_ctrl_c_stops_with_its_own_status(runs):
    before = [files(runs.folder / run) for run in PAIR]
    process = runs.start("bisect", *PAIR, "--dir", "stopped", before=gradient_of_fc1(step=2))
    stop(process, lambda: any(runs.folder.glob("stopped/*/ledger.jsonl")), signal.SIGINT, 130)
    assert "error: stopped; what was trained: stopped" in process.stderr
    assert not (runs.folder / "stopped/bisect.json").exists()
    assert [files(runs.folder / run) for run in PAIR] == before


def test_what_keeps_either_run_from_being_retrained_is_one_message_and_nothing_is_written(runs, tpi):
    taken = runs("bisect", *PAIR, "--dir", "plain")
    assert (taken.status, taken.stdout) == (2, "")
    assert "--dir plain is there and is not an empty directory" in taken.stderr
    for run in PAIR:
        shutil.copytree(runs.folder / run, tpi.folder / run)
        file = tpi.folder / run / "run.json"
        was = json.loads(file.read_text())
        file.write_text(
            json.dumps(was | {"overrides": [*was["overrides"], "lr=1" if run == "plain" else "nonsense=1"]})
        )
    refused = tpi("bisect", *PAIR, "--dir", "bisect", before=gradient_of_fc1(step=2))
    assert (refused.status, refused.stdout) == (2, "")
    assert "plain cannot be repeated: it would be another run now." in refused.stderr
    assert "optimizer.lr was 0.003 and is 1.0 now" in refused.stderr
    assert "nonsense=1: unknown key 'nonsense'" in refused.stderr
    assert not (tpi.folder / "bisect").exists()
