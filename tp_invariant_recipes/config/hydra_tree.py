# SPDX-License-Identifier: Apache-2.0
"""Hydra composes one configuration from `conf/`, the user's own files and at most one cluster's file."""

import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType

from tp_invariant_recipes.config.fingerprint import flat
from tp_invariant_recipes.config.overrides import Override, given
from tp_invariant_recipes.errors import ConfigError, refuse
from tp_invariant_recipes.numerics.mode import DETERMINISTIC, STOCK
from tp_invariant_recipes.reading import MIB, parse_yaml, read_limited
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.run_config import FSDP_FORMAT

# The option that stands for a cluster's file, wherever it lies, and for the layer of a recipe. No file of a tree has
# this name.
GIVEN = "_given_file"

type Tree = dict[str, Any]


def merged(options: Sequence[str], cluster: Path | None = None, model: str | None = None) -> DictConfig:
    """Return what Hydra merges of the options' files, interpolations as written. A process merges the same files once.

    options: `GROUP=OPTION`, or `~GROUP`.
    cluster: the file that `cluster=` GIVEN stands for; it is read as if it lay in `conf/cluster/`.
    model:   the text of the file that `model=` GIVEN stands for.
    Raises ConfigError in the words of what failed, naming the file.
    """
    chosen = [option.split("=", 1) for option in options if option[0] != "~"]
    files = [(group, cluster if option == GIVEN else conf_files.users_file(group, option)) for group, option in chosen]
    problems: list[str] = []
    for group, file in files:
        try:
            list(_levels(group, file) if file else ())
        except ConfigError as error:
            problems += error.problems
    refuse(problems)
    with _readable(cluster):
        own = [*sorted(conf_files.user_dir().glob("*/*.yaml")), *([cluster] if cluster else [])]
        written = tuple((file, (status := file.stat()).st_mtime_ns, status.st_size) for file in own)
        # A copy by OmegaConf takes 25 times as long.
        tree: DictConfig = pickle.loads(_merged(tuple(sorted(options)), cluster, model, conf_files.conf_dir(), written))
    return tree


def plain(tree: DictConfig) -> Tree:
    """Return a tree with its interpolations as written."""
    made: Any = OmegaConf.to_container(tree, resolve=False)
    return made


def resolved(tree: DictConfig, values: Iterable[tuple[str, Any]], cluster: Path | None = None) -> Tree:
    """Set values in a tree, and return it with interpolations resolved. Raises ConfigError as `merged`.

    values: dotted path -> value; a mapping is merged with what stands there.
    """
    with _readable(cluster):
        for path, value in values:
            try:
                OmegaConf.update(tree, path, value, merge=True, force_add=True)
            except OmegaConfBaseException as error:
                raise HydraException(f"Error merging override {path}={value}") from error
        refuse([*_calls("", plain(tree))])
        with _resolvers():
            made: Any = OmegaConf.to_container(tree, resolve=True)
    return made


@contextmanager
def _readable(cluster: Path | None) -> Iterator[None]:
    """Raise what Hydra and OmegaConf say of files as a ConfigError that names the file."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_line(error).replace(f"cluster/{GIVEN}", str(cluster))) from error
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror or error}") from error


@cache
def _merged(
    options: tuple[str, ...],
    cluster: Path | None,
    model: str | None,
    conf: Path,
    own: tuple[tuple[Path, int, int], ...],
) -> bytes:
    """Return the pickled tree. conf: the folder of tpi's files. own: the user's, when each was written, its size."""
    with _folders(cluster, model) as folders, _alone():
        paths = ",".join(f'"file://{str(folder).replace(chr(34), chr(92) + chr(34))}"' for folder in folders)
        search = [f"hydra.searchpath=[{paths}]"] if folders else []
        with initialize_config_dir(str(conf), version_base="1.3"), _resolvers():
            return pickle.dumps(compose("config", [*options, *search]))


@contextmanager
def _alone() -> Iterator[None]:
    """Hide a program's own Hydra, and plugins that packages install: their imports take 0.4 s and warn of what they
    lack.
    """
    there, program = sys.modules.get("hydra_plugins"), GlobalHydra.instance().hydra
    sys.modules["hydra_plugins"] = None  # type: ignore[assignment]  # the import then fails, as without plugins
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        if program is not None:
            GlobalHydra.instance().initialize(program)
        del sys.modules["hydra_plugins"]
        if there is not None:
            sys.modules["hydra_plugins"] = there


def read(file: Path) -> Tree:
    """One file as written, neither composed nor resolved. Raises ConfigError naming the file, and the line."""
    try:
        _bounded(file)
        tree: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = str(error).splitlines()[0]
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
            why = f"{error.problem}, line {mark.line + 1}"
        raise ConfigError(f"{file}: not YAML: {why}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: not a mapping of keys to values")
    refuse([*_calls(f"{file}: defaults", tree.get("defaults"))])
    refuse([f"{file}: hydra: no such section"] if "hydra" in tree else [])
    return tree


def _bounded(file: Path) -> None:
    """Raise OSError, ValueError: it is no file, or it or what its aliases repeat is too large. It need not be YAML."""
    try:
        parse_yaml(read_limited(file, MIB))
    except ValueError as error:
        if not isinstance(error.__cause__, yaml.YAMLError):
            raise


def unresolved(group: str, field: str, overrides: Sequence[Override]) -> Any:
    """Return a field of the chosen option of a group as the text of files or an override has it, without composing.

    None: it is not there, or cannot be read.
    """
    if (typed := given(overrides, f"{group}.{field}")) and typed.single:
        return typed.data
    chosen = given(overrides, group)
    file = chosen and (chosen.file or _option(group, chosen.value))
    try:
        own = [text.get(group, text) for text in _levels(group, file)] if file else []
    except ConfigError:
        return None
    return next((fields[field] for fields in own if isinstance(fields, dict) and field in fields), None)


def written(group: str, option: str) -> Tree:
    """Return what the file of an option sets, as written, without what it builds on. Raises ConfigError."""
    return read(_option(group, option))


def paths_in_files(overrides: Sequence[Override]) -> set[str]:
    """Return the dotted paths that the user's own files set of the options that overrides choose."""
    chosen = {override.path: override for override in overrides if override.group}
    files = {group: o.file or conf_files.users_file(group, o.value) for group, o in chosen.items()}
    return {path for group, file in files.items() if file for text in _levels(group, file) for path in flat(text)}


