"""What one pass of an audit leaves behind does not stay beside the next pass's model."""

import gc
import weakref

import pytest
import torch


class Model:
    """Held by a hook on its weight's gradient, as Megatron's DistributedDataParallel is."""

    def __init__(self) -> None:
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        self.weight = torch.nn.Parameter(torch.ones(2))
        self.accumulate = self.weight.expand_as(self.weight).grad_fn.next_functions[0][0]
        self.accumulate.register_hook(lambda *_: self)
        self.dispatcher = MoEAlltoAllTokenDispatcher.__new__(MoEAlltoAllTokenDispatcher)
        self.dispatcher.probs = self.weight * 2


@pytest.fixture
def collector():
    gc.disable()  # as Bridge does in training
    yield
    gc.enable()


def test_a_model_with_experts_is_gone_after_its_pass(collector):
    from tp_invariant_recipes.training.settle import settle

    model = weakref.ref(Model())
    gone = weakref.proxy(torch.nn.Module())  # what it stood for is no more
    gc.collect()
    assert model() is not None  # the collector alone does not find it
    settle()
    assert model() is None
    del gone
