# SPDX-License-Identifier: Apache-2.0
"""Clipping, AdamW and the rounding of parameters in one launch, with the bits of the library's kernels, one by one.

The bandwidth of memory limits a step; kernels/clipped_adam.py reads and writes all tensors once. An exactness check
compares it with the library's kernels, or with those of numerics=portable (portable/training.py). Optimizers that it
does not cover update as in Megatron. So does a first step, which makes the moments: in memory of their own, since parts
of larger blocks would split what activations need.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels.clipped_adam import LIBRARY, Parameter, Settings, clipped_adam
from tp_invariant_recipes.numerics.gemm import cublas
from tp_invariant_recipes.numerics.gemm.operands import same_bits
from tp_invariant_recipes.numerics.sums import grad_norm

SIZE = 5000  # elements of the exactness check, the last of which fill no block
TRIALS = (  # its steps, of the same tensors, and what gradients are multiplied by
    (Settings(1, 0.0, (0.9, 0.95), 1.0e-8, 0.1), 1.0),  # the first of a warm-up
    (Settings(2, 1.0e-3, (0.9, 0.95), 1.0e-8, 0.0), 0.37),
    (Settings(3, 1.0e-3, (0.9, 0.999), 1.0e-5, 0.1), 1.0e-3),
    (Settings(1_000_000, 3.0e-4, (0.9, 0.95), 1.0e-5, 0.033), 1.0),
)

# Of the step under way: by optimizer, what its gradients are to be multiplied by, and the tensors of its groups.
_clips: dict[int, tuple[float, list[list[Parameter]]]] = {}
_is_exact = cublas.Verdicts("AdamW")


def clipping_with_the_step(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32, made from it."""

    @wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: Any, use_decoupled_grad: bool = False) -> None:
        for optimizer in grad_norm.optimizers_under_way():
            if [*map(id, optimizer.get_parameters())] == [*map(id, parameters)] and _covers(optimizer):
                groups = _tensors(optimizer)
                if groups is not None:  # the GPU may compute the norm until here
                    _clips[id(optimizer)] = min(1.0, max_norm / (total_norm + 1.0e-6)), groups
                    return
        original(parameters, max_norm, total_norm, use_decoupled_grad)

    return clip


def in_one_launch(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a replacement for MixedPrecisionOptimizer.step_with_ready_grads, made from that function."""

    @wraps(original)
    @outside_modes
    @torch.no_grad()
    def step_with_ready_grads(self: Any) -> bool:
        if id(self) not in _clips:
            if self.optimizer is not None and not self.optimizer.state:
                torch.cuda.empty_cache()
            return original(self)
        clip, groups = _clips.pop(id(self))
        adam = _as_stepped(self.optimizer)
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            step = adam.count_step(group)
            if parameters:
                settings = Settings(step, *(group[name] for name in Settings._fields[1:]))
                clipped_adam(parameters, clip, settings, adam.one_launch)
        return True

    return step_with_ready_grads


def _covers(optimizer: Any) -> bool:
    """Whether an optimizer's settings are those of the launch, and the step is not its first."""
    config = optimizer.config
    return not (
        not hasattr(optimizer, "shard_fp32_from_float16_groups")
        or any(optimizer.shard_fp32_groups)
        or optimizer.ddp_config.use_megatron_fsdp
        or config.log_num_zeros_in_grad
        or config.reuse_grad_buf_for_mxfp8_param_ag
        or math.isfinite(config.grad_norm_skip_threshold)
        or not _as_stepped(optimizer.optimizer).is_plain_adamw()
    )


class _Library:
    """Transformer Engine's FusedAdam as this module steps it. The optimizer of portable/training.py has these names."""

    one_launch = LIBRARY

    def __init__(self, adam: Any) -> None:
        self._adam = adam

    def is_plain_adamw(self) -> bool:
        adam = self._adam
        return type(adam).__name__ == "FusedAdam" and not (
            adam.capturable or adam.master_weights or adam.use_decoupled_grad or not adam.adam_w_mode
            or not all("step" in group and group["bias_correction"] for group in adam.param_groups)
        )  # fmt: skip

    def count_step(self, group: dict[str, Any]) -> int:
        group["step"] += 1
        return group["step"]

    def one_by_one(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, clip: float, settings: Settings) -> None:
        from megatron.core.optimizer.optimizer import multi_tensor_applier, multi_tensor_scale_impl

        skipped, adam = torch.zeros(1, dtype=torch.int, device=p.device), self._adam
        if clip < 1.0:
            multi_tensor_applier(multi_tensor_scale_impl, skipped, [[g], [g]], clip)
        step, lr, betas, eps, decay = settings
        multi_tensor_applier(
            adam.multi_tensor_adam, skipped, [[g], [p], [m], [v]], lr, *betas, eps, step, adam.adam_w_mode, 1, decay
        )


def _as_stepped(adam: Any) -> Any:
    return adam if hasattr(adam, "one_launch") else _Library(adam)


def _tensors(optimizer: Any) -> list[list[Parameter]] | None:
    """Return the tensors of each group; None: the launch does not take them, or has not been found right."""
    state = optimizer.optimizer.state
    groups = [
        [
            (main.data, main.grad, state[main].get("exp_avg"), state[main].get("exp_avg_sq"), copy.data)
            for main, copy in zip(mains, copies, strict=True)
            if main.grad is not None
        ]
        for mains, copies in zip(optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups, strict=True)
    ]
    everything = [tensors for group in groups for tensors in group]
    if not everything or not all(map(_suit, everything)):
        return None
    device = everything[0][0].device
    adam = optimizer.optimizer
    case = device, type(adam).__name__
    exact = cublas.tried(_is_exact, case, everything[0][0], lambda: _trial(adam, device))
    return groups if exact else None


def _suit(tensors: Parameter) -> bool:
    sizes = (4, 4, 4, 4, 2)
    return all(
        x is not None and x.is_cuda and x.is_contiguous() and x.is_floating_point()
        and x.itemsize == size and x.data_ptr() % (4 * size) == 0
        for x, size in zip(tensors, sizes, strict=True)
    ) and tensors[4].dtype == torch.bfloat16  # fmt: skip


def _trial(adam: Any, device: torch.device) -> bool:
    """Whether both ways have the same bits, of numbers of all sizes, and of those that are flushed to zero."""
    generator = torch.Generator(device).manual_seed(0)
    p, g, m, v = torch.randn(4, SIZE, device=device, generator=generator)
    for x in (p, g, m, v):
        x *= torch.exp2(torch.randint(-149, 8, x.shape, device=device, generator=generator))
    v.abs_()
    ours, copy = [x.clone() for x in (p, g, m, v)], torch.empty_like(p, dtype=torch.bfloat16)
    for settings, clip in TRIALS:
        clipped_adam([(*ours, copy)], clip, settings, _as_stepped(adam).one_launch)
        _as_stepped(adam).one_by_one(p, g, m, v, clip, settings)
        if not all(map(same_bits, (*ours, copy), (p, g, m, v, p.bfloat16()))):
            return False
    return True
