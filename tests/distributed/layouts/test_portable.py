# SPDX-License-Identifier: Apache-2.0
"""`numerics=portable` on a CPU: other arithmetic shows, and is refused. Layouts: rows.py."""

import json
import re
from pathlib import Path

import pytest

from tests.distributed.faults import fewer_kept_bits
from tests.distributed.layouts.rows import (
    PORTABLE,
    PORTABLE_EXPERTS,
    PORTABLE_LATENT,
    PORTABLE_NEXT,
    PORTABLE_SMALL,
    PORTABLE_YARN,
)
from tests.distributed.small_models import SHORTEST

pytestmark = pytest.mark.usefixtures("portable_loops")

REFUSED = (
    r"numerics=portable: this CPU \(\w+\) is not bitwise identical to the definition, .*: bf16/\w+: \d+ of \d+ outputs "
    r"differ, the first at \[\d+, \d+\]: recorded 0x\w{8}, computed 0x\w{8}; .*or numerics=tree"
)


def test_tree_has_another_ledger(scenario):
    tree, portable = (scenario(words, "tp=1").ledger() for words in (SHORTEST, PORTABLE))
    assert tree[0].gradients != portable[0].gradients


def test_scaled_frequencies_are_those_of_megatron(bridge):
    """To what fp32 rounds away: Megatron computes them in fp32."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary

    expected = RotaryEmbedding(
        128, 1.0, rotary_base=500000, rope_scaling=True, rope_scaling_factor=8.0, use_cpu_initialization=True
    )
    actual = ieee_rotary._scaled(ieee_rotary._frequencies(128, 500000), 8.0)
    assert actual == pytest.approx(expected.inv_freq.double().numpy(), rel=3e-6)
    plain = ieee_rotary._frequencies(128, 500000)
    kept, divided = actual == plain, actual == plain / 8
    assert kept.any()
    assert divided.any()
    assert not (kept | divided).all()


def _steps_of_eight() -> None:
    """Zeros change no step: with eight between every eight numbers, a step of 16 adds eight products."""
    import torch

    from tp_invariant_recipes.kernels.cpu import tensor_core_cpu

    original = tensor_core_cpu.gemm

    def spread(x, dim):
        x = x.movedim(dim, -1)
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
        return torch.nn.functional.pad(x, (0, 8)).flatten(-2).movedim(-1, dim)

    tensor_core_cpu.gemm = lambda a, b, **kept: original(spread(a, 1), spread(b, 0), **kept)


@pytest.mark.parametrize("arithmetic", (fewer_kept_bits, pytest.param(_steps_of_eight, marks=pytest.mark.release)))
def test_a_machine_with_other_products_is_refused(tpi, arithmetic):
    refused = tpi("train", *PORTABLE.split(), "run.dir=refused", before=arithmetic, status=2)
    assert refused.stderr.count(") is not bitwise identical to the definition") == 1
    assert re.search(REFUSED, " ".join(refused.stderr.split()))


# torch's operations on floating-point numbers that have one result on every machine: they move or convert bytes, or
# round an element once, or are exact.
STATED = {
    "_to_copy", "_unsafe_view", "_reshape_alias", "_reshape_copy", "_foreach_copy_", "_foreach_zero_", "alias",
    "arange", "as_strided", "cat", "chunk", "clone", "contiguous", "copy_", "copysign", "detach", "detach_",
    "empty", "empty_like", "empty_strided", "expand", "fill_", "flatten", "full", "full_like", "gather", "index",
    "index_copy_", "index_put_", "lift_fresh", "masked_fill", "masked_fill_", "narrow", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute", "repeat", "reshape",
    "resize_", "select", "select_backward", "set_", "slice", "slice_backward", "split", "split_with_sizes",
    "squeeze", "stack", "t", "to", "transpose", "tril", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    "zero_", "zeros", "zeros_like", "_foreach_add_", "add", "add_", "div", "div_", "mul", "mul_", "neg", "rsub",
    "sub", "sub_", "_local_scalar_dense", "abs", "all", "amax", "aminmax", "any", "bitwise_and", "clamp", "clamp_",
    "clamp_min", "eq", "equal", "frexp", "ge", "gt", "is_same_size", "isfinite", "isinf", "isnan", "item", "le",
    "lt", "max", "maximum", "ne", "scalar_tensor", "sign", "sort", "where",
}  # fmt: skip
# Others, and the files that call them: nobody reads the result, or it is exact there.
ELSEWHERE = {
    ("_allgather_base_", "megatron/core/timers.py"): "times",
    ("allreduce_", "megatron/bridge/training/setup.py"): "the time of the start",
    ("allreduce_", "megatron/bridge/training/train.py"): "the loss: fp64, exact",
    ("allreduce_", "megatron/bridge/training/utils/train_utils.py"): "a maximum",
    ("index_add_", "tp_invariant_recipes/kernels/row_sums.py"): "rows in order, each rounded once: its definition",
    ("linalg_vector_norm", "megatron/core/distributed/param_and_grad_buffer.py"): "asked whether it is NaN",
    ("normal_", "megatron/core/tensor_parallel/layers.py"): "weights that megatron/init.py replaces",
    ("pow", "megatron/core/models/common/embeddings/rotary_pos_embedding.py"): "frequencies: only the shape counts",
    ("reciprocal", "megatron/core/models/common/embeddings/rotary_pos_embedding.py"): "the same",
    ("allreduce_", "megatron/core/transformer/moe/moe_logging.py"): "a router's statistics, which are logged only",
    ("normal_", "megatron/core/transformer/moe/router.py"): "weights that megatron/init.py replaces",
    ("allreduce_", "megatron/core/transformer/moe/moe_utils.py"): "experts' tokens, which are whole numbers",
    ("sum", "megatron/core/transformer/moe/moe_utils.py"): "the same",
    ("uniform_", "megatron/core/ssm/gated_delta_net/common.py"): "weights that megatron/init.py replaces",
    **{
        (operation, "megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py"): "only the shape counts"
        for operation in ("cos", "pow", "reciprocal", "sin")
    },
    ("sum", "megatron/core/transformer/moe/moe_logging.py"): "a router's statistics, which are logged only",
    ("sum", "tp_invariant_recipes/numerics/megatron/router.py"): "the balancing loss's value, which is logged only",
    ("sum", "megatron/bridge/training/losses.py"): "of loss masks, which are whole numbers",
    ("sum", "tp_invariant_recipes/portable/training.py"): "of loss masks, which are whole numbers",
}


def _listing_operations() -> None:
    """Write every operation of torch on floating-point numbers, and the file that called it."""
    import traceback

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from tp_invariant_recipes.training import rank

    passed_over = ("/torch/", "/tp_invariant_recipes/cpu_host/", "/function_modes.py", "/tests/")

    class Listing(TorchDispatchMode):
        operations: set[tuple[str, str]]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.split("::")[1]
            if name == "sum" and args[0].numel() == out.numel():
                return out  # of single numbers: it changes the shape
            if name not in STATED and any(
                isinstance(x, torch.Tensor) and x.is_floating_point() for x in tree_leaves((args, kwargs, out))
            ):
                files = [frame.filename for frame in traceback.extract_stack()]
                caller = next(file for file in reversed(files) if not any(part in file for part in passed_over))
                self.operations.add((name, "/".join(caller.split("/site-packages/")[-1].split("/")[-6:])))
            return out

    original = rank.pretrain

    def pretrain(*args, **kwargs):
        with Listing() as listing:
            listing.operations = set()
            try:
                return original(*args, **kwargs)
            finally:
                Path("operations.json").write_text(json.dumps(sorted(listing.operations)))

    rank.pretrain = pretrain


def _not_stated(scenario, *words: str) -> list[str]:
    """The operations of a run that are neither stated nor in the table."""
    listed = scenario(*words, "ledger.digests=0").planted(_listing_operations)
    listed.ledger()
    results = json.loads((scenario.tpi.folder / "operations.json").read_text())
    return [
        f"{operation} in {file}"
        for operation, file in results
        if not any(operation == known and file.endswith(place) for known, place in ELSEWHERE)
    ]


@pytest.mark.release
@pytest.mark.parametrize(
    "model",
    (PORTABLE_SMALL, PORTABLE_EXPERTS, PORTABLE_LATENT, PORTABLE_YARN, PORTABLE_NEXT),
    ids=("dense", "experts", "latent", "yarn", "delta"),
)
def test_a_run_has_stated_operations_only(scenario, model):
    assert _not_stated(scenario, model) == []


@pytest.mark.release
def test_a_run_of_tree_has_others(scenario):
    """The control: attention and norms of a library."""
    result = " ".join(_not_stated(scenario, PORTABLE_SMALL, "numerics=tree"))
    assert "bmm in " in result or "mm in " in result
