"""An engine's error names the format that it computed in, and no other error does."""

import numpy as np
import pytest
import torch

from tp_invariant_recipes.features.score import hidden_workflow


@pytest.fixture
def states():
    """Hidden states with a few large features, as language models have: [32, 320]."""
    x = torch.randn(32, 320, generator=torch.Generator().manual_seed(1))
    x[:, 7] *= 60
    return x


@pytest.mark.parametrize("name", hidden_workflow.FORMATS)
def test_a_format_is_named_also_with_noise_of_other_operations(states, name):
    rounded = hidden_workflow.FORMATS[name](states)
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(2)) * (rounded - states).std() / 3
    assert hidden_workflow.format_of((rounded + noise).numpy(), states.numpy()) == name


@pytest.mark.parametrize("wrong", (lambda x: 1.01 * x, lambda x: np.roll(x, 1, 0), lambda x: x))
def test_another_error_has_no_format(states, wrong):
    assert hidden_workflow.format_of(wrong(states.numpy()), states.numpy()) is None
