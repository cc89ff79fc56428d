"""examples/pretrain.py under torchrun, with Megatron-Core alone: one result on 1 and 2 ranks; stock has several."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "examples/pretrain.py"
LINE = re.compile(r"step \d: loss \S+, gradient norm \S+")
# The control starts from the weights that the switch gives, so that sums alone can differ.
CONTROL = f"""
import runpy
from megatron.core.models.gpt import GPTModel
from tp_invariant_recipes.numerics.megatron.init import initialise

original = GPTModel.__init__

def begin(self, *args, **kwargs):
    original(self, *args, **kwargs)
    initialise([self], seed=1)

GPTModel.__init__ = begin
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""


def lines(program, size, switch):
    """What `torchrun --nproc-per-node SIZE` prints of losses and gradient norms."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    variables = {"NVTE_TP_INVARIANT_MODE": switch, "TPI_SHARDS": "8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return LINE.findall(done.stdout)


@pytest.mark.release
@pytest.mark.parametrize("switch", ("1", "0"))
def test_it_has_one_result_and_without_the_switch_several(tmp_path, switch):
    program = PROGRAM
    if switch == "0":
        program = tmp_path / "control.py"
        program.write_text(CONTROL)
    first, second = (lines(program, size, switch) for size in (1, 2))
    assert len(first) == len(second) == 3
    assert (first == second) == (switch == "1")
