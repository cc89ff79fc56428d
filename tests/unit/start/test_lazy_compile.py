"""Functions that torch.compile has decorated at Megatron's import are compiled when somebody calls them."""

import subprocess
import sys

import pytest
import torch

from tp_invariant_recipes.start import lazy_imports
from tp_invariant_recipes.start.lazy_compile import at_the_first_call


@pytest.fixture
def compiled():
    """What a stand-in for torch.compile was asked for, and the decorator."""
    asked = []

    def original(function, **options):
        asked.append((function.__name__, options))
        return lambda x: ("compiled", function(x))

    return asked, at_the_first_call(original)


def double(x):
    """Twice."""
    return 2 * x


@pytest.mark.parametrize("options", ({}, {"dynamic": True}))
def test_a_function_is_compiled_once_when_it_is_called(compiled, options):
    asked, decorate = compiled
    later = decorate(**options)(double) if options else decorate(double)
    assert (later.__name__, later.__doc__, asked) == ("double", "Twice.", [])
    assert [later(1), later(2)] == [("compiled", 2), ("compiled", 4)]
    assert asked == [("double", options)]


def test_a_method_is_called_with_its_object(compiled):
    class Doubling:
        factor = 2

        def times(self, x=3):
            return self.factor * x

    original = at_the_first_call(lambda function: function)
    Doubling.times = original(Doubling.times)
    assert Doubling().times() == 6


def test_what_is_no_function_is_compiled_at_once(compiled):
    asked, decorate = compiled
    module = torch.nn.Identity()
    module.__name__ = "identity"
    decorate(module)
    assert asked == [("identity", {})]


def test_a_compiled_function_contains_those_it_calls():
    """With torch's own compiler and a backend that only keeps the graph: one graph, as of torch.compile's own."""

    def graphs_of(decorate):
        graphs = []

        def keep(graph, _):
            graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        inner = decorate(double, backend=keep)
        assert decorate(lambda x: inner(x) + 1, backend=keep)(torch.ones(2)).tolist() == [3, 3]
        return graphs

    assert graphs_of(at_the_first_call(torch.compile)) == graphs_of(torch.compile) == [["mul", "add"]]


@pytest.mark.release
@pytest.mark.parametrize("eager", ("0", "1"))
def test_bridge_does_not_import_the_compiler(eager, monkeypatch):
    monkeypatch.setenv(lazy_imports.EAGER, eager)
    program = """
import sys, torch
from tp_invariant_recipes.start import bridge
compile = torch.compile
bridge.load()
assert torch.compile is compile
print("torch._inductor.compile_fx" in sys.modules)
from megatron.core.fusions.fused_bias_swiglu import swiglu
x = torch.ones(2, 8)
print(torch.equal(swiglu(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:]))
print("torch._inductor.compile_fx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split()[:1] == [str(eager == "1")], done.stderr
    assert done.stdout.split()[-1:] == ["True"], done.stderr
