"""Packages that Megatron and Megatron-Bridge import at the start and most runs never use: imported when somebody asks.

A stand-in takes the place of such a package in `sys.modules`. It is the package's own module object, not yet executed.
Whoever asks it for a name that it lacks, or imports a further module of the package, makes the package be imported
first, as it would have been at the start:

    import wandb             # the stand-in
    wandb.init(…)            # imports wandb; `wandb` is then the module that it would have been
    AutoBridge, a recipe, a family of models: all of Bridge's families are imported, with their registrations

A row of DEFERRED says what waits. A row is for the versions whose imports we have read and whose equivalence
tests/unit/start/test_lazy_bridge.py shows. Other versions are imported at the start, as everything is with
TPI_EAGER_IMPORTS=1.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from tp_invariant_recipes.machine.versions import installed

EAGER = "TPI_EAGER_IMPORTS"  # environment variable: 1 imports everything at the start

Answer = Callable[["Waiting"], Any]  # makes what a stand-in has for a name


@dataclass(frozen=True)
class Deferred:
    """A package that waits, one row.

    versions:   distribution -> the version that the row is about; None: any. All must be installed.
    modules:    the stand-ins, parents first -> the names that each has without the import.
    below:      the package: the import of another of its modules imports all of it first …
    passes:     … but for modules below these.
    registry:   a module that looks into what the package registers. Once it is imported, the package waits no longer.
    while_waits: another package that waits, to which this one adds: once that is imported, this one waits no longer.
    """

    versions: Mapping[str, str | None]
    modules: Mapping[str, Mapping[str, Answer]]
    below: str
    passes: Sequence[str] = ()
    registry: str | None = None
    while_waits: str | None = None


class _Function:
    """A function of the package. A call imports the package, unless `idle` of the arguments says that it would do
    nothing, or that it has been done.
    """

    def __init__(self, module: str, name: str, idle: Callable[..., bool], waiting: "Waiting") -> None:
        self.__module__, self.__name__, self.__qualname__ = module, name, name
        self._idle, self._waiting = idle, waiting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._waiting.waits and self._idle(*args, **kwargs):
            return None
        self._waiting.end()
        return getattr(sys.modules[self.__module__], self.__name__)(*args, **kwargs)


class _Class:
    """A class of the package: nothing is an instance of it while the package waits."""

    def __init__(self, module: str, name: str, waiting: "Waiting") -> None:
        self._module, self._name, self._waiting = module, name, waiting

    def _real(self) -> Any:
        self._waiting.end()
        return getattr(sys.modules[self._module], self._name)

    def __instancecheck__(self, instance: Any) -> bool:
        return not self._waiting.waits and isinstance(instance, self._real())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __or__(self, other: Any) -> Any:
        return self._real() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._real()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


def _alone(module: str, name: str) -> Answer:
    """Return a name of another module of the package, which can be imported alone."""
    return lambda _: getattr(import_module(module), name)


def _always(*_: Any, **__: Any) -> bool:
    return True


def _never(*_: Any, **__: Any) -> bool:
    return False


def _nothing_to_restore(model: Sequence[Any], state_dict: Mapping[str, Any]) -> bool:
    if any(str(key).startswith("modelopt_state") for key in state_dict):
        return False
    from megatron.core import parallel_state

    for chunk in range(len(model)):  # as the real one does, which leaves the last one set
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    return True


_PLUGINS, _DISTILL = "modelopt.torch.opt.plugins", "modelopt.torch.distill"
_DYNAMIC = "modelopt.torch.opt.dynamic"
_DISTILL_MEGATRON = f"{_DISTILL}.plugins.megatron"
_ADJUST = "get_tensor_shapes_adjust_fn_for_distillation"
_KD = "megatron.bridge.training.post_training.distillation"
_MODELS = "megatron.bridge.models"
_PRETRAINED = f"{_MODELS}.hf_pretrained"

_CLASSES = (
    "AutoConfig", "AutoFeatureExtractor", "AutoImageProcessor", "AutoProcessor", "AutoTokenizer", "GenerationConfig",
    "PreTrainedConfig", "PretrainedConfig", "Qwen3VLProcessor",
)  # fmt: skip
_CHAT = "transformers.utils.chat_template_utils"

DEFERRED = (
    # Tokenizers and processors of Hugging Face.
    Deferred(
        {"transformers": "5.12.1"},
        {
            "transformers": {name: partial(_Class, "transformers", name) for name in _CLASSES},
            "transformers.utils": {},
            _CHAT: {"_compile_jinja_template": partial(_Function, _CHAT, "_compile_jinja_template", _never)},
        },
        below="transformers",
    ),
    # Bridge's families of models register themselves for the conversion from and to Hugging Face; four of them also
    # register their configurations at transformers.
    Deferred(
        {"megatron-bridge": "0.6.2"},
        {
            "megatron.bridge": {},
            _MODELS: {
                "GPTModelProvider": _alone(f"{_MODELS}.gpt_provider", "GPTModelProvider"),
                "T5ModelProvider": _alone(f"{_MODELS}.t5_provider", "T5ModelProvider"),
            },
            f"{_MODELS}.conversion": {},
            _PRETRAINED: {"PreTrainedCausalLM": _alone(f"{_PRETRAINED}.causal_lm", "PreTrainedCausalLM")},
        },
        below="megatron.bridge",
        passes=("megatron.bridge.training", "megatron.bridge.data", "megatron.bridge.utils"),
        registry=f"{_MODELS}.conversion.model_bridge",
        while_waits="transformers",
    ),
    # Quantization and distillation. The functions treat models otherwise that ModelOpt has made, and it makes none
    # before it is imported.
    Deferred(
        {"nvidia-modelopt": "0.47.0", "megatron-bridge": "0.6.2"},
        {
            "modelopt.torch": {},
            "modelopt.torch.opt": {},
            _DYNAMIC: {"DynamicModule": partial(_Class, _DYNAMIC, "DynamicModule")},
            _PLUGINS: {
                "save_modelopt_state": partial(_Function, _PLUGINS, "save_modelopt_state", _always),
                "save_sharded_modelopt_state": partial(_Function, _PLUGINS, "save_sharded_modelopt_state", _always),
                "restore_modelopt_state": partial(_Function, _PLUGINS, "restore_modelopt_state", _nothing_to_restore),
            },
            _DISTILL: {"DistillationModel": partial(_Class, _DISTILL, "DistillationModel")},
            f"{_DISTILL}.plugins": {},
            _DISTILL_MEGATRON: {_ADJUST: partial(_Function, _DISTILL_MEGATRON, _ADJUST, _always)},
            _KD: {"loss_func_kd": partial(_Function, _KD, "loss_func_kd", _never)},
        },
        below="modelopt.torch",
    ),
    # Examples of Hugging Face. Bridge replaces a check of its builder, before any data is read.
    Deferred(
        {"datasets": "5.2.0", "megatron-bridge": "0.6.2"},
        {
            "datasets": {
                name: partial(_Function, "datasets", name, _never) for name in ("load_dataset", "concatenate_datasets")
            },
            "datasets.builder": {},
        },
        below="datasets",
    ),
    # Megatron-Core's timers import it to recognize its writer.
    Deferred({"wandb": None}, {"wandb": {}}, below="wandb"),
    # Multimodal data. It imports the storage client, which Megatron-Core only asks whether it is there.
    Deferred(
        {"megatron-energon": "7.4.1", "megatron-bridge": "0.6.2"},
        {
            "megatron.energon": {
                "WorkerConfig": partial(_Class, "megatron.energon", "WorkerConfig"),
                "get_savable_loader": partial(_Function, "megatron.energon", "get_savable_loader", _never),
                "get_train_dataset": partial(_Function, "megatron.energon", "get_train_dataset", _never),
            }
        },
        below="megatron.energon",
    ),
    Deferred({"multi-storage-client": None}, {"multistorageclient": {}}, below="multistorageclient"),
)


# What the import system sets before it executes a module; where it has not, the module will not have it either.
_SET_BEFORE = ("__path__", "__file__", "__cached__", "__loader__", "__spec__", "__package__")


class _StandIn(ModuleType):
    """A module that is not executed yet. What others set in it meanwhile, they set again once it is."""

    def __setattr__(self, name: str, value: Any) -> None:
        waiting: Waiting | None = vars(self).get("__waiting__")
        if waiting is not None and waiting.waits and not isinstance(value, ModuleType):
            waiting.changes.append((self.__name__, name, value))
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _SET_BEFORE:
            raise AttributeError(f"module {self.__name__} has no attribute {name}")
        waiting: Waiting = vars(self)["__waiting__"]
        answer = waiting.later.modules[self.__name__].get(name)
        if answer is not None and waiting.waits:
            return vars(self).setdefault(name, answer(waiting))
        if waiting.in_parts:  # a `from … import MODULE` then imports that module
            raise AttributeError(f"module {self.__name__} waits and has no attribute {name}")
        waiting.end()
        if type(self) is _StandIn:  # it is being executed now
            raise AttributeError(f"module {self.__name__} is partially initialized and has no attribute {name}")
        return getattr(self, name)


class _Replaced(ModuleType):
    """A module that puts another object in its own place in sys.modules, as transformers does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[self.__name__], name)


