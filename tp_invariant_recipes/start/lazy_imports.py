# SPDX-License-Identifier: Apache-2.0
"""Packages that Megatron and Megatron-Bridge import at the start and most runs never use: imported when somebody asks.

A stand-in takes the place of such a package in `sys.modules`. It is the package's own module object, not yet executed.
Whoever asks it for a name that it lacks, or imports a further module of the package, makes the package be imported
first, as it would have been at the start:

    import wandb             # the stand-in
    wandb.init(…)            # imports wandb; `wandb` is then the module that it would have been
    AutoBridge, a recipe, a family of models: all of Bridge's families are imported, with their registrations

A row of DEFERRED says what waits, and the processor seconds of a start of four ranks on a CPU that this saves. A row is
for the versions whose imports we have read and whose equivalence tests/distributed/bridge/test_lazy_bridge_whole.py
shows. Other versions are imported at the start, as everything is with TPI_EAGER_IMPORTS=1.
"""

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from tp_invariant_recipes.machine.versions import installed

EAGER = "TPI_EAGER_IMPORTS"  # environment variable: 1 imports everything at the start

# What a stand-in has for a name: the module of the package that has it and can be imported alone; or a `_Later`, whose
# call imports the package, unless there is a function here that returns something other than NotImplemented.
Answer = str | Callable[..., Any] | None


@dataclass(frozen=True)
class Deferred:
    """A package that waits, one row.

    versions:   distribution -> the version that the row is about; None: any. All must be installed.
    modules:    the stand-ins, parents first -> the names that each has without the import.
    below:      the packages: the import of another of their modules imports all of the row first …
    passes:     … but for modules below these.
    """

    versions: Mapping[str, str | None]
    modules: Mapping[str, Mapping[str, Answer]]
    below: Sequence[str]
    passes: Sequence[str] = ()


