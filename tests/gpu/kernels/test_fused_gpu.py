"""What stands for Megatron's compiled functions has their bits, and no rank imports torch's compiler for them."""

import subprocess
import sys

import pytest
import torch
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu

from tests.operands import same_bits
from tp_invariant_recipes.kernels import swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DTYPES = (torch.bfloat16, torch.float32)


def numbers(*shape, dtype, seed):
    """Of all magnitudes, with infinities and NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, device="cuda", generator=generator)
    x *= torch.pow(2.0, torch.randint(-12, 8, shape, device="cuda", generator=generator))
    x.view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", (64, 768, 3000, 3072, 12288))
def test_swiglu(features, dtype):
    x, dy = (numbers(517, width, dtype=dtype, seed=n) for n, width in enumerate((2 * features, features)))
    assert same_bits(swiglu.swiglu(x), fused_bias_swiglu.swiglu(x))
    assert same_bits(swiglu.swiglu_backward(dy, x), fused_bias_swiglu.swiglu_back(dy, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_addition(dtype):
    x, residual = (numbers(517, 1, 4096, dtype=dtype, seed=n) for n in range(2))
    assert same_bits(residual + x, fused_bias_dropout.bias_dropout_add_fused_train((x, None), residual, 0.0))


# Prints whether the compiler is imported when a step ends.
RUN = """
import sys
from tp_invariant_recipes.features.train import rank
train = rank.train
def started(*arguments):
    from megatron.bridge.training import train as loop
    step = loop.train_step
    def train_step(*args, **kwargs):
        result = step(*args, **kwargs)
        print("COMPILER", "torch._inductor.compile_fx" in sys.modules, flush=True)
        return result
    loop.train_step = train_step
    train(*arguments)
rank.train = started
from tp_invariant_recipes.cli.main import main
main()
"""


@pytest.mark.parametrize("mode, imported", (("tree", False), ("portable", False), ("stock", True)))
def test_no_rank_imports_the_compiler_for_its_first_step(tmp_path, mode, imported):
    """The second start, which does not call Bridge's recipe: that imports the compiler, and ranks are forked."""
    for run in ("first", "second"):
        words = ("train", "qwen3_toy", "iters=1", f"numerics={mode}", f"run.dir={tmp_path}/{run}")
        subprocess.run([sys.executable, "-c", RUN, *words], check=True, timeout=120)
    assert f"COMPILER {imported}" in (tmp_path / "second" / "logs" / "rank-0.log").read_text()
