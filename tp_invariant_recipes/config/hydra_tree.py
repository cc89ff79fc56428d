"""Hydra composes one configuration from `conf/`, the user's own files and at most one cluster's file."""

import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.override_parser.types import Override as HydrasOverride
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, grammar_parser
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from tp_invariant_recipes.check.invariant import shards
from tp_invariant_recipes.config.overrides import Override, by_hydra, given
from tp_invariant_recipes.errors import ConfigError, refuse
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.reading import MIB, parse_yaml, read_limited
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.settings import conf_files, cuda_graphs, expert_groups
from tp_invariant_recipes.settings.run_config import RunConfig

# The option that stands for a cluster's file, wherever it lies, and for the layer of a recipe. No file of a tree has
# this name.
GIVEN = "_given_file"

# What expert groups follow.
_COUNTS = (
    *("numerics.data_shards", "numerics.context_shards", "parallel.data_parallel_size"),
    *(f"model.{name}_parallel_size" for name in ("tensor_model", "context", "expert_model")),
)

# A user's files with what they hold.
Texts = tuple[tuple[Path, bytes], ...]


class _ParsedOnce(FileConfigSource):
    """tpi's own files, which a process parses once."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a copy of a parsed file."""
        file = Path(self.path, self._normalize_file_name(config_path))
        written = file.stat() if file.exists() else None
        key = file, written and written.st_mtime_ns, written and written.st_size
        if key not in _PARSED:
            _PARSED[key] = pickle.dumps(super().load_config(config_path))
        result: ConfigResult = pickle.loads(_PARSED[key])
        return result


# File, when it was written, its size -> pickled result of parsing it.
_PARSED: dict[tuple[Path, int | None, int | None], bytes] = {}


class _Files(ConfigRepository):
    """Where Hydra looks: `conf/`, then folders of the user's; not in its own tree, of a program's logs and jobs."""

    def __init__(self, conf: Path, folders: Iterable[Path]) -> None:
        self.sources = [_ParsedOnce("main", str(conf)), *(FileConfigSource("tpi", str(folder)) for folder in folders)]

    def get_schema_source(self) -> ConfigSource:
        """Return the store of dataclasses that Hydra asks for a schema of each file."""
        return StructuredConfigSource("schema", "structured://")


def composed(arguments: Sequence[str], cluster: Path | None, model: str | None = None) -> dict[str, Any]:
    """Return the tree that Hydra makes of `arguments`, interpolations resolved.

    A process keeps the trees that it has made, and what Hydra merged of the same files: cells of a matrix differ in
    values alone.

    arguments: options of groups, and values as `++PATH=VALUE`.
    cluster:   the file that `cluster=` GIVEN stands for; it is read as if it lay in `conf/cluster/`.
    model:     the text of the file that `model=` GIVEN stands for.
    Raises ConfigError in the words of what failed, naming the file.
    """
    try:
        tree: Any = pickle.loads(_resolved(tuple(arguments), cluster, model, conf_files.conf_dir(), _texts(cluster)))
        return tree
    except (HydraException, OmegaConfBaseException) as error:
        problems = [*_unreadable(), _first_line(error).replace(f"cluster/{GIVEN}", str(cluster))]
        raise ConfigError("\n".join(problems), problems) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems = _unreadable() or [_of_yaml(error, conf_files.conf_dir())]
        raise ConfigError("\n".join(problems), problems) from error
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror or error}") from error


def _texts(cluster: Path | None) -> Texts:
    """Return the user's own files with what they hold. Raises OSError; ConfigError: one is too large."""
    return tuple((file, _limited(file)) for file in (*_own_files(), *([cluster] if cluster else [])))


def _own_files() -> list[Path]:
    return sorted(conf_files.user_dir().glob("*/*.yaml"))


@cache
def _resolved(arguments: tuple[str, ...], cluster: Path | None, model: str | None, conf: Path, texts: Texts) -> bytes:
    """Return the pickled tree. conf, texts: the folder of tpi's files, and the user's files."""
    parsed = [by_hydra(argument) for argument in arguments]
    values = [value for value in parsed if value.is_force_add() and not value.package]
    options = sorted((option for option in parsed if option not in values), key=lambda option: option.key_or_group)
    tree = pickle.loads(_merged(tuple(str(option.input_line) for option in options), cluster, model, conf, texts))
    for value in values:
        _set(tree, value)
    refuse([*_calls("", OmegaConf.to_container(tree, resolve=False))])
    with _resolvers():
        return pickle.dumps(OmegaConf.to_container(tree, resolve=True))


