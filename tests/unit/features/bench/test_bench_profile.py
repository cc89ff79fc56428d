"""What is read from a profiler's trace."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_invariant_recipes.cli import bench
from tp_invariant_recipes.features.bench import profile
from tp_invariant_recipes.features.bench.profile import STEP, KernelTime, Trace

# Names as traces have them, and the category each belongs to.
NAMES = (
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
    ("c10d::_allgather_base_", "collectives"),
    ("_ReduceScatterToSequenceParallelRegionBackward", "collectives"),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x1_tn_align8>", "matrix products"),
    ("aten::addmm", "matrix products"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128", "attention"),
    ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*)", "attention"),
    ("aten::_softmax", "attention"),
    ("void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>", "rotary embedding"),
    ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<float>", "normalisation"),
    ("aten::_fused_rms_norm", "normalisation"),
    ("_tree_add", "tree adds"),
    ("_token_sum", "tree adds"),
    ("_product", "matrix products"),
    ("_restarting_product", "matrix products"),
    ("_weight_gradient", "matrix products"),
    ("_VocabParallelCrossEntropy", "cross entropy"),
    ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctorMaster<float>>", "optimizer"),
    ("void multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>>", "gradient norm"),
    ("_square_limbs", "gradient norm"),
    ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "elementwise, reductions"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "elementwise, reductions"),
    ("aten::mul_", "elementwise, reductions"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "memset"),
    ("Memset (Device)", "memset"),
    ("Memcpy DtoD (Device -> Device)", "copies, concatenation"),
    ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copies, concatenation"),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copies, concatenation"),
    ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float>", "embedding, indexing"),
    ("aten::as_strided", "allocations, views"),
    ("autograd::engine::evaluate_function: MulBackward0", "autograd functions"),
    ("LinearWithGradAccumulationAndAsyncCommunication", "autograd functions"),
    ("something_new", "other"),
)  # fmt: skip


def test_names_fall_into_categories():
    assert {name: profile.category(name) for name, _ in NAMES} == dict(NAMES)


def span(name: str, start: float, end: float, cat: str = "cpu_op", thread: int = 1) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start}


def test_an_operators_own_time_leaves_out_the_operators_inside_it():
    events = [
        span(STEP, 0, 100_000, "user_annotation"),
        span("outer", 0, 90_000),
        span("middle", 10_000, 60_000),
        span("inner", 20_000, 30_000),
        span("inner", 30_000, 40_000),
        span("outer", 5_000, 25_000, thread=2),
        {"ph": "i", "name": "instant", "ts": 3},
    ]
    assert profile.step(events) == Trace(
        100.0,
        10.0,
        (
            KernelTime("outer", "other", 60.0, 2.0),
            KernelTime("middle", "other", 30.0, 1.0),
            KernelTime("inner", "other", 20.0, 2.0),
        ),
    )


def test_only_what_starts_inside_a_marked_step_counts_and_is_divided_by_the_steps():
    events = [
        span(STEP, 0, 10_000, "user_annotation"),
        span(STEP, 20_000, 30_000, "user_annotation"),
        span(STEP, 21_000, 29_000, "gpu_user_annotation"),
        span("aten::mm", 0, 10_000),
        *(span("gemm", start, start + 4_000, "kernel") for start in (1_000, 15_000, 21_000, 26_000)),
        span("Memcpy HtoD", 22_000, 23_000, "gpu_memcpy"),
    ]
    assert profile.step(events) == Trace(
        10.0,
        4.0,
        (
            KernelTime("gemm", "matrix products", 6.0, 1.5),
            KernelTime("Memcpy HtoD", "copies, concatenation", 0.5, 0.5),
        ),
        waiting=0.0,
    )


# Kernels of a step of 100 µs as (name, start, end), and: nothing runs, only collectives run, what limits.
LIMITS = (
    ([("gemm", 0, 95)], 5, 0, "gpu"),
    ([("gemm", 0, 85)], 15, 0, "host"),
    ([("gemm", 0, 60), ("ncclDevKernel_AllGather", 40, 100)], 0, 40, "gpu"),  # 20 µs lie under the product
    ([("ncclDevKernel_AllReduce", 0, 50), ("ncclDevKernel_AllGather", 30, 80)], 20, 80, "host"),
    ([("gemm", 0, 100), ("ncclDevKernel_AllGather", 0, 100)], 0, 0, "gpu"),
)


@pytest.mark.parametrize("kernels, idle, waiting, limit", LIMITS)
def test_a_step_that_waits_for_the_host_is_told_from_one_that_waits_for_ranks(kernels, idle, waiting, limit):
    result = profile.step([span(STEP, 0, 100, "user_annotation"), *(span(*kernel, "kernel") for kernel in kernels)])
    assert (1000 * result.idle, 1000 * result.waiting) == (pytest.approx(idle), pytest.approx(waiting))
    assert result.idle_share == pytest.approx(idle / 100)
    assert result.limit == limit


def test_on_a_cpu_nothing_is_reported_of_what_limits():
    result = profile.step([span(STEP, 0, 100, "user_annotation"), span("aten::mm", 0, 50)])
    assert (result.waiting, result.limit) == (None, None)


def test_a_ratio_of_steps_that_wait_for_the_host_is_not_the_cost_of_the_method():
    gpu = {"mode": "tree", "limit": "gpu", "idle_share": 0.02}
    host = {"mode": "stock", "limit": "host", "idle_share": 0.31}
    assert bench._limits([host, gpu])[0] == "stock: the GPU idles in 31% of the traced step: the host limits it"
    assert "not the cost of the method" in bench._limits([host, gpu])[-1]
    assert bench._limits([gpu, gpu]) == ["tree: the GPU idles in 2% of the traced step: the GPU limits it"] * 2
    assert bench._limits([host | {"limit": None}]) == []


def test_a_trace_without_steps_is_refused(tmp_path):
    file = tmp_path / "trace.json.gz"
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": [span("gemm", 0, 1, "kernel")]}, stream)
    with pytest.raises(ValueError, match="no step is marked"):
        profile.read(file)


@st.composite
def nested(draw, start: int = 0, end: int = 64, depth: int = 0) -> list[dict]:
    """Operators that lie inside each other or side by side."""
    cuts = sorted(draw(st.sets(st.integers(start, end), max_size=4 if depth < 3 else 0)))
    results = []
    for a, b in zip(cuts[::2], cuts[1::2], strict=False):
        results += [span(draw(st.sampled_from("abc")), a, b), *draw(nested(a, b, depth + 1))]
    return results


@settings(max_examples=10)
@given(nested())
def test_own_times_sum_to_the_time_that_any_operator_runs(operators):
    result = profile.step([span(STEP, 0, 5000, "user_annotation"), *operators])
    covered = {tick for e in operators for tick in range(e["ts"], e["ts"] + e["dur"])}
    assert sum(k.milliseconds for k in result.kernels) == pytest.approx(len(covered) / 1000)
    assert result.idle == pytest.approx(5 - len(covered) / 1000)
    assert result.milliseconds == 5
    assert sum(k.launches for k in result.kernels) == len(operators)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 100)), max_size=9))
def test_nothing_runs_while_no_stream_runs_a_kernel(runs):
    result = profile.step(
        [span(STEP, 0, 1000, "user_annotation"), *(span("k", at, at + dur, "kernel") for at, dur in runs)]
    )
    covered = {tick for at, dur in runs for tick in range(at, at + dur)}
    assert result.idle == pytest.approx(1 - len(covered) / 1000)
    assert sum(k.milliseconds for k in result.kernels) == pytest.approx(sum(dur for _, dur in runs) / 1000)


NUMBERS = st.integers(0, 999).map(float)  # whole, so that sums are exact in any order
KERNELS = st.lists(
    st.builds(
        lambda name, milliseconds, launches: KernelTime(name, profile.category(name), milliseconds, launches),
        st.sampled_from(["gemm", "nccl", "_tree_add", "x"]),
        NUMBERS,
        NUMBERS,
    ),
    unique_by=lambda k: k.name,
)


@settings(max_examples=10)
@given(KERNELS)
def test_categories_sum_to_the_whole(kernels):
    sums = profile.by_category(kernels)
    assert sum(k.milliseconds for k in sums.values()) == sum(k.milliseconds for k in kernels)
    assert sum(k.launches for k in sums.values()) == sum(k.launches for k in kernels)
    assert set(sums) == {k.category for k in kernels}


@settings(max_examples=10)
@given(KERNELS, KERNELS)
def test_the_difference_is_what_must_be_added_to_the_first(first, other):
    more = profile.difference(first, other)
    assert [k.milliseconds for k in more] == sorted((k.milliseconds for k in more), reverse=True)
    assert {k.name for k in more} == {k.name for k in [*first, *other]}
    before, after = ({k.name: (k.milliseconds, k.launches) for k in kernels} for kernels in (first, other))
    for k in more:
        ms, launches = before.get(k.name, (0, 0))
        assert (ms + k.milliseconds, launches + k.launches) == after.get(k.name, (0, 0))
