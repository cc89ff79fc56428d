"""Ranks that stay alive between runs: real processes under the launcher, that train nothing."""

import dataclasses
import fcntl
import gc
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.launch import ranks, warm
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.training import process_state, rank
from tp_invariant_recipes.training.rank import RankInfo


def note(run_dir: RunDir, info: RankInfo) -> None:
    """Write down which process this is and what it finds."""
    import torch

    found = {
        "pid": os.getpid(),
        "random": random.random(),
        "torch": torch.rand(1).item(),
        "LEFT": os.environ.get("LEFT"),
        "threads": torch.get_num_threads(),
    }
    print("a word of", run_dir.path.name)
    (run_dir.path / f"found-{info.rank}.json").write_text(json.dumps(found))


def leave_what_is_put_back(run_dir: RunDir, info: RankInfo) -> None:
    import torch
    from megatron.core import parallel_state

    note(run_dir, info)
    os.environ["LEFT"] = "1"
    random.seed(1)
    torch.manual_seed(1)
    torch.set_num_threads(1 + torch.get_num_threads())
    parallel_state._DATA_PARALLEL_GLOBAL_RANKS = [0, 1]


def leave_a_function(run_dir: RunDir, info: RankInfo) -> None:
    from megatron.core import parallel_state

    note(run_dir, info)
    parallel_state.get_tensor_model_parallel_rank = lambda: 0


def leave_an_item(run_dir: RunDir, info: RankInfo) -> None:
    from tp_invariant_recipes.numerics.sums import partial_gradient

    note(run_dir, info)
    partial_gradient._waiting[7] = []


def leave_an_attribute_of_a_class(run_dir: RunDir, info: RankInfo) -> None:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    note(run_dir, info)
    FullCudaGraphWrapper.left = True


def one_rank_leaves_something(run_dir: RunDir, info: RankInfo) -> None:
    (leave_a_function if info.rank else note)(run_dir, info)


def fail(run_dir: RunDir, info: RankInfo) -> None:
    raise ValueError("no such luck")


def stopped(run_dir: RunDir, info: RankInfo) -> None:
    """As Bridge leaves after it has saved."""
    note(run_dir, info)
    raise SystemExit(0)


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """In this process, so that the forked ranks need not; nor do they look for garbage among it, which copies it."""
    from tp_invariant_recipes.numerics.sums import partial_gradient  # noqa: F401 -- has state to compare with

    process_state.ProcessState()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def launched(tmp_path, monkeypatch) -> Iterator[Callable[..., list[dict]]]:
    """launched(FUNCTION, …) has two ranks call it; what each has found."""
    monkeypatch.setattr(rank.bridge, "load", lambda: None)
    count = 0

    with warm.WarmRanks() as kept:

        def launched(rank_fn=note, *, ranks_=2, layout="tp2") -> list[dict]:
            nonlocal count
            count += 1
            run_dir = RunDir(tmp_path / f"run-{count}")
            infos = [RankInfo(n, n, ranks_, ranks_, "127.0.0.1", (1,)) for n in range(ranks_)]
            with locked(run_dir):
                assert (
                    ranks.run(
                        run_dir, "cpu", infos, lambda: None, ranks.Stop(), rank_fn=rank_fn, warm=kept, layout=layout
                    )
                    is ranks.Outcome.COMPLETED
                )
            return [json.loads((run_dir.path / f"found-{n}.json").read_text()) for n in range(ranks_)]

        yield launched


def pids(found: list[dict]) -> list[int]:
    return [one["pid"] for one in found]


def test_ranks_train_one_run_after_another_and_find_the_same(launched, tmp_path):
    first, second, third = launched(leave_what_is_put_back), launched(leave_what_is_put_back), launched()
    assert first == second == third
    assert len({*pids(first)}) == 2
    logs = [(tmp_path / f"run-{n}" / "logs" / "rank-1.log").read_text() for n in (1, 2, 3)]
    assert logs == [f"a word of run-{n}\n" for n in (1, 2, 3)]


def test_without_restoring_the_next_run_finds_what_the_one_before_left(launched, monkeypatch):
    """The control: the run above does leave something."""
    monkeypatch.setattr(process_state.ProcessState, "restore", lambda self: [])
    launched = partial(launched, ranks_=1)
    first, second = launched(leave_what_is_put_back), launched()
    assert pids(first) == pids(second)
    for name in ("random", "torch", "LEFT", "threads"):
        assert first[0][name] != second[0][name]


class ImportsToAnswer(dict):
    """As transformers' table of configurations."""

    def items(self):
        pytest.fail("asked for its items")


def test_the_state_is_read_without_asking_a_table_that_imports_to_answer(monkeypatch):
    from tp_invariant_recipes.numerics.sums import partial_gradient

    table = ImportsToAnswer(one=1)
    monkeypatch.setattr(partial_gradient, "TABLE", table, raising=False)
    state = process_state.ProcessState()
    assert state.restore() == []
    table["two"] = 2
    assert state.restore() == [f"{partial_gradient.__name__}:TABLE"]


