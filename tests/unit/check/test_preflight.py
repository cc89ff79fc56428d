# SPDX-License-Identifier: Apache-2.0
"""What this machine must have for a run: everything it lacks in one message, before anything is written."""

import errno
import os
import re

import pytest

from tp_invariant_recipes.check.hosts import machine
from tp_invariant_recipes.check.hosts.machine import PendingRun, check_start
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError, lines, refuse
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.machine.gpus import Gpu
from tp_invariant_recipes.runs.run_dir import RunDir

ROOM = 2**50  # bytes: tests/unit/sizing/test_memory_room.py asks what does not fit
H200 = Gpu("NVIDIA H200", (9, 0), ROOM)
B300 = Gpu("NVIDIA B300", (10, 3), ROOM)


@pytest.fixture
def machine_with(monkeypatch):
    """Make this machine one with these GPUs, packages and bytes free."""

    def make(result=(), installed=("transformer-engine", "mamba-ssm"), free=2**60):
        monkeypatch.setattr(gpus, "visible", lambda: list(result))
        monkeypatch.setattr(machine, "installed", lambda name: "1.0" if name in installed else None)
        monkeypatch.setattr(machine, "free_bytes", lambda path: free)

    return make


def preflight_check(folder, model, *overrides, device="gpu"):
    tree = compose(model, ["numerics=stock", *overrides], device=device).config
    refuse(lines(check_start(PendingRun(tree, run_dir=RunDir(folder / "run")))))


def preflight_problems(folder, model, *overrides, device="gpu") -> list[str]:
    with pytest.raises(ConfigError) as error:
        preflight_check(folder, model, *overrides, device=device)
    lines = str(error.value).splitlines()
    return lines if len(lines) == 1 else [line.removeprefix("  - ") for line in lines[1:]]


TE, ALL = ("transformer-engine",), ("transformer-engine", "mamba-ssm")
FUSED = "qwen3_toy model.gradient_accumulation_fusion=true"
MUON = "qwen3_toy optimizer.optimizer=muon device=cpu"
# GPUs and packages of a machine, a run, and of each problem its rule and words of it.
LACKING = (
    ([H200] * 8, ALL, "qwen3_8b tp=4 dp=2 gbs=2 save=10", ()),
    ([H200], ALL, "nemotron3_nano cluster=h200", ()),
    ([H200] * 4, TE, "qwen3_8b tp=4", ()),
    ([], (), "qwen3_toy tp=8 dp=2 device=cpu", ()),
    ([H200] * 4, TE, "qwen3_8b tp=4 dp=2 gbs=2", ("gpus: tp=4 * pp=1 * cp=1 * dp=2 = 8 ranks",)),
    ([H200] * 4, TE, "qwen3_8b tp=2 cp=2 pp=2", ("gpus: this machine has 4 GPUs; lower one of them",)),
    ([], TE, "qwen3_8b tp=4", ("gpus: this machine shows no GPU; device=cpu",)),
    ([H200], (), "qwen3_8b", ("gpus: Transformer Engine, which is not installed: make gpu",)),
    ([H200], TE, "nemotron3_nano", ("gpus: mamba-ssm, which is not installed: make gpu",)),
    ([H200], (), "nemotron3_nano", ("gpus: Transformer Engine", "gpus: mamba-ssm")),
    ([], (), MUON, ("optimizer: optimizer.optimizer=muon needs emerging-optimizers",)),
    ([], ("emerging-optimizers",), MUON, ()),
    ([], (), f"{FUSED} device=cpu", ("fused_gradients: only Megatron's own layers on a GPU",)),
    ([H200], TE, f"{FUSED} numerics=tree", ("fused_gradients: only Megatron's own layers on a GPU",)),
    ([H200], TE, FUSED, ()),
    ([H200], ALL, "qwen3_next_toy", ("gpus: flash-linear-attention",)),
    ([H200], ALL, "qwen3_next_toy numerics=tree", ()),
    (
        [B300, H200], TE, "qwen3_8b cluster=h200",
        ("gpus: cluster=h200 is of other GPUs than this machine's NVIDIA B300",),
    ),
    ([B300, H200], TE, "qwen3_8b cluster=b300", ("gpus: other GPUs than this machine's NVIDIA H200",)),
    ([B300, H200], TE, "qwen3_8b cluster=local", ()),
    ([], (), "qwen3_toy cluster=h100 device=cpu", ("gpus: cluster=h100 is of GPU nodes and device=cpu",)),
)  # fmt: skip


@pytest.mark.parametrize("cards, packages, words, says", LACKING)
def test_what_a_machine_lacks(machine_with, tmp_path, cards, packages, words, says):
    machine_with(cards, installed=packages)
    model, *overrides = words.split()
    config = compose(model, ["numerics=stock", *overrides], device="gpu").config
    found = check_start(PendingRun(config, run_dir=RunDir(tmp_path / "run")))
    assert [problem.rule for problem in found] == [line.partition(":")[0] for line in says]
    assert [
        line for problem, line in zip(found, says, strict=True) if line.partition(": ")[2] not in str(problem)
    ] == []
    assert list(tmp_path.iterdir()) == []


def needed(folder, machine, *command, device="gpu") -> int:
    """MiB that a run says it needs, after checking that just as many are enough and fewer are not."""
    machine([H200], free=0)
    (problem,) = preflight_problems(folder, *command, device=device)
    mib = int(re.search(r"at least (\d+) MiB", problem)[1])
    machine([H200], free=(mib + 1) * 2**20)
    preflight_check(folder, *command, device=device)
    machine([H200], free=(mib - 1) * 2**20)
    (problem,) = preflight_problems(folder, *command, device=device)
    assert problem.startswith(f"{folder}/run has {mib - 1:.1f} MiB free and this run writes at least {mib} MiB; free")
    assert problem.endswith(", set run.dir=PATH on another disk" + (", or save=0" if "save=10" in command else ""))
    return mib


