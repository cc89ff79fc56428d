# SPDX-License-Identifier: Apache-2.0
"""A run that cannot fit the memory of its GPUs or of its node is refused with the figures, before anything starts."""

import json

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.machine import processor as host
from tp_invariant_recipes.machine.gpus import Gpu
from tp_invariant_recipes.sizing import available_memory
from tp_invariant_recipes.sizing import memory as estimates
from tp_invariant_recipes.sizing.memory import GIB


@pytest.fixture
def machine_memory(monkeypatch):
    """Make this machine one with GPUs of so many GiB, or with so many GiB for processes."""

    def make(*, gpu: float = 0, count: int = 8, node: float | None = None):
        result = [Gpu("GPU", (9, 0), int(gpu * GIB))] * (count if gpu else 0)
        monkeypatch.setattr(gpus, "visible", lambda: result)
        monkeypatch.setattr(host, "available", lambda: None if node is None else int(node * GIB))

    return make


def memory_problems(model: str, overrides: str = "", device: str = "gpu", *, here: bool = True) -> list[str]:
    return available_memory.problems(compose(model, overrides.split(), device=device).config, here=here)


# Model, overrides, whether an H200 can hold a rank of it: published sizes, 18 bytes a parameter beside activations.
ON_H200 = (
    ("qwen3_8b", "tp=1", False), ("qwen3_8b", "tp=4 seq=65536", True), ("qwen3_8b", "tp=4 seq=262144", False),
    ("qwen3_30b_a3b", "tp=4", False), ("qwen3_30b_a3b", "tp=4 ep=4", True),
)  # fmt: skip


@pytest.mark.parametrize("model, overrides, fits", ON_H200)
def test_a_gpu(machine_memory, model, overrides, fits):
    machine_memory(gpu=139.8)
    problems = memory_problems(model, overrides)
    assert (not problems) is fits
    if not fits:
        assert "a GPU of this machine has 139.8 GiB" in problems[0]
        assert "device.check_memory=false" in problems[0]


def test_a_key_starts_it_anyway(machine_memory):
    machine_memory(gpu=20)
    assert memory_problems("qwen3_8b") != []
    assert memory_problems("qwen3_8b", "device.check_memory=false") == []


def test_the_message_has_the_figures_and_the_keys(machine_memory):
    """Figures of 8.19e9 parameters: 2, 4 and 12 bytes each."""
    machine_memory(gpu=79.6)
    (result,) = memory_problems("qwen3_8b", "mbs=2 gbs=2 numerics=stock")
    lines = dict(line.split()[:2] for line in result.splitlines()[1:8])
    assert float(lines["weights"]) == pytest.approx(8.19e9 * 2 / GIB, rel=0.001)
    assert float(lines["gradients"]) == pytest.approx(8.19e9 * 4 / GIB, rel=0.001)
    assert float(lines["optimizer"]) == pytest.approx(8.19e9 * 12 / GIB, rel=0.001)
    for key in ("tp=", "pp=", "dp=", "mbs=", "seq=", "model.recompute_granularity=full"):
        assert key in result


# Overrides, ranks, and GiB of a node that one rank fits and all together do not.
NODES = (("tp=4", 4, 100), ("dp=2 gbs=2", 2, 250))


@pytest.mark.parametrize("overrides, ranks, size", NODES)
def test_ranks_on_a_cpu_share_the_memory_of_their_node(machine_memory, overrides, ranks, size):
    machine_memory(node=size)
    (result,) = memory_problems("qwen3_8b", overrides, "cpu")
    assert f"a node, {ranks} ranks" in result
    assert f"this machine has {size}.0 GiB" in result
    machine_memory(node=size * ranks)
    assert memory_problems("qwen3_8b", overrides, "cpu") == []


def test_a_job_is_for_the_gpus_of_its_cluster(machine_memory):
    machine_memory()
    assert "a GPU of cluster=h100 has 79.6 GiB" in memory_problems("qwen3_8b", "tp=1 cluster=h100", here=False)[0]
    assert "139.8" in memory_problems("qwen3_8b", "tp=1 cluster=h200", here=False)[0]
    assert memory_problems("qwen3_8b", "tp=1 cluster=b300", here=False) == []
    assert memory_problems("qwen3_8b", "tp=4 cluster=h100", here=False) == []
    assert memory_problems("qwen3_8b", "tp=4 cluster=h100 cluster.gpu_memory=24", here=False) != []


def test_a_dry_submission_says_it_and_a_submission_is_refused_for_it(cli, no_gpus):
    """Beside what else is wrong with the job."""
    ended = cli("submit", "qwen3_8b", "tp=4", "cluster=h100", "slurm.time=60", "--dry-run")
    assert ended.status == 0
    assert "the fullest rank needs about 41.2 GiB; a GPU of cluster=h100 has 79.6 GiB" in ended.err
    refused = cli("submit", "qwen3_8b", "cluster=h100", "slurm.time=never", "--dry-run")
    assert (refused.status, refused.out) == (2, "")
    assert "this run needs about 158.0 GiB on a GPU" in refused.err
    assert "slurm.time=never" in refused.err


def submitted(cli, *overrides: str):
    return cli("submit", "qwen3_8b", *overrides, "slurm.time=60", "--verify", "--dry-run")