def _levels(group: str, file: Path) -> Iterator[Tree]:
    """Yield what a file of an option holds, and after it the files that it builds on."""
    text = read(file)
    yield text
    for base in reversed(text.get("defaults", ())):
        if isinstance(base, str) and (built_on := _option(group, base.rpartition("/")[2])).is_file():
            yield from _levels(group, built_on)


def _option(group: str, option: str) -> Path:
    mine = conf_files.user_dir() / group / f"{option}.yaml"
    return mine if mine.is_file() else conf_files.conf_dir() / group / f"{option}.yaml"


def _lacks(*paths: str) -> Callable[..., bool]:
    """Return a resolver: whether one of these fields is not set, or false."""
    return lambda *, _root_: not all(OmegaConf.select(_root_, path) for path in paths)


def _stock_on_gpu(*, _root_: Any) -> bool:
    return _root_.numerics.mode == STOCK and _root_.device.kind == "gpu"


def _overlaps(*, _root_: Any) -> bool:
    """Return whether data-parallel collectives run under passes: not in the control, and where all modes can."""
    root = _root_
    if root.device.kind != "gpu" or root.parallel.data_parallel_size == 1 or root.numerics.mode == DETERMINISTIC:
        return False
    alone = root.guard.kind == "off" and not root.ddp.get("use_megatron_fsdp")
    return root.optimizer.use_distributed_optimizer and (root.numerics.mode == STOCK or alone)


# What interpolations may call: functions of the tree alone. Others read the environment, files or the clock.
RESOLVERS: dict[str, Callable[..., Any]] = {
    "tpi.more_than_one": lambda n: isinstance(n, int) and n > 1,
    "tpi.at_most": lambda number, other: min(number, other) if isinstance(other, int) else number,
    "tpi.not": lambda value: not value,
    "tpi.times": lambda number, other: number * other if other else None,
    "tpi.or": lambda value, otherwise: otherwise if value is None else value,
    # Megatron's fused rotary kernels do not suit multi-latent attention; its grouped experts add their biases alone.
    "tpi.fused_rotation": _lacks("model.multi_latent_attention"),
    "tpi.fused_dropout": _lacks("model.num_moe_experts", "model.add_bias_linear"),
    "tpi.checkpoint_format": lambda *, _root_: FSDP_FORMAT if _root_.ddp.get("use_megatron_fsdp") else "torch_dist",
    "tpi.overlaps": _overlaps,
    # What Bridge's recipes have, and no other numerics of tpi.
    "tpi.stock_on_gpu": _stock_on_gpu,
}
NOT_READ = (
    "is not resolved, since its value would stand in config.yaml, logs, certificates and job scripts; write the value "
    "itself, or hand a variable to the ranks by its name: cluster.forward=[NAME]"
)
# A call, or a name that another interpolation makes; a backslash before it makes it text.
_CALL = re.compile(r"(?<!\\)(?:\\\\)*\$\{\s*([\w.-]*)\s*(:|\$\{)")


@contextmanager
def _resolvers() -> Iterator[None]:
    """In the block, OmegaConf has the resolvers of RESOLVERS; afterwards, those of the program."""
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        yield
    finally:
        for name in RESOLVERS:
            OmegaConf.clear_resolver(name)


def _calls(path: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with each value that calls another resolver."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _calls(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _calls(f"{path}[{index}]", inner)
    elif isinstance(value, str):
        for name, follows in dict.fromkeys(_CALL.findall(value)):
            if follows != ":" or name not in RESOLVERS:
                yield f"{path}: ${{{name}{follows}…}} {NOT_READ}"


@contextmanager
def _folders(cluster: Path | None, model: str | None) -> Iterator[list[Path]]:
    """Give the folders of the user's files, of the file as an option of `cluster`, and of the text as a `model`."""
    with ExitStack() as stack:
        folders = [conf_files.user_dir()] if conf_files.user_dir().is_dir() else []
        if cluster or model:
            folders.append(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpi-"))))
        if cluster:
            (folders[-1] / "cluster").mkdir()
            (folders[-1] / "cluster" / f"{GIVEN}.yaml").symlink_to(cluster)
        if model:
            (folders[-1] / "model").mkdir()
            (folders[-1] / "model" / f"{GIVEN}.yaml").write_text(model, encoding="utf-8")
        yield folders


def _first_line(error: HydraException | OmegaConfBaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # what follows is OmegaConf's error
    if isinstance(error, UnsupportedInterpolationType):
        first = f"{first}: it {NOT_READ}"
    key = getattr(error, "full_key", None)
    return f"{key}: {first}" if key else first
