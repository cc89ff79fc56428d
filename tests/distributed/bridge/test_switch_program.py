"""examples/pretrain.py: one result on 1 and 2 ranks of a CPU; without the switch several."""

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import become

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"step \d: loss \S+, gradient norm \S+")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program, where ranks may write beside it."""
    return Path(shutil.copy(ROOT / "examples/pretrain.py", tmp_path_factory.mktemp("program")))


def _invariant_weights():
    """The control starts from the weights that the switch gives, so that sums alone can differ."""
    from megatron.core.models.gpt import GPTModel

    from tp_invariant_recipes.numerics.megatron.init import initialise

    original = GPTModel.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        initialise([self], seed=1)

    GPTModel.__init__ = __init__


def lines(program, size, switch):
    """What `torchrun --nproc-per-node SIZE` prints: its ranks are forks of this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = program.parent / f"{switch}-{size}"
    folder.mkdir()
    variables = {"NVTE_TP_INVARIANT_MODE": switch, "TPI_SHARDS": "8", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:

            def run(rank=rank):
                os.environ |= variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                sys.modules.pop("tp_invariant_recipes.invariant", None)  # a test may have imported it, switched off
                if switch == "0":
                    _invariant_weights()
                runpy.run_path(str(program), run_name="__main__")

            files = [os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT) for name in ("out", "err")]
            become([str(program)], [0, *files], run)
        pids.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ends == [0] * size, (folder / f"err-{size - 1}").read_text()[-3000:]
    return LINE.findall((folder / "out-0").read_text())


@pytest.mark.release
def test_it_has_one_result(bridge, program):
    first, second = (lines(program, size, "1") for size in (1, 2))
    assert len(first) == 3
    assert first == second


@pytest.mark.release
def test_without_the_switch_it_has_several(bridge, program):
    first, second = (lines(program, size, "0") for size in (1, 2))
    assert len(first) == len(second) == 3
    assert first != second


@pytest.mark.release
def test_torchrun_prints_the_same(bridge, program):
    """In processes of its own, with Megatron-Core alone."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)],
        capture_output=True, text=True,
        env=os.environ | {"NVTE_TP_INVARIANT_MODE": "1", "TPI_SHARDS": "8", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    repeated = program.parent / "again"
    repeated.mkdir()
    (repeated / program.name).write_text(program.read_text())
    assert LINE.findall(done.stdout) == lines(repeated / program.name, 1, "1")