@cache
def _merged(options: tuple[str, ...], cluster: Path | None, model: str | None, conf: Path, texts: Texts) -> bytes:
    """Return what Hydra merges of the options' files, pickled: a copy by OmegaConf takes eight times as long.

    Its parts are called by themselves: as a whole, it merges twice as many files, of a program's logs and jobs, and
    imports plugins of other packages, which warn of what they lack.
    """
    version.setbase("1.3")
    with _folders(cluster, model, [file for file, _ in texts]) as folders, _resolvers():
        files = CachingConfigRepository(_Files(conf, folders))
        overrides = [by_hydra(option) for option in options]
        loader = ConfigLoaderImpl(ConfigSearchPathImpl())
        loader.validate_sweep_overrides_legal(overrides, RunMode.RUN, from_shell=False)
        chosen = create_defaults_list(files, "config", overrides, prepend_hydra=False, skip_missing=False)
        tree = loader._compose_config_from_defaults_list(chosen.defaults, files)
        OmegaConf.set_struct(tree, True)
        loader._apply_overrides_to_config(chosen.config_overrides, tree)
        return pickle.dumps(tree)


def _set(tree: DictConfig, value: HydrasOverride) -> None:
    """Set a value as Hydra does."""
    try:
        OmegaConf.update(tree, value.key_or_group, value.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise HydraException(f"Error merging override {value.input_line}") from error


def read(file: Path) -> dict[str, Any]:
    """One file as written, neither composed nor resolved. Raises ConfigError naming the file, and the line."""
    try:
        _check_size(file)
        tree: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(_of_yaml(error, file)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: not a mapping of keys to values")
    return tree


def _limited(file: Path) -> bytes:
    """Return what a file holds. OSError: it is no file. ConfigError: it is too large."""
    try:
        return read_limited(file, MIB)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error


def _check_size(file: Path) -> None:
    """OSError: it is no file. ConfigError: it is too large, or its aliases make it so. Hydra finds other mistakes."""
    text = _limited(file)
    try:
        parse_yaml(text)
    except ValueError as error:
        if not isinstance(error.__cause__, yaml.YAMLError):
            raise ConfigError(f"{file}: {error}") from error


def unresolved(group: str, field: str, overrides: Sequence[Override]) -> Any:
    """Return a field of the chosen option of a group as the text of files or an override has it, without composing.

    None: it is not there, or cannot be read.
    """
    if (typed := given(overrides, f"{group}.{field}")) and typed.parsed:
        return typed.parsed.value()
    chosen = given(overrides, group)
    file = chosen and (chosen.file or _option(group, chosen.value))
    try:
        return _written(group, field, file) if file else None
    except ConfigError:
        return None


def written(group: str, option: str) -> dict[str, Any]:
    """Return what the file of an option sets, as written, without what it builds on. Raises ConfigError."""
    return read(_option(group, option))


def _written(group: str, field: str, file: Path) -> Any:
    """Return the field in a file, or in the last of those it builds on that has it."""
    text = read(file)
    own = text.get(group, text)
    if isinstance(own, dict) and field in own:
        return own[field]
    bases = [base.rpartition("/")[2] for base in text.get("defaults", ()) if isinstance(base, str)]
    levels = (_written(group, field, _option(group, base)) for base in reversed(bases) if base != "_self_")
    return next((value for value in levels if value is not None), None)


def _option(group: str, option: str) -> Path:
    return conf_files.users_file(group, option) or conf_files.conf_dir() / group / f"{option}.yaml"


@contextmanager
def _resolvers() -> Iterator[None]:
    """In the block, OmegaConf has the resolvers of RESOLVERS and no other, under whatever name one is called.

    It parses each interpolation once a process: that is most of what resolving a tree takes.
    """
    before = dict(BaseContainer._resolvers)
    BaseContainer._resolvers.clear()
    try:
        for name, function in RESOLVERS.items():
            OmegaConf.register_new_resolver(name, function)
        with applied(
            [Replacement("omegaconf.base:parse", lambda _: _parsed, "each composition parses the same texts")]
        ):
            yield
    finally:
        BaseContainer._resolvers.clear()
        BaseContainer._resolvers.update(before)


_parsed = cache(grammar_parser.parse)


def _calls(path: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with each value that calls another resolver."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _calls(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _calls(f"{path}[{index}]", inner)
    elif isinstance(value, str):
        for name in dict.fromkeys(_CALL.findall(value)):
            if name not in RESOLVERS:
                yield f"{path}: ${{{name}:…}} {NOT_READ}"


def _graphed_modules(*, _parent_: Any, _root_: Any) -> list[str]:
    model: Any = OmegaConf.to_container(_parent_, resolve=False)
    return cuda_graphs.graphed_modules(model, mode.find(_root_["numerics"]["mode"]) is not None)


def _shards(*, _root_: Any) -> int:
    model = {name: OmegaConf.select(_root_, f"model.{name}") for name in shards.SIZES}
    sections = {
        "model": {n: v for n, v in model.items() if not isinstance(v, str) or n == families.VARIANT},
        "mixed_precision": OmegaConf.select(_root_, "mixed_precision"),
        "numerics": {"context_shards": OmegaConf.select(_root_, "numerics.context_shards")},
        "device": {"kind": OmegaConf.select(_root_, "device.kind")},
    }
    return shards.default_shards(RunConfig(sections))


def _expert_groups(*, _root_: Any) -> int | None:
    known = {path: OmegaConf.select(_root_, path) for path in (*_COUNTS, *expert_groups.OTHERS_READ)}
    if not all(isinstance(known[path], int) and known[path] > 0 for path in _COUNTS):
        return None  # the bounds of each say so
    sections: dict[str, dict[str, Any]] = {}
    for path, value in known.items():
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value
    return expert_groups.groups_of_run(RunConfig(sections))


def _fused_dropout(*, _root_: Any) -> bool:
    """Whether dropout is fused with biases: Megatron-Core's grouped experts add theirs by themselves."""
    return not (OmegaConf.select(_root_, "model.num_moe_experts") and OmegaConf.select(_root_, "model.add_bias_linear"))


def _padded_vocabulary(size: int, *, _root_: Any) -> int:
    """Return the vocabulary of a model that has its tokenizer's: as Bridge pads it under stock, and otherwise as at
    tp=1.

    size: the recipe's, where tokenizer.vocab_size follows this one.
    """
    model: Any = OmegaConf.to_container(_root_["model"], resolve=False)
    tokenizer: Any = OmegaConf.to_container(_root_["tokenizer"], resolve=False)
    if not str(tokenizer["vocab_size"]).startswith("${tpi.at_most:"):
        size = OmegaConf.select(_root_, "tokenizer.vocab_size")
    tp = 1 if mode.find(_root_["numerics"]["mode"]) else OmegaConf.select(_root_, "model.tensor_model_parallel_size")
    multiple = (model.get("make_vocab_size_divisible_by") or 1) * tp
    return -(-size // multiple) * multiple if isinstance(multiple, int) and multiple > 0 else size


# What interpolations may call: functions of the tree alone. Others read the environment, files or the clock.
RESOLVERS: dict[str, Callable[..., Any]] = {
    "tpi.more_than_one": lambda n: isinstance(n, int) and n > 1,
    "tpi.at_most": lambda number, other: min(number, other) if isinstance(other, int) else number,
    "tpi.not": lambda value: not value,
    "tpi.times": lambda number, other: number * other if other else None,
    "tpi.padded_vocabulary": _padded_vocabulary,
    "tpi.graphed_modules": _graphed_modules,
    "tpi.or": lambda value, otherwise: otherwise if value is None else value,
    "tpi.shards": _shards,
    "tpi.expert_groups": _expert_groups,
    # Megatron's fused rotary kernels do not suit multi-latent attention.
    "tpi.fused_rotation": lambda *, _root_: not OmegaConf.select(_root_, "model.multi_latent_attention"),
    "tpi.fused_dropout": _fused_dropout,
}
NOT_READ = (
    "is not resolved, since its value would stand in config.yaml, logs, certificates and job scripts; write the value "
    "itself, or hand a variable to the ranks by its name: cluster.forward=[NAME]"
)
_CALL = re.compile(r"(?<!\\)\$\{\s*([A-Za-z_][\w.]*)\s*:")


@contextmanager
def _folders(cluster: Path | None, model: str | None, files: Iterable[Path]) -> Iterator[list[Path]]:
    """Give the folders of the user's files, of the file as an option of `cluster`, and of the text as a `model`."""
    with ExitStack() as stack:
        folders = [conf_files.user_dir()] if conf_files.user_dir().is_dir() else []
        for file in files:
            _check_size(file)  # Hydra would wait for a FIFO, and take aliases for values of their own
        if cluster or model:
            folders.append(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpi-"))))
        if cluster:
            (folders[-1] / "cluster").mkdir()
            (folders[-1] / "cluster" / f"{GIVEN}.yaml").symlink_to(cluster)
        if model:
            (folders[-1] / "model").mkdir()
            (folders[-1] / "model" / f"{GIVEN}.yaml").write_text(model, encoding="utf-8")
        yield folders


def _unreadable() -> list[str]:
    """Return what is wrong with the user's files: the words of Hydra and YAML mostly do not name one."""
    problems = []
    for file in _own_files():
        try:
            read(file)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _first_line(error: HydraException | OmegaConfBaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # what follows is OmegaConf's error
    if isinstance(error, UnsupportedInterpolationType):
        first = f"{first}: it {NOT_READ}"
    key = getattr(error, "full_key", None)
    return f"{key}: {first}" if key else first


def _of_yaml(error: yaml.YAMLError | UnicodeDecodeError, file: Path) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}: not YAML: {error.problem}, line {mark.line + 1}"
    return f"{file}: not YAML: {str(error).splitlines()[0]}"
