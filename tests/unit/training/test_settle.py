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


def test_workspaces_of_products_are_freed_with_the_graph_that_they_lie_in(monkeypatch):
    """cuBLAS keeps them; one of a few MiB would keep all memory of a graph's pool from being freed."""
    from tp_invariant_recipes.training.settle import settle

    happened = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    clear = ("_cuda_clearCublasWorkspaces", lambda: happened.append("workspaces"))
    monkeypatch.setattr(torch._C, *clear, raising=False)  # torch for CPUs has none
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("cache"))
    settle()
    assert happened == ["workspaces", "cache"]
