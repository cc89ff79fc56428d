# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a process may use, with a driver that only pretends."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tp_invariant_recipes.machine import gpus

NAMES = ("A", "B", "C", "D")


UUIDS = ("GPU-1a", "GPU-2b", "GPU-2c", "GPU-3d")
SLICES = {"MIG-1": 10 << 30, "MIG-2": 20 << 30}  # of D where it is in MIG mode -> bytes


class Driver(ModuleType):
    """pynvml on a machine with four GPUs, A to D."""

    NVMLError = KeyError
    divided = False  # D

    def __init__(self, count: int = 4, broken: str = ""):
        super().__init__("pynvml")
        self.count, self.broken, self.open = count, broken, 0

    def nvmlInit(self):
        if self.broken == "init":
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return NAMES[handle].encode() if handle % 2 else NAMES[handle]

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return [9, handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=SLICES.get(handle) or (handle + 1) * 2**30)

    def nvmlDeviceGetUUID(self, handle):
        return handle if handle in SLICES else UUIDS[handle].encode() if handle % 2 else UUIDS[handle]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return {3: 7}[handle] if self.divided else {}[handle]  # KeyError: GPUs without the mode

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, number):
        return dict(enumerate(SLICES))[number]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return UUIDS[:2].index(uuid.decode())

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return ["a process"] * (handle + 2)

    def nvmlDeviceGetSerial(self, handle):
        return (b"1654", "1655")[handle]


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_all_of_them_with_what_they_are(driver):
    results = gpus.visible()
    assert [g.name for g in results] == list(NAMES)
    assert results[2] == gpus.Gpu("C", (9, 2), 3 * 2**30)
    assert driver.open == 0


# CUDA_VISIBLE_DEVICES -> what CUDA would show.
CHOSEN = (
    ("0", "A"), ("2,0", "CA"), (" 1 , 3 ", "BD"), ("0,1,2,3", "ABCD"), ("", ""), ("-1", ""), ("NoDevFiles", ""),
    ("0,-1,1", "A"), ("4", ""), ("1,4,2", "B"),
)  # fmt: skip


@pytest.mark.parametrize("chosen, names", CHOSEN, ids=[repr(chosen) for chosen, _ in CHOSEN])
def test_those_that_the_environment_leaves(driver, monkeypatch, chosen, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert "".join(g.name for g in gpus.visible()) == names


# CUDA_VISIBLE_DEVICES -> memory in GiB of what CUDA would show where D is in MIG mode.
NAMED = (
    (None, [1, 2, 3, 10]),
    ("3,0", [10, 1]),
    ("GPU-2c", [3]),
    ("GPU-2c, GPU-1", [3, 1]),
    ("MIG-2", [20]),
    ("MIG-2,0", [20, 1]),
    ("GPU-2", []),  # of two
    ("GPU-3d,GPU-1a", [10, 1]),
    ("GPU-1a,MIG-7,GPU-2b", [1]),
)


@pytest.mark.parametrize("chosen, memory", NAMED, ids=[str(chosen) for chosen, _ in NAMED])
def test_uuids_name_gpus_and_slices_with_their_own_memory(driver, monkeypatch, chosen, memory):
    driver.divided = True
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = gpus.visible()
    assert [gpu.memory // 2**30 for gpu in found] == memory
    assert [gpu.capability for gpu in found] == [(9, 3 if size > 4 else size - 1) for size in memory]


def test_no_driver_no_gpus(driver, monkeypatch):
    driver.broken = "init"
    assert gpus.visible() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import raises ImportError
    assert gpus.visible() == []


def test_the_driver_is_exited_even_when_it_fails(driver):
    driver.count = 5  # one more than it can describe
    with pytest.raises(IndexError):
        gpus.visible()
    assert driver.open == 0


def test_processes_and_serial_of_a_gpu_by_its_uuid(driver):
    assert [(gpus.processes(uuid), gpus.serial(uuid)) for uuid in ("GPU-1a", "GPU-2b")] == [(2, "1654"), (3, "1655")]
    assert (gpus.processes("MIG-1"), gpus.serial(None)) == (0, None)
    driver.broken = "init"
    assert (gpus.processes("GPU-1a"), gpus.serial("GPU-1a")) == (0, None)
