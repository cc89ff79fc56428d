"""Kernels that Triton's interpreter cannot run are at least compiled, for Hopper and Blackwell, without a GPU."""

import pytest

from tests.unit.kernels.compiled import ptx
from tp_invariant_recipes.kernels import cross_entropy, delta_rule
from tp_invariant_recipes.kernels.gemm import mxfp8
from tp_invariant_recipes.kernels.launch import Kernel

# kernel -> types of its tensors, its numbers, its constants
KERNELS = {
    cross_entropy.SUM: (
        {"logits": "*bf16", "highest": "*fp32", "partials": "*fp32"},
        ("rows", "size"),
        {"SHARD": 19000, "ALIGNMENT": 8, "BLOCK": cross_entropy.BLOCK},
    ),
    cross_entropy.GRADIENT: (
        dict.fromkeys(("highest", "total", "gradient"), "*fp32") | {"index": "*i64", "logits": "*bf16", "out": "*bf16"},
        ("size",),
        {"ALIGNMENT": 8, "BLOCK": cross_entropy.BLOCK},
    ),
}


@pytest.mark.parametrize("architecture", (90, 100))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.kernel.__name__)
def test_it_compiles(kernel, architecture):
    tensors, numbers, constants = KERNELS[kernel]
    names = kernel.kernel.arg_names
    assert names == [*sorted(tensors, key=names.index), *numbers, *constants], "tensors, numbers, constants"
    code = ptx(kernel.kernel, tensors | dict.fromkeys(numbers, "i32"), constants, architecture, num_warps=8)
    assert "ex2" in code  # the exponential


@pytest.mark.parametrize("architecture", (90, pytest.param(100, marks=pytest.mark.release)))
@pytest.mark.parametrize("groups, separate", ((True, 0), (False, 0), (False, mxfp8.VECTOR)))
def test_rounding_to_mxfp8_keeps_subnormal_numbers(architecture, groups, separate):
    """And reads and writes 16 bytes at once."""
    kernel = mxfp8.KERNEL.kernel
    names = kernel.arg_names
    constants = dict(zip(names[7:], (groups, separate, True, True, *mxfp8.TYPES[mxfp8.E4M3], 4), strict=True))
    types = dict.fromkeys(names[:3], "*bf16") | dict.fromkeys(names[3:5], "*i64") | dict.fromkeys(names[5:7], "i32")
    code = ptx(kernel, types, constants, architecture, multiples_of_16=names[:5], **mxfp8.KERNEL.options)
    assert "mul.rn.f32" in code
    assert "ftz" not in code
    assert "ld.global.v4.b32" in code
    assert "st.global.v4.b32" in code
    assert "st.global.b16" not in code


DELTA_RULE = [kernel for kernel in vars(delta_rule).values() if isinstance(kernel, Kernel)]


# ptxas takes seconds for each of these.
LONG = {"_delta_gradients", "_delta_systems", "_delta_state_gradients"}


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=pytest.mark.release) if kernel.kernel.__name__ in LONG else kernel
        for kernel in DELTA_RULE
    ],
    ids=lambda kernel: kernel.kernel.__name__,
)
def test_products_of_the_gated_delta_rule_are_fp32(kernel):
    names = kernel.kernel.arg_names
    sizes = (*delta_rule._constants(delta_rule.Heads(1, 2, 20, 12)), delta_rule.PASSED[0])
    constants = dict(zip(filter(str.isupper, names), sizes, strict=False))
    types = dict.fromkeys(names, "*fp32") | {"size": "i32", "batch": "i32"}
    types |= {name: "*bf16" for name in ("x", "y", "dx") if name in names}
    code = ptx(kernel.kernel, types, constants, num_warps=4, num_stages=2)
    assert "tf32" not in code
    assert "ftz" not in code
