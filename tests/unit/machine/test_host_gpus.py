"""Which GPUs a process may use, with a driver that only pretends."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tp_invariant_recipes.machine import gpus

NAMES = ("A", "B", "C", "D")


class Driver(ModuleType):
    """pynvml on a machine with four GPUs, A to D."""

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
        return SimpleNamespace(total=(handle + 1) * 2**30)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return (b"GPU-1a", b"GPU-2b").index(uuid)

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
    ("0", "A"),
    ("2,0", "CA"),
    (" 1 , 3 ", "BD"),
    ("0,1,2,3", "ABCD"),
    ("", ""),
    ("-1", ""),
    ("NoDevFiles", ""),
    ("0,-1,1", "A"),
    ("4", ""),
    ("1,4,2", "B"),
)


@pytest.mark.parametrize("chosen, names", CHOSEN, ids=[repr(chosen) for chosen, _ in CHOSEN])
def test_those_that_the_environment_leaves(driver, monkeypatch, chosen, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert "".join(g.name for g in gpus.visible()) == names


@pytest.mark.parametrize(
    "chosen, count",
    (("GPU-1a", 1), ("GPU-1a,GPU-2b", 2), ("MIG-1,MIG-2,MIG-3", 3), ("GPU-1,GPU-2,GPU-3,GPU-4,GPU-5", 4)),
)
def test_as_many_as_are_named_by_their_uuid(driver, monkeypatch, chosen, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert len(gpus.visible()) == count


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