def test_the_index_of_short_sequences_is_counted(machine_with, tmp_path):
    """64 MiB did not suffice: 6.4 million samples have 12 bytes each."""
    assert 80 < needed(tmp_path, machine_with, "qwen3_toy", "seq=32", device="cpu") < 90


def test_a_disk_without_inodes_is_refused(machine_with, tmp_path, monkeypatch):
    machine_with([H200], free=2**40)
    monkeypatch.setattr(machine, "no_inodes", lambda path: True)
    monkeypatch.setattr(machine, "shortage", lambda path: "no inodes are left")
    assert preflight_problems(tmp_path, "qwen3_toy", device="cpu") == [
        "no inodes are left; remove files, or set run.dir=PATH on another disk"
    ]


def test_a_disk_too_small_for_a_checkpoint(machine_with, tmp_path):
    without, with_ = (needed(tmp_path, machine_with, "qwen3_8b", *save) for save in ((), ("save=10",)))
    weights = 8_190_735_360  # of Qwen3-8B; each in bf16, and in fp32 itself and its first and second moment
    assert with_ - without == pytest.approx(weights * (2 + 4 + 4 + 4) / 2**20, abs=1)


def test_digests_of_many_experts_need_room(machine_with, tmp_path):
    """1.5 MB a step, if each expert has digests: gradients before and after clipping and master weights of 48 layers of
    128 experts, and moments at every tenth step.
    """
    machine_with([H200] * 8, free=2**30)
    arguments = ("qwen3_30b_a3b", "tp=4", "iters=10000")
    run = (*arguments, "ledger.experts=each")
    (problem,) = preflight_problems(tmp_path, *run)
    assert re.search(
        r"writes at least 1[01]\d{3} MiB; free some, set run.dir=PATH on another disk, record digests less", problem
    )
    preflight_check(tmp_path, *arguments)
    preflight_check(tmp_path, *run, "ledger.digests=100", "ledger.state_digests=0")
    preflight_check(tmp_path, *run, "ledger.digests=0")


def test_a_patch_that_cannot_be_applied_is_reported_with_all_else(machine_with, tmp_path):
    machine_with()
    problems = preflight_problems(tmp_path, "qwen3_8b", "patches.off=[core-save]")
    assert problems[0].startswith("device=gpu, but this machine shows no GPU")
    assert any(line.startswith("patches.off=core-save: no such patch; the patches are core-save-") for line in problems)


def test_flash_attn_by_the_environment(machine_with, tmp_path, monkeypatch):
    """Megatron sets the variable itself, so a rank cannot tell who asked."""
    machine_with([H200])
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    preflight_check(tmp_path, "qwen3_0p6b", "numerics=tree")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    preflight_check(tmp_path, "qwen3_0p6b", "numerics=stock")
    (problem,) = preflight_problems(tmp_path, "qwen3_toy", "numerics=tree", device="cpu")
    assert problem == "NVTE_FLASH_ATTN=1 in the environment: nothing reads it with device=cpu; unset it"
    for mode in ("tree", "gather"):
        (problem,) = preflight_problems(tmp_path, "qwen3_0p6b", f"numerics={mode}")
        assert problem.startswith("NVTE_FLASH_ATTN=1 in the environment: flash-attn's backward")
        assert problem.endswith("unset it or set NVTE_FLASH_ATTN=0, or numerics=stock")


INTERFACES = (  # variable, a value, whether the machine has it
    ("GLOO_SOCKET_IFNAME", "ib0", False), ("GLOO_SOCKET_IFNAME", "lo", True),
    ("GLOO_SOCKET_IFNAME", "lo,ib0", False), ("GLOO_SOCKET_IFNAME", "eth", False),
    ("NCCL_SOCKET_IFNAME", "eth", True), ("NCCL_SOCKET_IFNAME", "=eth", False),
    ("NCCL_SOCKET_IFNAME", "=eth0", True), ("NCCL_SOCKET_IFNAME", "^docker", True),
    ("NCCL_SOCKET_IFNAME", "ib,mlx", False),
)  # fmt: skip


@pytest.mark.parametrize("variable, value, present", INTERFACES)
def test_a_network_interface_that_is_not_here(machine_with, tmp_path, monkeypatch, variable, value, present):
    machine_with([H200])
    monkeypatch.setattr(machine.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv(variable, value)
    if present:
        preflight_check(tmp_path, "qwen3_0p6b")
    else:
        (problem,) = preflight_problems(tmp_path, "qwen3_0p6b")
        assert problem.startswith(
            f"{variable}={value}: this machine has no such network interface, but eth0, lo; unset"
        )


def test_a_machine_without_loopback(machine_with, tmp_path, monkeypatch):
    """A sandbox without a network: torch would try to reach its store for minutes."""
    machine_with()

    def unreachable(*_, **__):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(machine.socket, "create_connection", unreachable)
    (problem,) = preflight_problems(tmp_path, "qwen3_toy", device="cpu")
    assert problem.startswith(
        "ranks meet at 127.0.0.1, which no process of this machine reaches: Network is unreachable"
    )


def test_a_rank_of_torchrun_starts_no_ranks(machine_with, tmp_path, monkeypatch):
    machine_with([], ALL)
    preflight_check(tmp_path, "qwen3_toy", device="cpu")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    (problem,) = preflight_problems(tmp_path, "qwen3_toy", device="cpu")
    assert problem == "torchrun has started this process as a rank; tpi.pretrain(tpi.recipe(…)) starts no other"