def test_a_cell_that_does_not_fit_is_omitted_with_its_figures(cli, no_gpus, here):
    ended = submitted(cli, "tp=1,4,8", "cluster=h100")
    assert ended.status == 0, ended.err
    assert (
        "left out: tp=1: this run needs about 158.0 GiB on a GPU, and a GPU of cluster=h100 has 79.6 GiB\n" in ended.err
    )
    assert "array of 2 configurations" in ended.err
    assert "warning" not in ended.err


@pytest.mark.parametrize("overrides, large", (("tp=1,2 seq=8192", 2), ("tp=1,4", 1)))
def test_fewer_than_two_cells_that_fit_are_an_error(cli, no_gpus, here, overrides, large):
    ended = submitted(cli, *overrides.split(), "cluster=h100")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("this run needs about") == ended.err.count("lower it: raise tp= or pp=") == large


def test_a_run_near_the_limit_starts_with_a_warning(machine_memory):
    config = compose("qwen3_8b", ["tp=2"], device="gpu").config
    need = estimates.estimate(config).rank / GIB
    for size, warned in ((need / 0.94, False), (need / 0.96, True), (need, True), (need / 1.5, False)):
        machine_memory(gpu=size)
        line = available_memory.warning(config, here=True)
        assert (line is not None) is warned, available_memory
        assert line is None or ("memory is tight: this run needs about 80.6 GiB" in line and "raise tp=" in line)
    assert available_memory.problems(config, here=True) != []  # the last does not start at all


def test_a_submission_prints_what_may_end_it_early(cli, no_gpus, here):
    tight = ("submit", "qwen3_8b", "tp=2", "cluster=h100", "--dry-run")
    ended = cli(*tight, "slurm.time=4:00:00")
    assert "\nwarning: memory is tight: this run needs about 79.9 GiB on a GPU" in ended.err
    assert "\nwarning: save=0: a run of slurm.time=4:00:00" in ended.err
    assert "save=N saves every N steps" in ended.err
    quiet = "warning: save=0"
    assert quiet not in cli(*tight, "slurm.time=4:00:00", "save=10").err
    assert quiet not in cli(*tight, "slurm.time=1:00:00").err
    assert len(json.loads(cli(*tight, "slurm.time=4:00:00", "--json").out)["warnings"]) == 2


@pytest.mark.parametrize("command", ("train", "bench", "audit --against seed=2"))
def test_every_command_that_trains_refuses(cli, machine_memory, here, command):
    machine_memory(node=23)
    ended = cli(*command.split(), "qwen3_8b", "tp=2", "device=cpu")
    assert (ended.status, ended.out) == (2, "")
    assert "this machine has 23.0 GiB" in ended.err
    assert [file.name for file in here.iterdir()] == ["taken"]


def test_only_what_clearly_does_not_fit_is_refused(machine_memory):
    """What is counted does not fit, or what is estimated does not even if it is less by the estimate's error."""
    config = compose("qwen3_8b", ["tp=4", "seq=8192"], device="gpu").config
    need = estimates.estimate(config)
    counted = sum(need.parts[part] for part in estimates.COUNTED)
    estimated = need.rank - counted - need.parts[estimates.UNUSED]
    least = (counted + estimated * (1 - available_memory.ERROR)) / GIB
    assert least < 0.97 * need.rank / GIB
    machine_memory(gpu=least + 0.1)
    assert available_memory.problems(config, here=True) == []
    machine_memory(gpu=least - 0.1)
    assert available_memory.problems(config, here=True) != []


def test_parts_that_a_key_moves_elsewhere_do_not_count(machine_memory):
    machine_memory(gpu=80)
    config = compose("qwen3_8b", ["tp=1"], device="gpu").config
    assert available_memory.problems(config, here=True) != []
    offloaded = config.with_fields("optimizer", optimizer_cpu_offload=True)
    assert available_memory.problems(offloaded, here=True) == []
    assert available_memory.table(estimates.estimate(offloaded))[-1].startswith("optimizer.optimizer_cpu_offload:")


MEMINFO = "MemTotal:  24000000 kB\nMemFree:  1000 kB\nMemAvailable:   23000000 kB\n"


@pytest.fixture
def groups(tmp_path):
    """A /proc and a /sys/fs/cgroup of these files."""

    def make(line: str, **files: str):
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(MEMINFO)
        (proc / "self" / "cgroup").write_text(line)
        for name, text in files.items():
            file = cgroups / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return host.available(proc, cgroups)

    return make


def test_memory_of_a_machine_without_limits(groups):
    assert groups("0::/\n") == 23000000 * 1024


def test_the_limit_of_a_group_further_up_counts(groups):
    """As SLURM sets it on a job's step. File pages that the kernel gives up are not in use."""
    job = {"job__memory_dot_max": "5000\n", "job__memory_dot_current": "3000\n"}
    stat = {"job__memory_dot_stat": "anon 1\ninactive_file 500\n"}
    assert groups("0::/job/step\n", job__step__memory_dot_max="max\n", **job, **stat) == 2500


def test_limits_of_the_older_groups_count(groups):
    files = ("limit_in_bytes", "9000"), ("usage_in_bytes", "1000"), ("stat", "total_inactive_file 0")
    named = {f"memory__box__memory_dot_{name}": text for name, text in files}
    assert groups("4:cpu,memory:/box\n3:cpuset:/\n", **named) == 8000


def test_a_machine_that_does_not_say(tmp_path):
    assert host.available(tmp_path, tmp_path) is None
