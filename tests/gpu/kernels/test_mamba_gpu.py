# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 mixer between its projections on one GPU: what a rank with all shards computes is what ranks have."""

from types import SimpleNamespace

import pytest
import torch

from tests.distributed.ranks import joined
from tests.operands import same_bits
from tp_invariant_recipes.cpu_host.stand_ins import mamba as twin
from tp_invariant_recipes.numerics.layers import mamba
from tp_invariant_recipes.numerics.megatron.init import place
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16)
SHARDS = 8
DEGREES = (2, 4, 8)


def _random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).cuda().to(dtype)


def _near(result, expected, tolerance):
    error = (result.double().cpu() - expected.double().cpu()).norm() / expected.double().norm().cpu()
    assert error < tolerance, float(error)


# --- the mixer, without its projections ---

HEADS, HEAD, GROUPS, STATE, SEQUENCE, CHUNK = 64, 64, 8, 128, 1024, 128  # Nemotron-3-Nano's
INNER, CHANNELS = HEADS * HEAD, HEADS * HEAD + 2 * GROUPS * STATE
# name -> size of the dimension that is split, its segments, and the dimensions after it
PARAMETERS = {
    "conv1d_weight": ((INNER, GROUPS * STATE, GROUPS * STATE), (1, 4)),
    "conv1d_bias": ((INNER, GROUPS * STATE, GROUPS * STATE), ()),
    "A_log": ((HEADS,), ()),
    "D": ((HEADS,), ()),
    "dt_bias": ((HEADS,), ()),
    "norm": ((INNER,), ()),
}
SEGMENTS = (INNER, INNER, GROUPS * STATE, GROUPS * STATE, HEADS)


def _part(whole, sizes, dim, rank, size):
    """A rank's slice of every segment."""
    local = list(whole.shape)
    local[dim] //= size
    _, ranges = place(local, dim, rank, size, [n // size for n in sizes])
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges[dim]], dim).contiguous()