class _Later:
    """A class or function of a package that waits. While it waits, nothing is an instance of the class."""

    def __init__(self, waiting: "Waiting", module: str, name: str, answer: Callable[..., Any] | None) -> None:
        self.__module__, self.__name__, self.__qualname__ = module, name, name
        self._waiting, self._answer = waiting, answer

    def _real(self) -> Any:
        self._waiting.end()
        return getattr(sys.modules[self.__module__], self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._answer(*args, **kwargs) if self._answer and self._waiting.waits else NotImplemented
        return self._real()(*args, **kwargs) if answer is NotImplemented else answer

    def __instancecheck__(self, instance: Any) -> bool:
        return not self._waiting.waits and isinstance(instance, self._real())

    def __or__(self, other: Any) -> Any:
        return self._real() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._real()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the real one would not either, or it has been done."""


def _nothing_to_restore(model: Sequence[Any], state_dict: Mapping[str, Any]) -> Any:
    if any(str(key).startswith("modelopt_state") for key in state_dict):
        return NotImplemented
    from megatron.core import parallel_state

    for chunk in range(len(model)):  # as the real one does, which leaves the last one set
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    return None


def _equal(x: Any, y: Any) -> Any:
    return x == y if all(type(size) is int for size in (*x, *y)) else NotImplemented


def _no_symbol(a: Any, *_: Any) -> Any:
    return a if type(a) is bool else NotImplemented


def _uncompiled(function: Any = None, *args: Any, **options: Any) -> Any:
    """Return the function as torch._dynamo.disable does, once there is a compiler that could trace it."""
    if not inspect.isfunction(function):
        return NotImplemented
    disabled = functools.cache(lambda: sys.modules[_DYNAMO].disable(function, *args, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if waits(_DYNAMO) else disabled())(*args, **kwargs)

    return call


_DISTILL = "modelopt.torch.distill"
_MODELS = "megatron.bridge.models"
_PRETRAINED = f"{_MODELS}.hf_pretrained"

_DYNAMO = "torch._dynamo"
_SHAPES = "torch.fx.experimental.symbolic_shapes"

_CLASSES = (
    "AutoConfig", "AutoFeatureExtractor", "AutoImageProcessor", "AutoProcessor", "AutoTokenizer", "GenerationConfig",
    "PreTrainedConfig", "PretrainedConfig", "Qwen3VLProcessor",
)  # fmt: skip
_CHAT = "transformers.utils.chat_template_utils"

DEFERRED = (
    # Tokenizers and processors of Hugging Face: 2.2.
    Deferred({"transformers": "5.12.1"},
        {"transformers": dict.fromkeys(_CLASSES), "transformers.utils": {}, _CHAT: {"_compile_jinja_template": None}},
        below=("transformers",)),
    # Bridge's families of models, which register themselves for the conversion from and to Hugging Face: 1.3.
    Deferred({"megatron-bridge": "0.6.2"},
        {"megatron.bridge": {},
         _MODELS: {"GPTModelProvider": f"{_MODELS}.gpt_provider", "T5ModelProvider": f"{_MODELS}.t5_provider"},
         f"{_MODELS}.conversion": {},
         _PRETRAINED: {"PreTrainedCausalLM": f"{_PRETRAINED}.causal_lm"}},
        below=("megatron.bridge",),
        passes=("megatron.bridge.training", "megatron.bridge.data", "megatron.bridge.utils")),
    # Quantization and distillation: 4.7. The functions treat models otherwise that ModelOpt has made, and it makes none
    # before it is imported.
    Deferred({"nvidia-modelopt": "0.47.0", "megatron-bridge": "0.6.2"},
        {"modelopt.torch": {},
         "modelopt.torch.opt": {},
         "modelopt.torch.opt.dynamic": {"DynamicModule": None},
         "modelopt.torch.opt.plugins": {"save_modelopt_state": _nothing, "save_sharded_modelopt_state": _nothing,
                                        "restore_modelopt_state": _nothing_to_restore},
         _DISTILL: {"DistillationModel": None},
         f"{_DISTILL}.plugins": {},
         f"{_DISTILL}.plugins.megatron": {"get_tensor_shapes_adjust_fn_for_distillation": _nothing},
         "megatron.bridge.training.post_training.distillation": {"loss_func_kd": None}},
        below=("modelopt.torch",)),
    # Examples of Hugging Face: 0.4. Bridge replaces a check of its builder, before any data is read.
    Deferred({"datasets": "5.2.0", "megatron-bridge": "0.6.2"},
        {"datasets": dict.fromkeys(("load_dataset", "concatenate_datasets")), "datasets.builder": {}},
        below=("datasets",)),
    # Megatron-Core's timers import it to recognize its writer: 1.0.
    Deferred({"wandb": None}, {"wandb": {}}, below=("wandb",)),
    # torch's compiler, and SymPy, for tensors whose sizes are symbols: 1.3 with `at_the_first_call`. Transformer Engine
    # and optimizers tell the compiler what not to compile, init_process_group what to forget, and
    # torch.use_deterministic_algorithms sets an option. DTensor and torch.autograd.grad compare sizes.
    Deferred({"torch": "2.11.0"},
        {_DYNAMO: {"disable": _uncompiled, "graph_break": _nothing},
         f"{_DYNAMO}.trace_rules": {"clear_lru_cache": _nothing},
         "torch._inductor": {},
         "torch._inductor.config": {},
         _SHAPES: {"expect_true": _no_symbol, "statically_known_true": _no_symbol, "sym_eq": _equal}},
        below=(_DYNAMO, "torch._inductor", _SHAPES)),
)  # fmt: skip


# What the import system sets before it executes a module; where it has not, the module will not have it either.
_SET_BEFORE = ("__path__", "__file__", "__cached__", "__loader__", "__spec__", "__package__")


class _StandIn(ModuleType):
    """A module that is not executed yet; or one that has put another object in its own place, as transformers does."""

    def __getattr__(self, name: str) -> Any:
        waiting: Waiting = vars(self)["__waiting__"]
        if sys.modules.get(self.__name__) is not self and not waiting.waits:
            return getattr(sys.modules[self.__name__], name)
        names = waiting.row.modules[self.__name__]
        if name in _SET_BEFORE or (waiting.in_parts and name not in names):  # then `from … import MODULE` imports it
            raise AttributeError(f"module {self.__name__} waits and has no attribute {name}")
        if name not in names or not waiting.waits:
            waiting.end(self)
            if type(self) is _StandIn and sys.modules.get(self.__name__) is self:  # it is being executed now
                raise AttributeError(f"module {self.__name__} is partially initialized and has no attribute {name}")
            return getattr(self, name)
        answer = names[name]
        if isinstance(answer, str):
            return getattr(import_module(answer), name)
        return _Later(waiting, self.__name__, name, answer)


class _Executed(Loader):
    """Hands out a module that has been executed, which the import system would otherwise execute again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec again."""
        vars(module)["__spec__"] = self._spec  # a module of options of torch refuses attributes that are no options


@dataclass(eq=False)
class Waiting(MetaPathFinder):
    """A package that has been put off. As a finder it sees the imports of further modules of the package.

    around:   holds while the package is imported.
    in_parts: whether its modules are imported without the rest of it (`in_parts`).
    """

    row: Deferred
    around: Callable[[], AbstractContextManager[None]]
    waits: bool = True
    in_parts: bool = False
    _modules: dict[str, ModuleType] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.RLock)

    def place(self) -> None:
        """Put the stand-ins in their places."""
        for name in self.row.modules:
            parent, _, leaf = name.rpartition(".")
            spec = PathFinder.find_spec(name, import_module(parent).__path__ if parent else None)
            assert spec is not None
            module = module_from_spec(spec)
            module.__class__ = _StandIn
            vars(module)["__waiting__"] = self
            self._modules[name] = sys.modules[name] = module
            if parent:
                setattr(sys.modules[parent], leaf, module)

    def end(self, first: ModuleType | None = None) -> None:
        """Execute the stand-ins, once. Raises what one raises; then it waits again. first: of these, before others."""
        with self._lock:
            if not self.waits:
                if first is not None:  # its package is being executed, and asks for it
                    self._execute(first)
                return
            self.waits = False
            try:
                with self.around():
                    for module in self._modules.values():
                        self._execute(module)
            except BaseException:
                self.waits = True
                self._begun.clear()
                for name, module in self._modules.items():
                    module.__class__ = _StandIn
                    vars(module)["__waiting__"] = self
                    sys.modules[name] = module
                raise
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def _execute(self, module: ModuleType) -> None:
        """Execute a module, once, in the object that stands for it; what others have set there stays set."""
        name, spec = module.__name__, module.__spec__
        if name in self._begun:
            return
        self._begun.add(name)
        assert spec is not None
        assert spec.loader is not None
        values = {key: value for key, value in vars(module).items() if not isinstance(value, ModuleType)}
        spec.loader.exec_module(module)
        now = sys.modules[name]
        for key, value in values.items():
            if not key.startswith("__"):
                setattr(now, key, value)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, now)
        if now is module:
            del vars(module)["__waiting__"]
            stands_in = type(module) is _StandIn  # torch's modules of options have become another class
            if stands_in:
                module.__class__ = ModuleType

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """While the package waits, import all of it before one more of its modules."""
        passed = any(_is_below(name, package) for package in self.row.passes)
        if not self.waits or self.in_parts or passed or not any(_is_below(name, package) for package in self.row.below):
            return None
        self.end()
        module = sys.modules.pop(name, None)
        if module is None or module.__spec__ is None:
            return None
        spec = ModuleSpec(name, _Executed(module), origin=module.__spec__.origin)
        spec.submodule_search_locations = module.__spec__.submodule_search_locations
        return spec


def waits(module: str) -> bool:
    """Whether a module has been put off, and nobody has asked for it yet."""
    return isinstance(sys.modules.get(module), _StandIn)


def _is_below(name: str, parent: str) -> bool:
    return f"{name}.".startswith(f"{parent}.")


def may_wait(row: Deferred) -> bool:
    """Whether a package may wait: it has the row's versions, and nobody has imported it."""
    present = {name: installed(name) for name in row.versions}
    known = None not in present.values() and all(row.versions[name] in (None, present[name]) for name in present)
    return known and sys.modules.keys().isdisjoint(row.modules)


@contextmanager
def put_off(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Import Bridge in the block: afterwards the packages of DEFERRED wait until somebody asks for them.

    around: holds while one of them is imported, then.
    """
    waiting = []
    for row in DEFERRED if os.environ.get(EAGER) != "1" else ():
        if may_wait(row):
            waiting.append(Waiting(row, around))
            waiting[-1].place()
    yield
    sys.meta_path[:0] = (finder for finder in waiting if finder.waits)


@contextmanager
def in_parts(package: str) -> Iterator[None]:
    """In the block, a module below a package that waits is imported alone, without the rest of the package.

    The stand-ins have the names of their row and modules, no others. Nothing changes where the package does not wait.
    """
    waiting = [finder for finder in sys.meta_path if isinstance(finder, Waiting) and package in finder.row.below]
    for finder in waiting:
        finder.in_parts = True
    try:
        yield
    finally:
        for finder in waiting:
            finder.in_parts = False


plain: list[bool] = []  # as many as there are blocks now in which functions are called as they are, not compiled


def at_the_first_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch.compile: of a function, the result asks `original` when it is first called.

    torch.compile imports torch's compiler, 730 modules, when it decorates a function. Megatron decorates 40 at its
    import, and most runs call none of them.
    """

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if not inspect.isfunction(model):
            return original(model, **options)
        compiled = functools.cache(lambda: original(model, **options))

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (model if plain else compiled())(*args, **kwargs)

        # As torch.compile has it: a function that is compiled itself, and calls this one, contains the original.
        call._torchdynamo_inline = model  # type: ignore[attr-defined]
        return call

    return compile