class _InPlace(Loader):
    """Executes a module in the object that stood for it. done: it is executed already."""

    def __init__(self, module: ModuleType, *, done: bool) -> None:
        self._module, self._done = module, done
        assert module.__spec__ is not None
        self._spec = module.__spec__  # the import system sets another, whose loader this is

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the object that stood for the module."""
        return self._module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute it, unless that is done."""
        assert self._spec.loader is not None
        try:
            if not self._done:
                self._spec.loader.exec_module(module)
        finally:
            module.__spec__ = self._spec


@dataclass(eq=False)
class Waiting(MetaPathFinder):
    """A package that has been put off. As a finder it sees the imports of further modules of the package.

    around: holds while the package is imported.
    in_parts: whether its modules are imported without the rest of it (`in_parts`).
    changes: attributes that others have set in stand-ins: module, name, value.
    """

    later: Deferred
    around: Callable[[], AbstractContextManager[None]]
    waits: bool = True
    in_parts: bool = False
    changes: list[tuple[str, str, Any]] = field(default_factory=list)
    _modules: dict[str, ModuleType] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)
    _ending: bool = False

    def place(self) -> None:
        """Put the stand-ins in their places."""
        for name in self.later.modules:
            spec = _find(name)
            assert spec is not None
            module = module_from_spec(spec)
            module.__class__ = _StandIn
            vars(module)["__waiting__"] = self
            self._modules[name] = sys.modules[name] = module
            _set_in_parent(name, module)

    def watch(self) -> None:
        """From now on the import of another module of the package imports all of it first."""
        sys.meta_path.insert(0, self)
        if self.later.registry in sys.modules or not _waits(self.later.while_waits):
            self.end()

    def end(self) -> None:
        """Import the package, once. Raises what its import raises; then it still waits."""
        with self._lock:
            if self._ending or not self.waits:
                return
            self._ending = True
            self.waits = False
            watched = self in sys.meta_path
            if not watched:
                sys.meta_path.insert(0, self)
            try:
                for name, module in self._modules.items():
                    del sys.modules[name]
                    for answered in self.later.modules[name]:
                        vars(module).pop(answered, None)
                with self.around():
                    for name in self._modules:
                        import_module(name)
            except BaseException:
                self.waits = True
                sys.modules.update(self._modules)
                if not watched:
                    sys.meta_path.remove(self)
                raise
            finally:
                self._ending = False
            sys.meta_path.remove(self)
            for name, attribute, value in self.changes:
                setattr(sys.modules[name], attribute, value)
            for name, module in self._modules.items():
                del vars(module)["__waiting__"]
                module.__class__ = ModuleType if sys.modules.get(name) is module else _Replaced
        for other in list(sys.meta_path):
            if isinstance(other, Waiting) and other.later.while_waits in self._modules and not other.in_parts:
                other.end()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """While the package waits, import all of it before one more of its modules; meanwhile, the stand-ins' specs."""
        if self._ending:
            return self._in_place(self._modules[name], done=False) if name in self._modules else None
        if self.in_parts:
            return None
        if not _is_below(name, self.later.below) or any(_is_below(name, package) for package in self.later.passes):
            return None
        self.end()
        module = sys.modules.pop(name, None)  # the import system would execute a module that it finds there now again
        return None if module is None else self._in_place(module, done=True)

    def _in_place(self, module: ModuleType, *, done: bool) -> ModuleSpec:
        spec = module.__spec__
        assert spec is not None
        there = ModuleSpec(spec.name, _InPlace(module, done=done), origin=spec.origin)
        there.submodule_search_locations = spec.submodule_search_locations
        return there


