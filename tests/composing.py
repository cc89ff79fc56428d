"""Composing in half the time, for a worker of pytest and all its forks.

A worker asks Hydra for the tree of the same arguments once, merges the same files once, and reads a file of conf/ or of
Hydra's once; each test gets a copy. Where files are not the repository's own (a user's tree, a cluster's file, another
conf/), Hydra reads them each time.
The fixture `hydra_itself` is for a test of composing: there Hydra reads all files each time.
"""

import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import omegaconf.base
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

from tp_invariant_recipes.config import hydra_tree
from tp_invariant_recipes.settings import conf_files

CONF = conf_files.conf_dir()

_compose = hydra_tree.composed
_read_file = ConfigRepository.load_config
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_choices = defaults_list._create_interpolation_map
_trees: dict[tuple[str, ...], bytes] = {}
_files: dict[tuple[str, str, str], bytes] = {}
_merges: dict[str, bytes] = {}


def _tree(arguments: Sequence[str], cluster: Path | None, model: str | None = None) -> dict[str, Any]:
    if cluster or model or conf_files.user_dir().is_dir() or conf_files.conf_dir() != CONF:
        return _compose(arguments, cluster, model)
    key = tuple(arguments)
    if key not in _trees:
        _trees[key] = pickle.dumps(_compose(arguments, cluster))
    return pickle.loads(_trees[key])


def _file(self: ConfigRepository, config_path: str) -> Any:
    folder = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
    if folder is None or (folder.scheme() == "file" and folder.path != str(CONF)):
        return _read_file(self, config_path)
    key = (folder.scheme(), folder.path, config_path)
    if key not in _files:
        _files[key] = pickle.dumps(_read_file(self, config_path))
    return pickle.loads(_files[key])


def _merged(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    if any(source.scheme() == "file" and source.path != str(CONF) for source in repo.get_sources()):
        return _merge(self, defaults, repo)
    key = repr(defaults)  # every field of every file's place
    if key not in _merges:
        _merges[key] = pickle.dumps(_merge(self, defaults, repo))
    return pickle.loads(_merges[key])


def _for_interpolations(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Hydra makes a table of the choices so far for every file; only interpolations in a defaults list read it."""
    asked = any(default.is_interpolation() for default in defaults)
    return _choices(overrides, defaults, self_added) if asked else None


# Whose attribute -> its own value and the one that stands for it.
STANDINS: dict[tuple[Any, str], tuple[Callable, Callable]] = {
    (hydra_tree, "composed"): (_compose, _tree),
    (ConfigRepository, "load_config"): (_read_file, _file),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list"): (_merge, _merged),
    (omegaconf.base, "parse"): (omegaconf.base.parse, functools.cache(omegaconf.base.parse)),
    (defaults_list, "_create_interpolation_map"): (_choices, _for_interpolations),
}
