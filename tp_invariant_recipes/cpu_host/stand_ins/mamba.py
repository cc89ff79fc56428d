# SPDX-License-Identifier: Apache-2.0
"""The functions of mamba_ssm and causal_conv1d that Megatron's Mamba mixer needs, in plain torch, for a CPU.

The libraries' kernels are CUDA and Triton. The functions here take the same arguments, compute in fp32 and round once
at the end, so they agree with the kernels to rounding; autograd differentiates them. Megatron-Core looks up the names
when it builds a mixer, not at import, so `REPLACEMENTS` install them while the CPU host is active.

The scan is the chunked form of Dao and Gu, "Transformers are SSMs", ICML 2024, section 6.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_invariant_recipes.replacement import Replacement


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Return the state space model of Mamba-2, `mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`. Per head:

        state[i] = exp(dt[i] A) state[i-1] + dt[i] x[i] B[i]^T        y[i] = (state[i] C[i] + D x[i]) * silu(z[i])

    x, z: [batch, seq, heads, p]; dt: [batch, seq, heads]; A, D, dt_bias: [heads], D also [heads, p];
    B, C: [batch, seq, groups, n], a group for heads/groups consecutive heads.
    returns: [batch, seq, heads, p] of x's dtype.
    """
    if x.shape[2] % B.shape[2]:
        raise ValueError(f"{B.shape[2]} groups do not divide {x.shape[2]} heads")
    wide = x.float()
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if dt_softplus:
        step = F.softplus(step)
    y = _scan(wide * step.unsqueeze(-1), step * A.float(), B.float(), C.float(), chunk_size)
    if D is not None:
        y = y + wide * (D.float() if D.dim() == 2 else D.float().unsqueeze(-1))
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype)


def _scan(x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> Tensor:
    """`chunk_scan` without D and z, all in fp32. x and log_decay = dt A already contain dt."""
    seq = x.shape[1]
    missing = -seq % chunk_size  # padding zeros add nothing and decay nothing
    x, log_decay, B, C = (_in_chunks(t, missing, chunk_size) for t in (x, log_decay, B, C))
    heads = x.shape[3] // B.shape[3]
    # b batch, c chunk, i and j positions in a chunk, g group, h head of a group, p, n; passed: log of cumulative decay.
    x = x.unflatten(3, (-1, heads)).permute(0, 1, 3, 4, 2, 5)  # b c g h i p
    passed = log_decay.unflatten(3, (-1, heads)).permute(0, 1, 3, 4, 2).cumsum(-1)  # b c g h i
    B, C = B.permute(0, 1, 3, 2, 4).unsqueeze(3), C.permute(0, 1, 3, 2, 4).unsqueeze(3)  # b c g 1 i n

    between = passed.unsqueeze(-1) - passed.unsqueeze(-2)  # from j to i
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)
    decay = between.masked_fill(later, -torch.inf).exp()
    within = (C @ B.transpose(-1, -2)) * decay @ x

    added = (x * (passed[..., -1:] - passed).exp().unsqueeze(-1)).transpose(-1, -2) @ B  # to the state, per chunk: p n
    states = [torch.zeros_like(added[:, 0])]
    for chunk in range(added.shape[1] - 1):
        states.append(states[-1] * passed[:, chunk, ..., -1:].unsqueeze(-1).exp() + added[:, chunk])
    before = torch.stack(states, 1)  # the state before each chunk
    across = (C @ before.transpose(-1, -2)) * passed.exp().unsqueeze(-1)

    y = (within + across).permute(0, 1, 4, 2, 3, 5)  # b c i g h p
    return y.flatten(3, 4).flatten(1, 2)[:, :seq]


def _in_chunks(tensor: Tensor, missing: int, chunk_size: int) -> Tensor:
    """[batch, seq, …] → [batch, chunks, chunk_size, …], zeros after the end."""
    padding = tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])
    return torch.cat((tensor, padding), 1).unflatten(1, (-1, chunk_size))


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Return a causal convolution per channel, `causal_conv1d.causal_conv1d_fn`.

    x: [batch, channels, seq]; weight: [channels, width]; bias: [channels]; activation: None, "silu" or "swish".
    returns: x's shape and dtype.
    """
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"a causal convolution with activation {activation}")
    width, seq = weight.shape[1], x.shape[2]
    past = F.pad(x.float(), (width - 1, 0))
    y = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float()[:, None].expand(x.shape)
    for tap in range(width):
        y = y + weight[:, tap, None].float() * past[..., tap : tap + seq]
    return (y if activation is None else F.silu(y)).to(x.dtype)


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Convolution, scan and gate, `mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined`.

    zxbcdt: [batch, seq, z | x | B | C | dt]; conv1d_weight, conv1d_bias: [channels of x, B and C, …].
    headdim: p, if D is [heads]; norm_before_gate: concerns a norm that another module computes.
    returns: [batch, seq, heads · p].
    """
    if seq_idx is not None:
        raise NotImplementedError("packed sequences on a CPU; model on a GPU, or data without packing")
    heads = dt_bias.shape[0]
    inner = heads * (D.shape[1] if D.dim() == 2 else headdim or 0)
    channels = conv1d_weight.shape[0]
    z, xBC, dt = zxbcdt.split((inner, channels, heads), -1)
    xBC = causal_conv1d(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation).transpose(1, 2)
    x, B, C = xBC.split((inner, (channels - inner) // 2, (channels - inner) // 2), -1)
    z, x = (t.unflatten(-1, (heads, -1)) for t in (z, x))
    B, C = (t.unflatten(-1, (ngroups, -1)) for t in (B, C))
    return chunk_scan(x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=True).flatten(2)


class GroupRMSNorm(torch.nn.Module):
    """RMSNorm of every `group_size` consecutive features, `mamba_ssm…layernorm_gated.RMSNorm` as Megatron uses it."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """[…, hidden] → […, hidden]; z gates the result, or x if not `norm_before_gate`."""
        wide = x.float()
        if z is not None and not self.norm_before_gate:
            wide = wide * F.silu(z.float())
        groups = wide.unflatten(-1, (-1, self.group_size))
        y = (groups / (groups.square().mean(-1, keepdim=True) + self.eps).sqrt()).flatten(-2) * self.weight.float()
        if z is not None and self.norm_before_gate:
            y = y * F.silu(z.float())
        return y.to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Like Megatron's: the weight is sharded as the features are."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=(metadata or {})["dp_cp_group"],
        )  # fmt: skip


def _mixer(name: str, value: Any) -> Replacement:
    why = "mamba_ssm's and causal_conv1d's kernels may be installed but need a GPU"
    return Replacement(f"megatron.core.ssm.mamba_mixer:{name}", lambda original: value, why)


REPLACEMENTS = (
    _mixer("HAVE_MAMBA_SSM", True),
    _mixer("MAMBA_HAS_STATE_DTYPE", False),
    _mixer("ExtendedRMSNorm", GroupRMSNorm),
    _mixer("mamba_chunk_scan_combined", chunk_scan),
    _mixer("mamba_split_conv1d_scan_combined", split_conv1d_scan),
    _mixer("causal_conv1d_fn", causal_conv1d),
)
