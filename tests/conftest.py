# SPDX-License-Identifier: Apache-2.0
"""What all tests share: an environment of their own, the command line here and in forks, GPU tests only with a GPU."""

import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import typer
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

import tp_invariant_recipes
from tests.forks import Tpi, freeze
from tests.warm import share_trials, warm
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.start.bridge import VERBOSE

# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# `make test`: the same examples each time, so that a change fails by what it changed. `make test-all` draws new ones.
settings.register_profile("same-examples", parent=settings.get_profile("patient"), derandomize=True, max_examples=25)
settings.load_profile("patient")

GPU_TESTS = Path(__file__).parent / "gpu"
FOREIGN = {*(v.name for v in environment.VARIABLES), VERBOSE, "WANDB_API_KEY", "WANDB_MODE"}
SLURM = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_")  # of a job that runs the tests


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Nothing of the machine's that decides what a run does, a cache of one's own, and no traces.

    The folders are in `tmp_path` where a test asks for that: making one for each of 8,000 tests, and removing it in a
    later session, takes seconds.
    """
    if "tmp_path" in request.fixturenames:
        home = request.getfixturevalue("tmp_path")
    else:
        home = tmp_path_factory.getbasetemp() / "homes" / str(next(_numbers))
    own = {name: value for name, value in os.environ.items() if name not in FOREIGN and not name.startswith(SLURM)}
    folders = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "STATE")}
    with mock.patch.dict(os.environ, own | folders, clear=True):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Save what repeats in each test.

    Hypothesis reads the constants of all modules that are loaded, and tries them: that takes 6 s of each worker, and
    examples would follow the order of files. Collections of garbage, as often as Python has them, take a twentieth.
    """
    if config.getoption("hypothesis_profile", None) == "same-examples":
        providers._get_local_constants = lambda: providers._local_constants
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and items stay to the end: collections of garbage would visit them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, one test of each file of GPU tests is skipped, and the others are left out: they take 4 s."""
    needy = [item for item in items if item.get_closest_marker("gpu") or GPU_TESTS in item.path.parents]
    if needy and not gpus.visible():
        first = {item.path: item for item in reversed(needy)}
        for item in first.values():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, as all tests like it in this file"))
        remaining = {*needy} - {*first.values()}
        config.hook.pytest_deselected(items=[item for item in needy if item in remaining])
        items[:] = [item for item in items if item not in remaining]


def pytest_collection_finish() -> None:
    """Collect what importing left, then leave the modules out of later collections: they are most of the heap."""
    freeze()


# What is imported only when a rank trains.
LATE = (
    "megatron.bridge.data.megatron_mimo",
    "megatron.bridge.training.gpt_step",
    "megatron.bridge.training.post_training.distillation",
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.tokenizers.text.models",
    "multiprocessing.popen_fork",
    "multiprocessing.sharedctypes",
    "omegaconf._impl",
    "pydantic.dataclasses",
    "pydantic.type_adapter",
    "pydantic.types",
    "rich._emoji_codes",
    "torch._inductor.compile_fx",
    "torch._inductor.config",
    "tp_invariant_recipes.cpu_host.cpu",
    "typer._adapters",
    "typer._click.decorators",
)

# Packages of ours that a launcher or its ranks import.
PRELOADED = (
    "api", "cli", "comparison", "features", "jobs", "launch", "multinode", "numerics", "observe", "patches", "portable",
    "report", "runs", "training",
)  # fmt: skip

# What many tests train: its files are merged before the worker is forked.
FREQUENT = (
    *(("qwen3_toy", *words) for words in ((), ("numerics=stock",), ("numerics=tree",), ("numerics=portable",))),
    *(("qwen3_toy", "numerics=stock", more) for more in ("data=text", "launcher=slurm")),
    *(("qwen3_moe_toy", *words) for words in ((), ("numerics=stock",))),
)

# Of Megatron's mock data: the index of its own 100,000 documents takes a short run a third of its time, and 40 MB.
MOCK_DOCUMENTS = 1000


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status, standard output, standard error."""

    status: int
    out: str
    err: str


# Else Typer makes all commands anew for each `cli` or `tpi`: 30 ms of 40.
typer.main.get_command = functools.cache(typer.main.get_command)


@pytest.fixture(scope="session", autouse=True)
def _trials(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a run tries of the machine, no later one tries."""
    own = tmp_path_factory.getbasetemp()
    share_trials(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`tpi` in this process, from `main()` on: `cli("show", "qwen3_toy", "tp=2")`."""
    from tp_invariant_recipes.cli.main import main

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tpi", *map(str, arguments)])
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None, raising=False)  # else typer calls us pytest
        with pytest.raises(SystemExit) as stop:
            main()
        output = capsys.readouterr()
        return Ended(int(stop.value.code or 0), output.out, output.err)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: one folder that holds a file."""
    folder = tmp_path / "here"
    (folder / "taken").mkdir(parents=True)
    (folder / "taken" / "file").touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver shows no GPU."""
    monkeypatch.setattr(gpus, "visible", lambda: [])


@pytest.fixture(scope="session")
def bridge() -> None:
    """Megatron-Bridge, imported once for all the forks of this worker."""
    os.environ.update(environment.settings("cpu", {}))
    from tp_invariant_recipes.config import hydra_tree
    from tp_invariant_recipes.machine import versions
    from tp_invariant_recipes.start import bridge

    bridge.load()
    versions.versions()  # read once a process
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    # And what a launcher or its ranks would import, each anew.
    root = Path(tp_invariant_recipes.__file__).parent
    for package in PRELOADED:
        for file in sorted((root / package).rglob("*.py")):
            if file != root / "numerics" / "megatron" / "te_wrappers.py":  # needs Transformer Engine
                import_module(".".join((tp_invariant_recipes.__name__, *file.relative_to(root).with_suffix("").parts)))
    for name in LATE:
        import_module(name)
    for model, *words in FREQUENT:
        hydra_tree.merged([f"model={model}", "device=cpu", *words])

    MockGPTLowLevelDataset.size = MOCK_DOCUMENTS
    warm()

    # Megatron collects garbage as it starts: every rank would go through all of Bridge, and copy what it visits.
    freeze()


@pytest.fixture
def tpi(bridge: None, tmp_path: Path) -> Tpi:
    """`tpi` in an empty folder."""
    return Tpi(tmp_path)


@pytest.fixture(scope="module")
def shared(bridge: None, tmp_path_factory: pytest.TempPathFactory) -> Tpi:
    """`tpi` in a folder that the tests of a module share, for runs that several of them read."""
    return Tpi(tmp_path_factory.mktemp("runs"))
