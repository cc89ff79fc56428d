# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's modules that a program builds itself, under the switch: one result for every tp, or a refusal.

Here a stand-in is Transformer Engine; tests/gpu/test_te_modules_gpu.py runs the same cases with the real one.
"""

import inspect
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests import te_cases, te_standin
from tests.distributed.ranks import megatron, on_ranks, unequal
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.megatron import te_modules
from tp_invariant_recipes.replacement import apply

V = te_cases.SHARDS
DEGREES = (1, 4)


def refuse(problems):
    if problems:
        raise ConfigError("\n".join(problems), problems)


def invariant_modules():
    te = te_standin.install()
    apply(te_modules.replacements(V, refuse))
    return te


def every_case(mesh, switched):
    with megatron(mesh):
        te = invariant_modules() if switched else te_standin.install()
        cases = (*te_cases.CASES, *(te_cases.UNSPLIT if mesh.size == 1 else ()))
        return {case: te_cases.ran(te, case, mesh, "cpu") for case in cases}


@pytest.fixture(scope="module")
def results(bridge):
    """(switched on, tp) → case → tensors of the whole."""
    ranks = {(on, tp): on_ranks(tp, V, every_case, on) for on in (True, False) for tp in DEGREES}
    return {key: te_cases.whole(held) for key, held in ranks.items()}


@pytest.mark.parametrize("case", te_cases.CASES, ids=str)
def test_every_tp_has_one_result_that_is_near_to_stocks(results, case):
    """Switched off it has several: a row-parallel module sums in its forward, another in its backward pass."""
    single, stock = results[True, 1][case], results[False, 1][case]
    assert unequal(single, results[True, 4][case]) == []
    summed = "output" if case.mode == "row" else "input gradient"
    assert summed in unequal(stock, results[False, 4][case])
    te_cases.assert_near(single, stock, case)


@pytest.mark.parametrize("case", te_cases.CASES, ids=str)
def test_a_module_without_parallel_mode_is_the_reference(results, case):
    """With its control: stock modules have other bits in what they sum over ranks."""
    summed = "output" if case.mode == "row" else "input gradient"
    for tp, on in product(DEGREES, (True, False)):
        different = te_cases.unlike_unsplit(results[on, 1], results[on, tp], case)
        assert different == [] if on else (summed in different or tp == 1)


# (module, arguments) -> the beginning of every problem.
REFUSED = (
    ("LayerNormMLP", {}, ["transformer_engine LayerNormMLP has no invariant version"]),
    ("TransformerLayer", {}, ["transformer_engine TransformerLayer has no invariant version"]),
    ("MultiheadAttention", {}, ["transformer_engine MultiheadAttention has no invariant version"]),
    ("GroupedLinear", {}, ["transformer_engine GroupedLinear has no invariant version"]),
    ("DotProductAttention", {}, ["transformer_engine DotProductAttention has no invariant version"]),
    *(
        ("Linear", {"parallel_mode": "column", name: True, "ub_name": "q"}, [f"transformer_engine Linear: {name}=True"])
        for name in ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
    ),
    (
        "Linear",
        {
            "parallel_mode": "row", "in_features": 66, "delay_wgrad_compute": True, "return_bias": True,
            "params_dtype": torch.float16, "symmetric_ar_type": "one_shot", "save_original_input": True, "tp_size": 8,
        },
        [
            f"transformer_engine Linear: {problem}"
            for problem in (
                "return_bias=True", "params_dtype=torch.float16", "delay_wgrad_compute=True",
                "symmetric_ar_type=one_shot", "save_original_input=True: the invariant numerics do not know",
                "tp_size=8 does not divide the 4 virtual shards", "in_features=66: 4 virtual shards",
            )
        ],
    ),
    (
        "Linear",
        {"sequence_parallel": True, "tp_size": 2},
        ["transformer_engine Linear: sequence_parallel=True without parallel_mode"],
    ),
    (
        "Linear",
        {"parallel_mode": "column", "out_features": 12, "parameters_split": ("gate", "up")},
        ["transformer_engine Linear: out_features: 4 virtual shards (TPI_SHARDS) do not divide a matrix of 6 rows"],
    ),
    (
        "LayerNormLinear",
        {"parallel_mode": "row", "zero_centered_gamma": True, "return_layernorm_output_gathered": True},
        [
            f"transformer_engine LayerNormLinear: {problem}"
            for problem in (
                "return_layernorm_output_gathered=True", "zero_centered_gamma=True", "parallel_mode=row",
            )
        ],
    ),
)  # fmt: skip


@pytest.fixture
def modules(monkeypatch):
    """The stand-in, switched on for the length of a test."""
    import sys

    for name in (
        "transformer_engine",
        *(f"transformer_engine.{n}" for n in ("pytorch", "pytorch.ops", "pytorch.quantization")),
    ):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    te = te_standin.install()
    restore = apply(te_modules.replacements(V, refuse))
    yield te
    restore()


@pytest.mark.parametrize("module, arguments, problems", REFUSED)
def test_what_is_not_covered_is_refused_when_it_is_built(modules, module, arguments, problems):
    with pytest.raises(ConfigError) as error:
        getattr(modules, module)(**{"in_features": 64, "out_features": 64} | arguments)
    assert len(error.value.problems) == len(problems)
    for problem, expected in zip(error.value.problems, problems, strict=True):
        assert problem.startswith(expected)


def test_every_argument_has_a_rule():
    """One that a later version adds is refused unless it has its default."""
    for module in (te_standin.Linear, te_standin.LayerNormLinear):
        names = set(inspect.signature(module.__init__).parameters)
        assert names - {*te_modules.ANY, *te_modules.ONLY} <= {"save_original_input"}


@pytest.mark.parametrize("state", ("with_fp8_parameters", "is_fp8_enabled"))
def test_fp8_is_refused_where_it_is_switched_on(modules, monkeypatch, state):
    built = modules.Linear(64, 64, parallel_mode="row", bias=False)
    monkeypatch.setattr(te_standin.FP8, state, lambda: True)
    with pytest.raises(ConfigError, match=r"transformer_engine Linear: FP8: sums over ranks"):
        modules.Linear(64, 64, parallel_mode="row")
    with pytest.raises(ConfigError, match=r"transformer_engine Linear: FP8: sums over ranks"):
        built(torch.zeros(4, 64))


def test_what_only_a_forward_pass_shows_is_refused_there(modules):
    x = torch.zeros(4, 64)
    module = modules.Linear(64, 64, parallel_mode="column", bias=False, fuse_wgrad_accumulation=True)
    with pytest.raises(ConfigError, match=r"input torch\.bfloat16, weight torch\.float32: nothing is cast"):
        module(x.bfloat16())
    with pytest.raises(ConfigError, match="FP8"):
        module(x, fp8_output=True)
    with pytest.raises(ConfigError, match="is_first_microbatch=True: weight gradients are added"):
        module(x, is_first_microbatch=True)
    module.weight.main_grad = torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="main_grad: weight gradients are added up in fp32"):
        module(x)
    del module.weight.main_grad
    module.weight.partition_stride = 32
    with pytest.raises(ConfigError, match="do not divide a matrix of 2 rows"):
        module(x)


def test_a_linear_without_parallel_mode_that_v_does_not_divide_stays_unchanged(modules, monkeypatch):
    called = []
    for sizes, count in (((64, 62), 1), ((62, 64), 2), ((64, 64), 2)):
        module = modules.Linear(*sizes, bias=False)
        monkeypatch.setattr(module, "gemm", lambda x: called.append(x) or x)
        module(torch.zeros(4, sizes[0]))
        assert len(called) == count


def test_another_norm_is_refused(modules):
    with pytest.raises(ConfigError, match=r"normalization=L2Norm: another norm has no invariant version; .*=RMSNorm"):
        modules.LayerNormLinear(64, 64, normalization="L2Norm", parallel_mode="column")


def test_megatron_cores_wrappers_are_checked_as_parts_of_their_model(modules):
    """They come with options that the rules of a GPTModel cover."""
    from tp_invariant_recipes.numerics.megatron.base import ColumnForward

    class TELinear(modules.Linear):
        def __init__(self, *args, tp_comm_buffer_name, **kwargs):
            super().__init__(*args, **kwargs)

    class Wrapper(ColumnForward, TELinear):
        config = SimpleNamespace()

    Wrapper(64, 64, parallel_mode="column", return_bias=True)
    type("TEGroupedLinear", (modules.GroupedLinear,), {})()
    with pytest.raises(ConfigError, match="GroupedLinear has no invariant version"):
        modules.GroupedLinear()
