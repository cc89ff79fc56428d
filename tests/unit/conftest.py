"""Tests of one function or module at a time, which do without Megatron-Bridge: importing it takes 10 to 20 s.

A test that needs Bridge belongs in tests/distributed, where each worker imports it once.
"""

import functools
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import omegaconf.base
import pytest
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

from tp_invariant_recipes.config import describe, field_table, hydra_tree, source
from tp_invariant_recipes.host import bridge as host_bridge

BRIDGE = "megatron.bridge"


@pytest.fixture(autouse=True)
def _no_bridge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Fail a test that imports Megatron-Bridge, also where a worker has it from a test of another folder."""

    def refuse() -> NoReturn:
        pytest.fail(f"{request.node.nodeid} asks for Megatron-Bridge, so it belongs in tests/distributed")

    monkeypatch.setattr(host_bridge, "load", refuse)
    before = BRIDGE in sys.modules
    yield
    if BRIDGE in sys.modules and not before:
        refuse()


@pytest.fixture(autouse=True)
def _fields_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of Bridge's fields, as it is of the Bridge that the locks install.

    tests/distributed/test_field_table_bridge.py compares it with Bridge.
    """
    monkeypatch.setattr(field_table, "in_environment", field_table.of_the_locks)


_models = functools.cache(describe.models)


@pytest.fixture
def models_table(_read_once: None) -> list[dict[str, Any]]:
    """What `tpi models` shows, composed once a worker."""
    return _models()


_TREES: dict[tuple[str, ...], bytes] = {}


@pytest.fixture
def hydra_itself() -> None:
    """For a test of composing again: Hydra reads the files each time."""


@pytest.fixture(autouse=True)
def _composed_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker asks Hydra for the tree of the same arguments once, which takes 0.2 s; each test gets a copy.

    Where files are not the repository's own (a user's tree, a cluster's file, another conf/), Hydra reads them anew.
    """
    if "hydra_itself" in request.fixturenames:
        return
    conf, composed = source.conf_dir(), hydra_tree.composed

    def once(arguments: Sequence[str], cluster: Path | None) -> dict[str, Any]:
        if cluster or source.user_dir().is_dir() or source.conf_dir() != conf:
            return composed(arguments, cluster)
        key = tuple(arguments)
        if key not in _TREES:
            _TREES[key] = pickle.dumps(composed(arguments, cluster))
        return pickle.loads(_TREES[key])

    monkeypatch.setattr(hydra_tree, "composed", once)


_FILES: dict[tuple[str, str, str], bytes] = {}
_read_file = ConfigRepository.load_config
_parsed_once = functools.cache(omegaconf.base.parse)
_choices = defaults_list._create_interpolation_map


@pytest.fixture(autouse=True)
def _read_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the time of composing: a worker reads a file of conf/ or of Hydra's once, and parses an interpolation once.

    Files of other folders are read each time. Of the choices made so far Hydra makes a table for every file, which only
    interpolations in a defaults list read; here it makes one for those.
    """
    if "hydra_itself" in request.fixturenames:
        return
    conf = str(source.conf_dir())

    def once(self: ConfigRepository, config_path: str) -> Any:
        folder = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        if folder is None or (folder.scheme() == "file" and folder.path != conf):
            return _read_file(self, config_path)
        key = (folder.scheme(), folder.path, config_path)
        if key not in _FILES:
            _FILES[key] = pickle.dumps(_read_file(self, config_path))
        return pickle.loads(_FILES[key])

    monkeypatch.setattr(ConfigRepository, "load_config", once)

    def for_interpolations(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        asked = any(default.is_interpolation() for default in defaults)
        return _choices(overrides, defaults, self_added) if asked else None

    monkeypatch.setattr(omegaconf.base, "parse", _parsed_once)
    monkeypatch.setattr(defaults_list, "_create_interpolation_map", for_interpolations)
