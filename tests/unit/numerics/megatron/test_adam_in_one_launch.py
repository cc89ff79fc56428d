# SPDX-License-Identifier: Apache-2.0
"""Clipping, AdamW and rounding in one launch: which optimizers take it, and what it is given.

The kernel runs on GPUs only (tests/gpu/kernels/test_clipped_adam_gpu.py). Here a list of its arguments stands for it.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from tp_invariant_recipes.kernels.clipped_adam import LIBRARY, Settings
from tp_invariant_recipes.numerics.megatron import optimizer_step
from tp_invariant_recipes.numerics.sums import grad_norm
from tp_invariant_recipes.numerics.sums.grad_norm import PendingNorm
from tp_invariant_recipes.portable.ieee.adam import CLIPPED
from tp_invariant_recipes.portable.training import portable_adam


class FusedAdam:
    """What stands for Transformer Engine's."""

    capturable = master_weights = use_decoupled_grad = False
    adam_w_mode = True


SETTINGS = {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def an_optimizer(size=8):
    """A DistributedOptimizer after its first step, of one parameter."""
    main = torch.ones(size)
    main.grad = torch.full((size,), 3.0)
    adam = FusedAdam()
    adam.param_groups = [{"step": 4, **SETTINGS, "bias_correction": True, "params": [main]}]
    adam.state = {main: {"exp_avg": torch.zeros(size), "exp_avg_sq": torch.zeros(size)}}
    return distributed(adam, main)


def a_portable_optimizer(kind=torch.optim.AdamW, steps=4, **settings):
    """The same of numerics=portable, after some steps."""
    main = torch.ones(8, requires_grad=True)
    adam = portable_adam(kind)([main], **SETTINGS | settings)
    main.grad = torch.full((8,), 3.0)
    for _ in range(steps):
        adam.step()
    return distributed(adam, main)


def distributed(adam, main):
    model = torch.ones(main.numel(), dtype=torch.bfloat16)
    return SimpleNamespace(
        optimizer=adam,
        shard_fp32_from_float16_groups=[[main]],
        shard_float16_groups=[[model]],
        shard_fp32_groups=[[]],
        config=SimpleNamespace(
            log_num_zeros_in_grad=False,
            reuse_grad_buf_for_mxfp8_param_ag=False,
            grad_norm_skip_threshold=math.inf,
        ),
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        get_parameters=lambda: [main],
    )


@pytest.fixture
def launches(monkeypatch):
    """What the kernel is given, as it comes."""
    given = []
    monkeypatch.setattr(optimizer_step, "clipped_adam", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(optimizer_step, "_suit", lambda tensors: all(x is not None for x in tensors))
    monkeypatch.setattr(optimizer_step, "_is_exact", {})
    monkeypatch.setattr(optimizer_step, "_trial", lambda *_: True)
    return given


def a_step(monkeypatch, optimizer, norm, parameters=None):
    """Clip to 1.0 and step, as Megatron's chain does; returns: what of Megatron's was called."""
    called = []
    clip = optimizer_step.clipping_with_the_step(lambda *_: called.append("clip"))
    step = optimizer_step.in_one_launch(lambda _: called.append("step") or True)
    monkeypatch.setattr(grad_norm, "_under_way", [SimpleNamespace(chained_optimizers=[optimizer])])
    clip(parameters or optimizer.get_parameters(), max_norm=1.0, total_norm=norm)
    assert step(optimizer)
    assert not optimizer_step._clips
    return called


@pytest.mark.parametrize("made, update", ((an_optimizer, LIBRARY), (a_portable_optimizer, CLIPPED)))
@pytest.mark.parametrize("norm, clip", ((4.0, 0.25), (0.5, 1.0), (math.nan, 1.0), (math.inf, 0.0)))
def test_a_step_is_one_launch_with_megatrons_coefficient(monkeypatch, launches, norm, clip, made, update):
    optimizer = made()
    (main,), state = optimizer.get_parameters(), optimizer.optimizer.state
    assert a_step(monkeypatch, optimizer, PendingNorm(lambda: norm)) == []
    (([tensors], coefficient, settings, arithmetic),) = launches
    assert coefficient == pytest.approx(clip, rel=1e-5)
    assert (settings, arithmetic) == (Settings(5, **SETTINGS), update)
    moments = (state[main][name] for name in ("exp_avg", "exp_avg_sq"))
    given = main, main.grad, *moments, optimizer.shard_float16_groups[0][0]
    assert [x.data_ptr() for x in tensors] == [x.data_ptr() for x in given]
    assert float(state[main].get("step", 5)) == 5


def put(path, value):
    def change(optimizer):
        *owners, name = path.split(".")
        for owner in owners:
            optimizer = getattr(optimizer, owner)
        setattr(optimizer, name, value)

    return change


OTHERS = {
    "another optimizer": put("optimizer", SimpleNamespace(state={1: 1})),
    "fp32 parameters": put("shard_fp32_groups", [[torch.ones(1)]]),
    "FSDP": put("ddp_config.use_megatron_fsdp", True),
    "counted zeros": put("config.log_num_zeros_in_grad", True),
    "staged parameters": put("config.reuse_grad_buf_for_mxfp8_param_ag", True),
    "steps that are skipped": put("config.grad_norm_skip_threshold", 9.0),
    "steps in a graph": put("optimizer.capturable", True),
    "decay that is not decoupled": put("optimizer.adam_w_mode", False),
    "a first step": lambda optimizer: optimizer.optimizer.param_groups[0].pop("step"),
    "a parameter without moments": lambda optimizer: next(iter(optimizer.optimizer.state.values())).clear(),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_others_go_on_as_in_megatron(monkeypatch, launches, change):
    optimizer = an_optimizer()
    change(optimizer)
    assert a_step(monkeypatch, optimizer, 4.0) == ["clip", "step"]
    assert launches == []


PORTABLE = {
    "a first step": {"steps": 0},
    "Adam": {"kind": torch.optim.Adam},
    "maximized": {"maximize": True, "steps": 0},
}


@pytest.mark.parametrize("settings", PORTABLE.values(), ids=PORTABLE)
def test_other_portable_optimizers_step_parameter_by_parameter(monkeypatch, launches, settings):
    optimizer = a_portable_optimizer(**settings)
    assert a_step(monkeypatch, optimizer, 4.0) == ["clip", "step"]
    assert launches == []
    assert len(optimizer.optimizer.state) == bool(settings.get("steps", 4))


def test_portable_parameters_of_unequal_steps_have_launches_of_their_own(monkeypatch, launches):
    optimizer = a_portable_optimizer()
    late = torch.ones(8, requires_grad=True)
    late.grad = torch.ones(8)
    optimizer.optimizer.param_groups[0]["params"].append(late)
    optimizer.optimizer.step()
    assert a_step(monkeypatch, optimizer, 4.0) == ["clip", "step"]
    assert launches == []


@pytest.mark.parametrize("state, emptied", (({}, 1), ({1: 1}, 0)))
def test_moments_are_made_in_memory_of_their_own(monkeypatch, launches, state, emptied):
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    optimizer = an_optimizer()
    optimizer.optimizer.state = state
    assert optimizer_step.in_one_launch(lambda _: True)(optimizer)
    assert len(freed) == emptied


def test_a_part_of_the_parameters_is_clipped_as_in_megatron(monkeypatch, launches):
    assert a_step(monkeypatch, an_optimizer(), 4.0, [torch.ones(1)]) == ["clip", "step"]


def test_a_kernel_of_other_bits_is_refused(monkeypatch, launches):
    monkeypatch.setattr(optimizer_step, "_trial", lambda *_: False)
    assert a_step(monkeypatch, an_optimizer(), 4.0) == ["clip", "step"]
    assert launches == []


def stepped(p, g, m, v, clip, lr, beta1, beta2, eps, step, weight_decay):
    """A step in place, in plain torch."""
    g.mul_(clip)
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).add_(g * g, alpha=1 - beta2)
    update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps) + weight_decay * p
    p.sub_(lr * update)


@pytest.mark.parametrize(
    "wrong",
    (
        None,
        lambda clip, step: step.step == 1,
        lambda clip, step: step.step > 1000,
        lambda clip, step: step.weight_decay == 0.0,
        lambda clip, step: step.lr == 0.0,
        lambda clip, step: clip < 1.0,
        lambda clip, step: clip == 1.0 and step.lr,
    ),
)
def test_the_exactness_check_has_what_runs_meet(monkeypatch, wrong):
    """A kernel that is wrong in one kind of step only is refused."""
    from megatron.core.optimizer import optimizer

    def launch(parameters, clip, settings, update):
        ((*tensors, copy),) = parameters
        stepped(*tensors, clip, settings.lr, *settings.betas, settings.eps, settings.step, settings.weight_decay)
        copy.copy_(tensors[0])
        if wrong and wrong(clip, settings):
            tensors[2][-1] += 1.0

    def library(scale, lists, *numbers):
        if scale:
            lists[0][0].mul_(numbers[0])
        else:
            (g,), (p,), (m,), (v,) = lists
            stepped(p, g, m, v, 1.0, *numbers[:5], numbers[7])

    monkeypatch.setattr(optimizer, "multi_tensor_applier", lambda what, skipped, *rest: library(what, *rest))
    monkeypatch.setattr(optimizer, "multi_tensor_scale_impl", True)
    monkeypatch.setattr(optimizer_step, "clipped_adam", launch)
    adam = SimpleNamespace(adam_w_mode=True, multi_tensor_adam=False)
    assert optimizer_step._trial(adam, torch.device("cpu")) == (wrong is None)