def _mixer(kind, rank, size, dtype):
    """A mixer as rank `rank` of `size` has it, without projections and process groups."""
    from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
    from megatron.core.ssm.mamba_mixer import ExtendedRMSNorm

    mixer = kind.__new__(kind)
    torch.nn.Module.__init__(mixer)
    for seed, (name, (sizes, more)) in enumerate(PARAMETERS.items()):
        kept = torch.float32 if name in ("A_log", "D") else dtype
        whole = _random(sum(sizes), *more, dtype=kept, seed=seed, scale=0.5)
        parameter = torch.nn.Parameter(_part(whole, sizes, 0, rank, size))
        parameter.partition_sizes = [n // size for n in sizes]
        if name != "norm":
            setattr(mixer, name, parameter)
            continue
        mixer.norm = ExtendedRMSNorm(
            INNER // size, eps=1e-5, group_size=INNER // GROUPS, norm_before_gate=False, device="cuda", dtype=dtype
        )
        mixer.norm.weight = parameter
    own = dict(
        d_inner=INNER, ngroups=GROUPS, headdim=HEAD, d_state=STATE, chunk_size=CHUNK, D_has_hdim=False, rmsnorm=True,
        activation="silu", norm_before_gate=False, mesh=VirtualMesh(SHARDS, size, rank),
        segments=tuple(n // size for n in SEGMENTS), mamba_training_ssm_states_dtype=dtype,
    )  # fmt: skip
    mixer.__dict__.update(own)
    mixer.cp = MambaContextParallel(
        cp_group=SimpleNamespace(size=lambda: 1), d_inner_local_tp=INNER // size, nheads_local_tp=HEADS // size,
        ngroups_local_tp=GROUPS // size, d_state=STATE, conv1d_weight_cp1=mixer.conv1d_weight,
        conv1d_bias_cp1=mixer.conv1d_bias, conv1d_padding=3, dt_bias_cp1=mixer.dt_bias, A_log_cp1=mixer.A_log,
        D_cp1=mixer.D, D_has_hdim=False,
    )  # fmt: skip
    return mixer


def _run(kind, size, dtype, batch):
    """What `size` ranks compute, put together: name -> tensor."""
    whole = _random(SEQUENCE, batch, sum(SEGMENTS), dtype=dtype, seed=20, scale=0.5)
    gradient = _random(SEQUENCE, batch, INNER, dtype=dtype, seed=21)
    ranks = []
    for rank in range(size):
        mixer = _mixer(kind, rank, size, dtype)
        x = _part(whole, SEGMENTS, 2, rank, size).requires_grad_()
        y = mixer._ssm_training(x)
        y.backward(_part(gradient, (INNER,), 2, rank, size))
        gradients = {name.removesuffix(".weight"): p.grad for name, p in mixer.named_parameters()}
        ranks.append({"y": y.detach(), "dx": x.grad} | {name: gradients[name] for name in PARAMETERS})
    split = {"y": ((INNER,), 2), "dx": (SEGMENTS, 2)} | {name: (sizes, 0) for name, (sizes, _) in PARAMETERS.items()}
    return {
        name: joined([rank[name] for rank in ranks], dim, [n // size for n in sizes])
        for name, (sizes, dim) in split.items()
    }


@pytest.fixture(scope="module")
def kinds():
    """Ours and Megatron's, which comes second: `repeatable` has no atomics left then, so it repeats its own bits."""
    pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    from megatron.core.ssm.mamba_mixer import MambaMixer

    from tp_invariant_recipes.numerics.megatron.families.mamba import InvariantMambaMixer

    return InvariantMambaMixer, MambaMixer


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mixer_has_one_result_for_all_degrees(kinds, dtype, batch):
    single = _run(kinds[0], 1, dtype, batch)
    for degree in DEGREES:
        other = _run(kinds[0], degree, dtype, batch)
        assert [name for name in single if not same_bits(single[name], other[name])] == [], degree


def test_megatrons_has_several_and_they_agree_but_for_rounding(kinds):
    """In fp32: rounded to bf16, a sum of another order is seldom another number."""
    actual, single, four = (_run(kinds[n], size, torch.float32, 1) for n, size in ((0, 1), (1, 1), (1, 4)))
    assert not same_bits(single["norm"], four["norm"])
    for name, value in actual.items():
        _near(value, single[name], 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_scan_is_that_of_the_cpu(kinds, dtype):
    """One shard: forward and all gradients."""
    heads, groups, seq = 8, 1, 512
    inputs = {
        "x": _random(1, seq, heads, HEAD, dtype=dtype, seed=1),
        "dt": _random(1, seq, heads, dtype=dtype, seed=2),
        "log_a": _random(heads, seed=3),
        "B": _random(1, seq, groups, STATE, dtype=dtype, seed=4, scale=0.3),
        "C": _random(1, seq, groups, STATE, dtype=dtype, seed=5, scale=0.3),
        "z": _random(1, seq, heads, HEAD, dtype=dtype, seed=6),
        "D": _random(heads, seed=7),
        "dt_bias": _random(heads, seed=8) - 2.0,
    }
    dy = _random(1, seq, heads, HEAD, dtype=dtype, seed=9)
    results = []
    for device, wide in (("cuda", dtype), ("cpu", torch.float32)):
        leaves = {n: t.to(device, t.dtype if device == "cuda" else wide, copy=True).requires_grad_()
                  for n, t in inputs.items()}  # fmt: skip
        y = mamba.chunk_scan(**leaves, chunk_size=CHUNK)
        y.backward(dy.to(y))
        results.append([y.detach(), *(leaf.grad for leaf in leaves.values())])
    for on_gpu, on_cpu in zip(*results, strict=True):
        _near(on_gpu, on_cpu, 1e-2 if dtype == torch.float32 else 5e-2)


def test_one_configuration_a_kernel(kinds):
    from importlib import import_module

    from triton.runtime.autotuner import Autotuner

    mamba.repeatable()
    assert import_module("mamba_ssm.utils.determinism").use_deterministic_mode()
    kernels = [
        kernel
        for module in mamba.TUNED
        for kernel in vars(import_module(f"mamba_ssm.ops.triton.{module}")).values()
        if isinstance(kernel, Autotuner)
    ]
    assert len(kernels) > 20
    assert all(len(kernel.configs) == 1 for kernel in kernels)


def test_the_whole_twin_is_megatrons_mixer(kinds):
    """cpu_host/stand_ins/mamba.py's convolution, scan and gate against mamba_ssm's in one kernel launch each."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    batch, seq, heads, groups = 2, 300, 8, 2
    channels = heads * HEAD + 2 * groups * STATE
    arguments = (
        _random(batch, seq, heads * HEAD + channels + heads, seed=1), _random(channels, 4, seed=2, scale=0.5),
        _random(channels, seed=3, scale=0.5), _random(heads, seed=4), -_random(heads, seed=5).exp(), _random(heads),
    )  # fmt: skip
    options = dict(chunk_size=CHUNK, headdim=HEAD, ngroups=groups, norm_before_gate=False)
    expected = mamba_split_conv1d_scan_combined(*arguments, **options)
    _near(expected, twin.split_conv1d_scan(*(t.cpu() for t in arguments), **options), 1e-2)
