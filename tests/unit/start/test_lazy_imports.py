# SPDX-License-Identifier: Apache-2.0
"""Packages and torch.compile that wait to be used, shown with a small package; whole: test_lazy_bridge_whole.py."""

import sys
import threading
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType

import pytest
import torch

from tp_invariant_recipes.start import lazy_imports
from tp_invariant_recipes.start.lazy_imports import Deferred, Waiting, at_the_first_call

FILES = {
    "zoo/__init__.py": "import zoo.cat\nfrom zoo.plain import Plain\nfrom zoo.dog import Dog\nname = 'zoo'\n",
    "zoo/plain.py": "class Plain: pass\n",
    "zoo/registry.py": "animals = []\n",
    "zoo/cat.py": "from zoo.registry import animals\nanimals.append('cat')\nclass Cat: pass\n",
    "zoo/dog.py": "import zoo\nfrom zoo.registry import animals\nanimals.append('dog')\nclass Dog: pass\n",
    "zoo/tools/__init__.py": "",
    "zoo/tools/ruler.py": "length = 3\n",
}


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Puts a row off, whose packages are in a folder; afterwards nothing of it is left."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    finders, before = list(sys.meta_path), set(sys.modules)

    def put(**settings) -> Waiting:
        answers = {"Plain": "zoo.plain"}
        row = {"versions": {}, "modules": {"zoo": answers}, "below": ("zoo",), "passes": ("zoo.tools",)}
        waiting = Waiting(Deferred(**row | settings), nullcontext)
        waiting.place()
        sys.meta_path.insert(0, waiting)
        return waiting

    yield put
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_stand_in_is_the_module_itself_once_somebody_asks(put):
    waiting = put()
    import zoo

    assert waiting.waits
    assert "zoo.cat" not in sys.modules
    assert zoo.name == "zoo"
    assert not waiting.waits
    assert sys.modules["zoo"] is zoo
    assert type(zoo) is ModuleType
    assert zoo.__spec__.loader is zoo.__loader__
    assert waiting not in sys.meta_path
    with pytest.raises(AttributeError, match="nothing"):
        _ = zoo.nothing


def test_another_module_of_the_package_brings_all_of_it_and_is_executed_once(put):
    waiting = put()
    from zoo.cat import Cat

    assert not waiting.waits
    from zoo.registry import animals

    assert animals == ["cat", "dog"]
    assert sys.modules["zoo"].cat.Cat is Cat
    assert sys.modules["zoo.cat"].__spec__.origin.endswith("cat.py")


OPTIONS = """
import sys
from types import ModuleType
class Options(ModuleType):
    def __setattr__(self, name, value):
        raise AttributeError(f"{name} is no option")
size = 1
sys.modules[__name__].__class__ = Options
"""


def test_a_module_may_refuse_attributes(put, tmp_path):
    """torch._dynamo.config does, which Megatron-FSDP's first DTensor imports."""
    (tmp_path / "zoo" / "cat.py").write_text(OPTIONS)
    put()
    import zoo.cat

    assert zoo.cat.size == 1
    assert zoo.cat.__spec__.origin.endswith("cat.py")


def test_a_module_that_passes_leaves_the_package_waiting(put):
    waiting = put()
    assert import_module("zoo.tools.ruler").length == 3
    assert waiting.waits


def test_in_parts_a_module_is_imported_without_the_rest(put):
    waiting = put()
    with lazy_imports.in_parts("zoo"):
        from zoo import cat  # a name of the package before it is one of its modules
    assert waiting.waits
    assert sys.modules["zoo.registry"].animals == ["cat"]
    assert "zoo.dog" not in sys.modules
    from zoo.dog import Dog

    assert not waiting.waits
    assert sys.modules["zoo.registry"].animals == ["cat", "dog"]
    assert sys.modules["zoo"].cat is cat
    assert sys.modules["zoo"].Dog is Dog


def test_an_import_that_fails_says_so_and_can_be_retried(put, tmp_path):
    (tmp_path / "zoo" / "dog.py").write_text("raise RuntimeError('no dog')\n")
    waiting = put()
    import zoo

    with pytest.raises(RuntimeError, match="no dog"):
        _ = zoo.name
    assert waiting.waits
    (tmp_path / "zoo" / "dog.py").write_text("class Dog: pass # here now\n")
    assert zoo.name == "zoo"


def test_other_threads_wait_for_the_whole_import(put, tmp_path):
    (tmp_path / "zoo" / "dog.py").write_text("import time\ntime.sleep(0.2)\nclass Dog: pass\n")
    put()
    import zoo

    names = []
    threads = [threading.Thread(target=lambda: names.append(zoo.name)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == ["zoo"] * 4


@pytest.mark.parametrize(
    "distribution, version, waits",
    (("pytest", pytest.__version__, True), ("pytest", None, True), ("pytest", "0.1", False), ("nothing", None, False)),
)
def test_only_versions_that_are_known_wait(distribution, version, waits):
    assert lazy_imports.may_wait(Deferred({distribution: version}, {"zoo": {}}, below=("zoo",))) is waits


def double(x):
    """Twice."""
    return 2 * x


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