@pytest.mark.parametrize(
    "leak, named",
    (
        (leave_a_function, "megatron.core.parallel_state:get_tensor_model_parallel_rank"),
        pytest.param(
            leave_an_item, "tp_invariant_recipes.numerics.sums.partial_gradient:_waiting", marks=pytest.mark.release
        ),
        pytest.param(
            leave_an_attribute_of_a_class,
            "megatron.core.full_cuda_graph:FullCudaGraphWrapper.left",
            marks=pytest.mark.release,
        ),
        pytest.param(
            one_rank_leaves_something,
            "megatron.core.parallel_state:get_tensor_model_parallel_rank",
            marks=pytest.mark.release,
        ),
        pytest.param(stopped, None, marks=pytest.mark.release),
    ),
)
def test_a_run_that_leaves_something_else_is_the_last_of_its_ranks(launched, tmp_path, leak, named):
    first, second = launched(leak), launched()
    assert not {*pids(first)} & {*pids(second)}
    log = (tmp_path / "run-1" / "logs" / "rank-1.log").read_text()
    says = "this process does not train the next run, which would find other globals: "
    assert log == "a word of run-1\n" + (f"{says}{named}\n" if named else "")


def test_another_layout_or_environment_gets_other_ranks(launched, monkeypatch):
    launched = partial(launched, ranks_=1)
    first, other = launched(), launched(layout="dp2")
    assert pids(first) != pids(other)
    assert pids(launched()) == pids(first)
    assert pids(launched(layout="dp2")) == pids(other)
    monkeypatch.setenv("NVTE_SOMETHING", "1")
    assert pids(launched()) not in (pids(first), pids(other))


@pytest.mark.release
def test_no_more_than_two_layouts_wait(launched):
    first, _, _ = launched(), launched(layout="dp2"), launched(layout="pp2")
    with pytest.raises(ProcessLookupError):
        os.kill(first[0]["pid"], 0)


def test_after_a_failure_all_ranks_are_new(launched):
    first = launched()
    with pytest.raises(ranks.RankFailed, match="no such luck"):
        launched(fail)
    for pid in pids(first):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not {*pids(launched())} & {*pids(first)}


@pytest.mark.release
def test_a_rank_that_was_killed_while_it_waited_is_replaced(launched):
    first = launched()
    os.kill(first[1]["pid"], 9)
    os.waitid(os.P_PID, first[1]["pid"], os.WEXITED | os.WNOWAIT)
    assert not {*pids(launched())} & {*pids(first)}


def hold(run_dir: RunDir, info: RankInfo) -> None:
    """Which locks this process holds."""
    files = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
    found = {"pid": os.getpid(), "locks": sorted(Path(f).parent.name for f in files if f.endswith("write.lock"))}
    (run_dir.path / f"found-{info.rank}.json").write_text(json.dumps(found))


def test_ranks_hold_the_locks_of_their_run_and_of_no_run_before(launched, tmp_path):
    first, second = launched(hold), launched(hold)
    assert pids(first) == pids(second)
    assert [one["locks"] for one in (*first, *second)] == [["run-1"], ["run-1"], ["run-2"], ["run-2"]]
    for n in (1, 2):  # free, while the ranks live
        with (tmp_path / f"run-{n}" / "write.lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.release
def test_at_the_end_no_rank_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(rank.bridge, "load", lambda: None)
    run_dir = RunDir(tmp_path / "run")
    with warm.WarmRanks() as kept:
        info = RankInfo(0, 0, 1, 1, "127.0.0.1", (1,))
        ranks.run(run_dir, "cpu", [info], lambda: None, ranks.Stop(), rank_fn=note, warm=kept)
        pid = json.loads((run_dir.path / "found-0.json").read_text())["pid"]
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# Overrides, the device, and whether the ranks of such a run may train another.
MAY_STAY = (
    ("", "cpu", True),
    ("numerics=stock", "cpu", True),
    ("", "gpu", True),
    ("tp=2", "gpu", False),
    ("dp=2 gbs=2", "gpu", False),
    ("cuda_graph=full", "gpu", False),
    ("numerics=stock cuda_graph=te", "cpu", False),
    ("numerics=stock precision=fp8_tensorwise", "cpu", False),
    ("logging=wandb", "cpu", False),
    ("logging=mlflow", "cpu", False),
    ("logging=comet", "cpu", False),
    ("logging=tensorboard", "cpu", True),
)


@pytest.mark.parametrize("overrides, device, may", MAY_STAY)
def test_runs_that_leave_what_nobody_sees_have_ranks_of_their_own(overrides, device, may):
    composed = compose("qwen3_8b", [*parse_all(overrides.split())], device="gpu").config  # a CPU has no FP8
    config = dataclasses.replace(composed, device=dataclasses.replace(composed.device, kind=device))
    assert warm.may_stay(config) is may


@pytest.mark.parametrize("section", warm.SERVICES)
def test_services_have_ranks_of_their_own(section):
    config = compose("qwen3_toy", [], device="cpu").config
    changed = SimpleNamespace(
        model=config.model,
        logging=config.logging,
        device=config.device,
        parallel=config.parallel,
        bridge={**config.bridge, section: {"enabled": True}},
    )
    assert not warm.may_stay(changed)
