# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear in a replayed FP8 CUDA graph has the gradients of eager execution, bit for bit.

Three steps of three micro-batches accumulate into `main_grad`, and every step changes the weights. Eager execution
overwrites `main_grad` in the first micro-batch where a graph adds to zeros, and quantises weights once a step where a
graph is told by a tensor to skip: neither changes a value. The same kernels run on the same shapes in the same order.
"""

import pytest
import torch

from tp_invariant_recipes.patches import te_grouped
from tp_invariant_recipes.replacement import applied

pytestmark = pytest.mark.gpu

STATE = te_grouped.PATCH.verdict().state
RECIPES = ("Float8CurrentScaling", "DelayedScaling")
SPLITS, HIDDEN, MIDDLE = [32, 64, 16, 48], 128, 256
STEPS, MICRO_BATCHES = 3, 3


@pytest.fixture(autouse=True)
def _fresh_fp8_state():
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


class Experts(torch.nn.Module):
    """Two grouped layers, which say as Megatron's do whether a micro-batch is the first since weights changed."""

    def __init__(self):
        import transformer_engine.pytorch as te

        super().__init__()
        torch.manual_seed(0)
        make = lambda rows, columns: te.GroupedLinear(  # noqa: E731
            len(SPLITS), rows, columns, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True
        )
        self.fc1, self.fc2 = make(HIDDEN, MIDDLE), make(MIDDLE, HIDDEN)
        self.is_first_microbatch = True
        for weight in self.parameters():
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device="cuda")

    def forward(self, x, is_first_microbatch=None):
        first = self.is_first_microbatch if is_first_microbatch is None else is_first_microbatch
        self.is_first_microbatch = False
        middle = torch.nn.functional.silu(self.fc1(x, SPLITS, is_first_microbatch=first))
        return self.fc2(middle, SPLITS, is_first_microbatch=first)


def recipe_named(name):
    from transformer_engine.common import recipe

    return getattr(recipe, name)()


def captured(experts, recipe):
    import transformer_engine.pytorch as te

    sample = torch.randn(sum(SPLITS), HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = te.make_graphed_callables(
        experts, (sample,), num_warmup_iters=3, enabled=True, recipe=recipe, cache_quantized_params=True
    )
    for weight in experts.parameters():  # what the warm-up left
        weight.main_grad.zero_()
    return graphed


def train(experts, recipe, told_of_first=True):
    """Outputs and input gradients of every micro-batch, then weight gradients, step by step."""
    import transformer_engine.pytorch as te

    generator = torch.Generator("cuda").manual_seed(1)
    draw = lambda: torch.randn(  # noqa: E731
        sum(SPLITS), HIDDEN, dtype=torch.bfloat16, device="cuda", generator=generator
    )
    steps = []
    for _ in range(STEPS):
        seen = []
        for micro_batch in range(MICRO_BATCHES):
            x, dy = draw().requires_grad_(), draw()
            with te.autocast(enabled=True, recipe=recipe):
                y = experts(x, is_first_microbatch=told_of_first and micro_batch == 0)
            y.backward(dy)
            seen += [y.detach().clone(), x.grad.clone()]
        with torch.no_grad():
            for weight in experts.parameters():
                assert weight.grad is None
                seen.append(weight.main_grad.clone())
                weight -= (0.01 * weight.main_grad).to(weight.dtype)
                weight.main_grad.zero_()
        steps.append(seen)
    return steps


def same(first, other):
    return [torch.equal(a, b) for a, b in zip(first, other, strict=True)]


def replayed(recipe_name, patched, **told):
    with applied(te_grouped.PATCH.replacements if patched else ()):
        recipe = recipe_named(recipe_name)
        return train(captured(Experts(), recipe), recipe, **told)


def eager(recipe_name):
    steps = train(Experts(), recipe_named(recipe_name))
    assert all(tensor.isfinite().all() and tensor.any() for step in steps for tensor in step)
    return steps


def test_the_patch_knows_this_version():
    assert STATE in ("applies", "not needed"), te_grouped.PATCH.verdict().reason


@pytest.mark.parametrize("recipe", RECIPES)
def test_replay_has_the_values_of_eager_execution(recipe):
    for replay, wanted in zip(replayed(recipe, STATE == "applies"), eager(recipe), strict=True):
        assert all(same(replay, wanted))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_replay_that_never_hears_of_changed_weights_does_not(recipe):
    replay, wanted = replayed(recipe, STATE == "applies", told_of_first=False), eager(recipe)
    assert not any(same(replay[-1], wanted[-1]))


@pytest.mark.skipif(STATE != "applies", reason="this Transformer Engine does without the patch")
@pytest.mark.parametrize("recipe", RECIPES)
def test_without_the_patch_weight_gradients_are_wrong(recipe):
    replay, wanted = replayed(recipe, patched=False)[0], eager(recipe)[0]
    activations = 2 * MICRO_BATCHES
    if recipe == "Float8CurrentScaling":  # quantised anew, weights that have not changed are the same
        assert all(same(replay[:activations], wanted[:activations]))
    assert not any(same(replay[activations:], wanted[activations:]))
