"""A captured step ends the run when its gradients are no numbers."""

from types import SimpleNamespace

import pytest
import torch

from tp_invariant_recipes.errors import RunError

pytestmark = pytest.mark.usefixtures("bridge")
NAN, INFINITY = float("nan"), float("inf")


def ended(norm, skipped=False):
    from tp_invariant_recipes.training.callbacks import Finite

    state = SimpleNamespace(train_state=SimpleNamespace(step=3))
    Finite().on_train_step_end(SimpleNamespace(grad_norm=norm, skipped_iter=skipped, state=state))


@pytest.mark.parametrize("norm", (NAN, INFINITY, torch.tensor(NAN)), ids=str)
def test_a_norm_that_is_no_number_ends_the_run(norm):
    with pytest.raises(RunError, match=r"the gradient norm of step 4 is (nan|inf); cuda_graph=off"):
        ended(norm)


@pytest.mark.parametrize("norm, skipped", ((0.0, False), (torch.tensor(1e30), False), (None, False), (INFINITY, True)))
def test_any_other_does_not(norm, skipped):
    ended(norm, skipped)
