"""`tpi bench`, end to end on two CPU ranks. No test says how long anything takes."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.faults import has_lines, ranks_of, stop
from tp_invariant_recipes.cli.bench import _figures
from tp_invariant_recipes.features.bench import profile
from tp_invariant_recipes.features.bench.workflow import _mode, _round
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.runs.bench_dir import BenchDir, Pass

SMALL = ("qwen3_toy", "tp=2", "seq=32", "gbs=1", "device=cpu", "model.num_layers=1")
TURNS = ["stock", "tree", "stock", "tree"]


@pytest.fixture(scope="module")
def done(shared):
    arguments = ("--rounds", "2", "--warmup", "1", "--steps", "1", "--profile", "--dir", "bench")
    return shared("bench", *SMALL, *arguments)


@pytest.fixture(scope="module")
def bench_json(done, shared):
    assert done.status == 0, done.stderr
    return json.loads((shared.folder / "bench" / "bench.json").read_text())


def test_a_table_stands_on_standard_output(done, bench_json):
    assert "ms/step" in done.stdout
    for word in ("stock", "tree", "× time", "extra time of tree over stock", "collectives"):
        assert word in done.stdout
    assert "round 2 of 2, tree" in done.stderr
    assert "Traceback" not in done.stderr


def test_modes_took_turns_in_the_same_ranks(bench_json, shared):
    assert bench_json["order"] == TURNS
    for rank in range(2):
        lines = [json.loads(line) for line in (shared.folder / "bench/bench" / f"rank-{rank}.jsonl").open()]
        timed = [line for line in lines if not line["profile"]]
        assert [(line["pass"], line["mode"], line["step"], line["counts"]) for line in timed] == [
            (number, mode, step, step > 1) for number, mode in enumerate(TURNS) for step in (1, 2)
        ]
        assert all(line["seconds"] > 0 and line["tokens"] == 32 for line in lines)
    logs = sorted(f.name for f in (shared.folder / "bench" / "logs").iterdir())
    assert logs == ["bridge.log", "rank-0.log", "rank-1.log"]


def test_figures_and_ratios_of_every_mode(bench_json):
    stock, tree = bench_json["modes"]
    for mode, passes in ((stock, [0, 2]), (tree, [1, 3])):
        assert [item["pass"] for item in mode["rounds"]] == passes
        assert all(len(item["step_ms"]) == 1 for item in mode["rounds"])
        step = mode["step_ms"]
        assert 0 < step["min"] <= step["median"] <= step["max"]
        assert mode["tokens_per_second"] == pytest.approx(32 * 1000 / step["median"])
        assert mode["peak_gib"] is None  # a CPU's memory is not counted
    assert stock["time_ratio"] is None
    rounds = [b["median_ms"] / a["median_ms"] for a, b in zip(stock["rounds"], tree["rounds"], strict=True)]
    assert (tree["time_ratio"]["min"], tree["time_ratio"]["max"]) == (min(rounds), max(rounds))


def test_the_directory_says_what_was_run(bench_json, shared):
    assert bench_json["model"] == "qwen3_toy"
    assert bench_json["overrides"] == list(SMALL[1:])
    assert (bench_json["rounds"], bench_json["warmup"], bench_json["steps"], bench_json["ranks"]) == (2, 1, 1, 2)
    assert bench_json["device"]["kind"] == "cpu"
    assert bench_json["host_python_ms"] > 0
    assert bench_json["versions"]["megatron_bridge"]
    assert bench_json["environment"]["OMP_NUM_THREADS"] == "1"
    for mode in ("stock", "tree"):
        folder = shared.folder / "bench" / "modes" / mode
        names = {"config.yaml", "run.json", "environment.json", "versions.json"}
        assert {f.name for f in folder.iterdir()} == names  # and no checkpoint
        assert json.loads((folder / "run.json").read_text())["numerics"]["mode"] == mode


def test_categories_sum_to_the_whole_and_traces_can_be_reread(bench_json, shared):
    stock, tree = bench_json["profile"]["modes"]
    for mode in (stock, tree):
        kernels = profile.read(shared.folder / mode["trace"]).kernels
        assert mode["trace"] == f"bench/bench/trace-{mode['mode']}.json.gz"
        assert mode["launches"] == pytest.approx(sum(k.launches for k in kernels))
        for figure in ("milliseconds", "launches"):
            assert sum(category[figure] for category in mode["categories"].values()) == pytest.approx(mode[figure])
        assert mode["milliseconds"] > 0
        assert 0 < mode["idle_ms"] < mode["step_ms"]
        assert {"matrix products", "collectives"} <= set(mode["categories"])
    assert stock["extra"] == []
    assert 0 < len(tree["extra"]) <= 10


def test_a_benchmark_is_never_overwritten(done, shared):
    repeated = shared("bench", *SMALL, "--dir", "bench", status=2)
    assert "--dir bench is there" in repeated.stderr


@pytest.mark.release
def test_one_mode_alone_prints_json_and_a_killed_rank_is_named(tpi):
    done = tpi("bench", *SMALL, "--modes", "stock", "--rounds", "1", "--warmup", "0", "--steps", "1", "--json")
    assert done.status == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(mode["mode"], mode["time_ratio"]) for mode in result["modes"]] == [("stock", None)]
    assert "profile" not in result

    process = tpi.start("bench", *SMALL, "--modes", "stock", "--steps", "400", "--dir", "killed")
    figures = tpi.folder / "killed" / "bench" / "rank-0.jsonl"
    process.until(has_lines(figures, 2))
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    assert process.wait() == 2
    assert "rank 1 was killed by SIGKILL" in process.stderr
    assert "killed/logs/rank-1.log" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tpi.folder / "killed" / "bench.json").exists()


@pytest.mark.release  # in `make test`: a killed rank, and Ctrl-C in test_verify.py
@pytest.mark.parametrize("number, status", ((signal.SIGINT, 130), (signal.SIGTERM, 2)))
def test_a_stopped_benchmark_says_so(tpi, number, status):
    process = tpi.start("bench", *SMALL, "--modes", "stock", "--steps", "400", "--dir", "stopped")
    figures = tpi.folder / "stopped" / "bench" / "rank-0.jsonl"
    stop(process, has_lines(figures, 2), number, status)
    assert "the benchmark was stopped before its end" in process.stderr


@pytest.mark.release
def test_a_mode_with_digests_writes_them_and_the_others_do_not(shared):
    arguments = ("--modes", "tree,tree+digests", "--rounds", "1", "--warmup", "0", "--steps", "2", "--dir", "digests")
    shared("bench", *SMALL, *arguments, status=0)
    plain, digested = (read(shared.folder / "digests/bench" / f"pass-{number}") for number in (0, 1))
    for kind in ("gradients", "masters"):
        assert [getattr(step, kind) is not None for step in plain.steps] == [False, False]
        assert [getattr(step, kind) is not None for step in digested.steps] == [True, True]
    assert [(step.loss, step.grad_norm) for step in plain.steps] == [(s.loss, s.grad_norm) for s in digested.steps]


# Megatron's setting -> which of PyTorch's peaks is the step's memory.
MEASURED = ((None, "allocated", 3), ("none", "allocated", 3), ("full_iteration", "reserved", 5))


@pytest.mark.parametrize("graphs, memory, peak", MEASURED)
def test_memory_that_a_graph_keeps_counts(tmp_path, monkeypatch, graphs, memory, peak):
    from tp_invariant_recipes.features.bench import stopwatch  # needs Bridge

    monkeypatch.setattr(stopwatch, "PEAKS", {"allocated": lambda: 3 * 2**30, "reserved": lambda: 5 * 2**30})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model, train = SimpleNamespace(cuda_graph_impl=graphs, seq_length=8), SimpleNamespace(global_batch_size=1)
    state = SimpleNamespace(cfg=SimpleNamespace(model=model, train=train), train_state=SimpleNamespace(step=0))
    directory = BenchDir(tmp_path)
    directory.figures(0).parent.mkdir()
    watch = stopwatch.Stopwatch(SimpleNamespace(time=0.0), directory.figures(0), 0, Pass("tree", 1, 0, 1))
    watch.on_train_step_end(SimpleNamespace(state=state))
    rounds = [_round([directory.read_figures(0)], 0)]
    mode = _mode("tree", rounds, rounds)
    assert (mode["memory"], mode["peak_gib"]) == (memory, peak)
    assert ("GiB: reserved by PyTorch" in (_figures([mode]).caption or "")) == (memory == "reserved")
