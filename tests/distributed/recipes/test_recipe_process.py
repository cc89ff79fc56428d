# SPDX-License-Identifier: Apache-2.0
"""A recipe runs in a process of its own: nothing that it raises, ends or patches reaches tpi or another run."""

import os
import signal
import string
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.recipes.test_recipe_models import MINE
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.sources import recipe_process, recipe_source

pytestmark = pytest.mark.usefixtures("families")

# How a recipe can end, and what is said of it. The last has no traceback, so no line either.
ENDS = {
    "sys.exit(0)": "SystemExit: 0 at {file}:{line}",
    "sys.exit(3)": "SystemExit: 3 at {file}:{line}",
    "os._exit(0)": "SystemExit: 0 at {file}:{line}",
    "raise KeyboardInterrupt": "KeyboardInterrupt at {file}:{line}",
    "raise BaseException('no')": "BaseException: no at {file}:{line}",
    "raise ValueError('no')": "ValueError: no at {file}:{line}",
    "os.kill(os.getpid(), 9)": "the recipe's process was killed by SIGKILL",
}
OTHERS = ("sys.exit(3)", "raise BaseException('no')")  # end as another one does
DEFINED = "\n\ndef small():\n    pass\n"  # a file without the function is refused before it runs
START = "import os\nimport string\nimport sys\n"
IN_FUNCTION = START + "def small():\n    {}\n"
LEAVING = """
import sys

GPTModelProvider.provide = lambda *arguments, **keywords: sys.exit(0)
"""
PATCHING = "string.digits = 'patched'\ndef small():\n    pass\n"
HANGING = """
import os
import time

with open("process", "w") as file:
    print(os.getpid(), file=file)
time.sleep(3600)
"""
OWN_CLASS = """
import dataclasses


@dataclasses.dataclass
class Provider(GPTModelProvider):
    extra: int = 3


def act(x):
    return torch.nn.functional.silu(x)


def own():
    cfg = small()
    cfg.model = Provider(**{f.name: getattr(cfg.model, f.name) for f in dataclasses.fields(cfg.model) if f.init})
    cfg.model.activation_func = act
    return cfg
"""
# A change of one run's arithmetic that its own ranks make again, and no other run's.
HALVED = """
from megatron.core.optimizer import optimizer

_clip = optimizer.clip_grad_by_total_norm_fp32


def halved(parameters, max_norm, *rest, **more):
    return _clip(parameters, max_norm / 2, *rest, **more)


optimizer.clip_grad_by_total_norm_fp32 = halved
"""


def refused(file, text):
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(f"recipe={file}:small", device="cpu")
    return str(caught.value)


@pytest.mark.parametrize(
    "statement, message",
    [pytest.param(*end, marks=[pytest.mark.release] * (end[0] in OTHERS)) for end in ENDS.items()],
    ids=ENDS,
)
def test_what_ends_a_recipe_is_reported_with_its_file_and_line(bridge, tmp_path, statement, message):
    file = tmp_path / "mine.py"
    on_import = refused(file, START + statement + DEFINED)
    assert on_import.startswith(f"recipe={file}:small: ")
    assert on_import.endswith(message.format(file=file, line=4))
    when_called = refused(file, IN_FUNCTION.format(statement))
    wanted = message.replace("SystemExit: 0", "(status 0)").replace("SystemExit: 3", "(status 3)")
    assert when_called.endswith(wanted.format(file=file, line=5))


def test_the_innermost_line_of_the_recipes_own_files_is_reported(bridge, tmp_path):
    (tmp_path / "beside.py").write_text("import sys\nsys.exit(0)\n")
    assert refused(tmp_path / "mine.py", f"import beside\n{DEFINED}").endswith(
        f"SystemExit: 0 at {tmp_path / 'beside.py'}:2"
    )