def _waits(module: str | None) -> bool:
    return module is None or isinstance(sys.modules.get(module), _StandIn)


def _is_below(name: str, parent: str) -> bool:
    return f"{name}.".startswith(f"{parent}.")


def _find(name: str) -> ModuleSpec | None:
    """Return the spec of a module. Its parents are imported."""
    parent = name.rpartition(".")[0]
    return PathFinder.find_spec(name, import_module(parent).__path__ if parent else None)


def _set_in_parent(name: str, module: ModuleType) -> None:
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)


def reason_against(later: Deferred) -> str | None:
    """Why a package is imported at the start; None: it waits."""
    if os.environ.get(EAGER) == "1":
        return f"{EAGER}=1"
    for distribution, version in later.versions.items():
        present = installed(distribution)
        if present is None:
            return f"{distribution} is not installed"
        if version not in (None, present):
            return f"{distribution} is {present}; its imports are known for {version}"
    there = [name for name in later.modules if name in sys.modules]
    if not _waits(later.while_waits):
        there.append(str(later.while_waits))
    return f"{there[0]} is imported already" if there else None


@contextmanager
def put_off(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Import Bridge in the block: afterwards the packages of DEFERRED wait until somebody asks for them.

    around: holds while one of them is imported, then.
    """
    waiting = []
    for later in DEFERRED:
        if reason_against(later) is None:
            waiting.append(Waiting(later, around))
            waiting[-1].place()
    yield
    for finder in waiting:
        if finder.waits:
            finder.watch()


@contextmanager
def in_parts(package: str) -> Iterator[None]:
    """In the block, a module below a package that waits is imported alone, without the rest of the package.

    The stand-ins have the names of their row and modules, no others, and an import of `while_waits` ends no waiting.
    Nothing changes where the package does not wait.
    """
    waiting = [finder for finder in sys.meta_path if isinstance(finder, Waiting) and finder.later.below == package]
    for finder in waiting:
        finder.in_parts = True
    try:
        yield
    finally:
        for finder in waiting:
            finder.in_parts = False
