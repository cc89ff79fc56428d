# SPDX-License-Identifier: Apache-2.0
"""The Mamba layers' functions for a CPU: against the recurrence that they stand for, in fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.operands import normal
from tp_invariant_recipes.cpu_host.stand_ins import mamba

BATCH, SEQUENCE, HEADS, GROUPS, P, N = 2, 45, 4, 2, 8, 6


def _scan_inputs():
    return {
        "x": normal(BATCH, SEQUENCE, HEADS, P, seed=1),
        "dt": normal(BATCH, SEQUENCE, HEADS, seed=2),
        "A": -normal(HEADS, seed=3).exp(),
        "B": normal(BATCH, SEQUENCE, GROUPS, N, seed=4),
        "C": normal(BATCH, SEQUENCE, GROUPS, N, seed=5),
        "D": normal(HEADS, seed=6),
        "z": normal(BATCH, SEQUENCE, HEADS, P, seed=7),
        "dt_bias": normal(HEADS, seed=8),
    }


def _recurrence(x, dt, A, B, C, D, z, dt_bias):
    """Position by position, as the formula says."""
    dt = F.softplus(dt + dt_bias)
    B, C = (t.repeat_interleave(HEADS // GROUPS, 2) for t in (B, C))
    state, ys = x.new_zeros(BATCH, HEADS, P, N), []
    for i in range(SEQUENCE):
        state = state * (dt[:, i] * A).exp()[..., None, None]
        state = state + (dt[:, i, :, None] * x[:, i])[..., None] * B[:, i, :, None, :]
        ys.append((state * C[:, i, :, None, :]).sum(-1) + D[:, None] * x[:, i])
    return torch.stack(ys, 1) * F.silu(z)


def _with_gradients(function, inputs, dtype):
    leaves = {name: value.detach().to(dtype, copy=True).requires_grad_() for name, value in inputs.items()}
    y = function(**leaves)
    y.backward(normal(*y.shape, seed=9).to(dtype))
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _near(result, expected, tolerance=1e-5):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        error = (result[name].double() - value).norm() / value.norm()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("chunk_size", (1, 16, 64))
def test_the_scan_is_the_recurrence(chunk_size):
    """Chunks that divide the sequence, that do not, and one that is longer."""
    inputs = _scan_inputs()
    result = _with_gradients(lambda **t: mamba.chunk_scan(chunk_size=chunk_size, dt_softplus=True, **t), inputs,
                            torch.float32)  # fmt: skip
    _near(result, _with_gradients(_recurrence, inputs, torch.float64))


@pytest.mark.parametrize("missing", ("D", "z", "dt_bias"))
def test_the_scan_without(missing):
    inputs = _scan_inputs()
    inputs[missing] = torch.zeros_like(inputs[missing])
    expected = _recurrence(**{name: value.double() for name, value in inputs.items()})
    if missing == "z":  # the recurrence's gate would be 0
        inputs[missing] = normal(*inputs[missing].shape)
        expected = _recurrence(**{name: value.double() for name, value in inputs.items()}) / F.silu(
            inputs["z"].double()
        )
    del inputs[missing]
    y = mamba.chunk_scan(chunk_size=16, dt_softplus=True, **inputs)
    _near({"y": y}, {"y": expected})


def test_a_scan_rounds_once():
    """bf16 operands, fp32 inside."""
    half = {name: value.bfloat16() for name, value in _scan_inputs().items()}
    result = mamba.chunk_scan(chunk_size=16, dt_softplus=True, **half)
    wide = mamba.chunk_scan(chunk_size=16, dt_softplus=True, **{name: value.float() for name, value in half.items()})
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, wide.bfloat16())


def test_groups_that_do_not_divide_the_heads_are_refused():
    inputs = _scan_inputs() | {"B": normal(BATCH, SEQUENCE, 3, N)}
    with pytest.raises(ValueError, match="3 groups do not divide 4 heads"):
        mamba.chunk_scan(chunk_size=16, **inputs)


@pytest.mark.parametrize("activation", (None, "silu"))
def test_the_convolution_is_torchs(activation):
    inputs = {"x": normal(2, 6, 20), "weight": normal(6, 4, seed=1), "bias": normal(6, seed=2)}

    def torchs(x, weight, bias):
        y = F.conv1d(x, weight[:, None], bias, padding=3, groups=6)[..., :20]
        return F.silu(y) if activation else y

    result = _with_gradients(lambda **t: mamba.causal_conv1d(activation=activation, **t), inputs, torch.float32)
    _near(result, _with_gradients(torchs, inputs, torch.float64))


def test_other_activations_are_refused():
    with pytest.raises(NotImplementedError, match="gelu"):
        mamba.causal_conv1d(normal(1, 2, 3), normal(2, 4), activation="gelu")


def test_the_whole_is_its_parts():
    """z, x, B, C and dt in one tensor."""
    inner, state = HEADS * P, GROUPS * N
    whole = normal(BATCH, SEQUENCE, 2 * inner + 2 * state + HEADS)
    weight, bias = normal(inner + 2 * state, 4, seed=1), normal(inner + 2 * state, seed=2)
    dt_bias, A, D = normal(HEADS, seed=3), -normal(HEADS, seed=4).exp(), normal(HEADS, seed=5)
    result = mamba.split_conv1d_scan(whole, weight, bias, dt_bias, A, D, 16, headdim=P, ngroups=GROUPS,
                                    norm_before_gate=False)  # fmt: skip
    z, x, B, C, dt = whole.split((inner, inner, state, state, HEADS), -1)
    edges = list(itertools.pairwise((0, inner, inner + state, inner + 2 * state)))
    x, B, C = (
        mamba.causal_conv1d(part.transpose(1, 2), weight[a:b], bias[a:b], "silu").transpose(1, 2)
        for part, (a, b) in zip((x, B, C), edges, strict=True)
    )
    expected = _recurrence(
        x.unflatten(-1, (HEADS, P)), dt, A, B.unflatten(-1, (GROUPS, N)), C.unflatten(-1, (GROUPS, N)), D,
        z.unflatten(-1, (HEADS, P)), dt_bias,
    )  # fmt: skip
    torch.testing.assert_close(result, expected.flatten(2), rtol=1e-4, atol=1e-4)


def test_packed_sequences_are_refused():
    with pytest.raises(NotImplementedError, match="packed"):
        mamba.split_conv1d_scan(*(torch.ones(1) for _ in range(6)), 16, seq_idx=torch.zeros(1))


@pytest.mark.parametrize("norm_before_gate", (False, True))
def test_the_norm_is_of_groups(norm_before_gate):
    norm = mamba.GroupRMSNorm(12, eps=1e-5, group_size=4, norm_before_gate=norm_before_gate)
    norm.weight.data = normal(12, seed=1)
    x, z = normal(3, 12), normal(3, 12, seed=2)
    gated = x if norm_before_gate else x * F.silu(z)
    y = torch.cat([F.rms_norm(part, (4,), eps=1e-5) for part in gated.split(4, -1)], -1) * norm.weight
    torch.testing.assert_close(norm(x, z), y * F.silu(z) if norm_before_gate else y)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