def test_a_module_is_named_as_a_file_is(bridge, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_module.py").write_text(f"raise SystemExit(0)\n{DEFINED}")
    with pytest.raises(ConfigError, match=rf"my_module cannot be imported: SystemExit: 0 at {tmp_path}/my_module.py:1"):
        compose("recipe=my_module:small", device="cpu")


@pytest.mark.parametrize(
    "arguments", (("verify", "tp=1,2"), pytest.param(("train", "tp=1"), marks=pytest.mark.release))
)
def test_a_command_ends_with_2(tpi, tmp_path, arguments):
    (tmp_path / "mine.py").write_text(f"import sys\nsys.exit(0)\n{DEFINED}")
    done = tpi(arguments[0], "recipe=mine.py:small", *arguments[1:], status=2)
    assert f"SystemExit: 0 at {tmp_path / 'mine.py'}:2" in done.stderr


def test_what_a_provider_ends_in_a_rank_is_reported_with_its_file_and_line(tpi, tmp_path):
    """Only the ranks build the model, so they have imported the recipe, too."""
    file = tmp_path / "mine.py"
    file.write_text(MINE + LEAVING)
    done = tpi("train", "recipe=mine.py:small", "device=cpu", "run.dir=run", status=2)
    line = file.read_text().splitlines().index(LEAVING.splitlines()[-1]) + 1
    assert f"rank 0 failed: SystemExit: 0 at {file}:{line}" in done.stderr


def test_a_patch_stays_in_the_process_of_its_recipe(bridge, tmp_path):
    assert "returns None" in refused(tmp_path / "mine.py", START + PATCHING)  # it was called
    assert string.digits == "0123456789"


@pytest.mark.parametrize("number, status", ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)))
def test_a_recipe_that_hangs_ends_with_its_command(tpi, tmp_path, number, status):
    (tmp_path / "mine.py").write_text(HANGING + DEFINED)
    interruptible = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = tpi.start("train", "recipe=mine.py:small", "device=cpu", before=interruptible)
    note = tmp_path / "process"
    command.until(lambda: note.exists() and note.read_text().endswith("\n"))
    os.kill(command.pid, number)
    assert command.wait() == status
    hung = Path("/proc", note.read_text().strip(), "stat")
    while hung.exists() and hung.read_text().split()[2] != "Z":  # pytest's own timeout is the limit
        time.sleep(0.02)


def test_a_defect_of_tpi_is_no_mistake_of_the_recipe(bridge, tmp_path):
    (tmp_path / "mine.py").write_text(DEFINED)
    with pytest.raises(RuntimeError, match=r"(?s)in the process of a recipe:.*ZeroDivisionError"):
        recipe_process.ask(f"recipe={tmp_path / 'mine.py'}:small", lambda: 1 / 0)


def test_a_class_and_a_function_of_a_recipes_own_are_imported_by_no_command(bridge, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_recipe.py").write_text(MINE + OWN_CLASS)
    composed = compose("recipe=own_recipe:own", ["tp=2", "model.num_layers=4", "numerics=stock"], device="gpu")
    assert composed.config.model["_target_"] == "own_recipe.Provider"
    assert composed.config.model["num_layers"] == 4
    assert "own_recipe" not in sys.modules
    with pytest.raises(ConfigError, match="did you mean"):
        compose("recipe=own_recipe:own", ["model.num_layer=4", "numerics=stock"], device="gpu")


def test_the_first_line_comes_before_the_import(bridge, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipe_source, "preload", lambda model: pytest.fail("imports Bridge"))
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(pytest.fail.Exception, match="imports Bridge"):
        compose(f"recipe={tmp_path / 'mine.py'}:small", device="cpu")
    assert capsys.readouterr().err == f"calling recipe={tmp_path / 'mine.py'}:small, which imports Megatron-Bridge\n"


@pytest.mark.parametrize("name", ("mine.py", "config.json"))
def test_a_file_that_is_too_large_is_not_read(bridge, tmp_path, name):
    (tmp_path / "mine.py").write_text(MINE)
    with (tmp_path / name).open("w") as file:
        file.truncate(10 << 30)
    with pytest.raises(ConfigError, match="more than"):
        compose(f"recipe={tmp_path / 'mine.py'}:small", [f"recipe.hf_folder={tmp_path}"] * (name != "mine.py"))


def test_variables_that_a_recipe_sets_are_recorded(bridge, tmp_path):
    (tmp_path / "mine.py").write_text(f"import os\nos.environ['NCCL_DEBUG'] = 'WARN'\nos.environ['MINE'] = '1'\n{MINE}")
    composed = compose(f"recipe={tmp_path / 'mine.py'}:small", device="cpu")
    assert composed.config.cluster.environment == {"NCCL_DEBUG": "WARN"}
    assert not {"NCCL_DEBUG", "MINE"} & os.environ.keys()


def test_a_file_that_has_changed_since_is_refused(tpi, tmp_path):
    """The ranks import it again: its patches would be others than those of the run."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)

    def change():
        from tp_invariant_recipes.launch import record

        write = record.write
        record.write = lambda planned: (file.write_text(f"{MINE}\n"), write(planned))

    done = tpi("train", "recipe=mine.py:small", "device=cpu", "run.dir=run", before=change, status=2)
    assert "its file is not the one that this run was composed of" in done.stderr


@pytest.mark.release
def test_bisect_trains_each_run_with_its_own_recipe_alone(tpi, tmp_path):
    for name, text in (("plain", MINE), ("halved", MINE + HALVED)):
        (tmp_path / f"{name}.py").write_text(text)
        tpi("train", f"recipe={name}.py:small", "device=cpu", f"run.dir={name}", "ledger.digests=1", status=0)
    done = tpi("bisect", "plain", "halved", "--dir", "found", status=1)
    assert "the operation: the clipping of the gradients" in done.stdout
    assert "does not repeat itself" not in done.stdout
