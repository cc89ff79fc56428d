"""Composing in half the time, for a worker of pytest and all its forks.

A worker asks Hydra for the tree of the same arguments once, lists and merges the same files once, reads a file of conf/
or of Hydra's once, and parses an override once; each test gets a copy. Where files are not the repository's own (a
user's tree, a cluster's file, another conf/), Hydra reads them each time.
The fixture `hydra_itself` is for a test of composing: there Hydra reads all files each time.
"""

import copy
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
from hydra.core.override_parser.overrides_parser import OverridesParser

from tp_invariant_recipes.config import hydra_tree
from tp_invariant_recipes.settings import conf_files

CONF = conf_files.conf_dir()

_compose = hydra_tree.composed
_read_file = ConfigRepository.load_config
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_choices = defaults_list._create_interpolation_map
_list = defaults_list._create_defaults_list
_parse = OverridesParser.parse_rule
_trees: dict[tuple[str, ...], bytes] = {}
_files: dict[tuple[str, str, str], bytes] = {}
_merges: dict[str, bytes] = {}
_lists: dict[str, bytes] = {}
_parsed: dict[tuple[str, str], Any] = {}


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
    if not _of_repository(repo):
        return _merge(self, defaults, repo)
    key = repr(defaults)  # every field of every file's place
    if key not in _merges:
        _merges[key] = pickle.dumps(_merge(self, defaults, repo))
    return pickle.loads(_merges[key])


def _of_repository(repo: Any) -> bool:
    return all(source.scheme() != "file" or source.path == str(CONF) for source in repo.get_sources())


def _for_interpolations(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Hydra makes a table of the choices so far for every file; only interpolations in a defaults list read it."""
    asked = any(default.is_interpolation() for default in defaults)
    return _choices(overrides, defaults, self_added) if asked else None


def _listed(
    repo: Any, config_name: str | None, overrides: defaults_list.Overrides, prepend_hydra: bool, skip_missing: bool
) -> tuple[list[Any], Any]:
    """The files to merge depend on the chosen options alone. Hydra keeps them and what it finds in `overrides`."""
    if not _of_repository(repo):
        return _list(repo, config_name, overrides, prepend_hydra, skip_missing)
    own = overrides.config_overrides
    overrides.config_overrides = []
    key = repr((config_name, vars(overrides), prepend_hydra, skip_missing))
    try:
        if key not in _lists:
            defaults, _ = _list(repo, config_name, overrides, prepend_hydra, skip_missing)
            _lists[key] = pickle.dumps((defaults, vars(overrides)))
        defaults, result = pickle.loads(_lists[key])
        vars(overrides).update(result)
    finally:
        overrides.config_overrides = own
    return defaults, None  # nobody reads the tree


def _rule(self: OverridesParser, s: str, rule_name: str) -> Any:
    key = s, rule_name
    if key not in _parsed:
        _parsed[key] = _parse(self, s, rule_name)
    return copy.copy(_parsed[key])


# Whose attribute -> its own value and the one that stands for it.
STANDINS: dict[tuple[Any, str], tuple[Callable, Callable]] = {
    (hydra_tree, "composed"): (_compose, _tree),
    (ConfigRepository, "load_config"): (_read_file, _file),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list"): (_merge, _merged),
    (omegaconf.base, "parse"): (omegaconf.base.parse, functools.cache(omegaconf.base.parse)),
    (defaults_list, "_create_interpolation_map"): (_choices, _for_interpolations),
    (defaults_list, "_create_defaults_list"): (_list, _listed),
    (OverridesParser, "parse_rule"): (_parse, _rule),
}
