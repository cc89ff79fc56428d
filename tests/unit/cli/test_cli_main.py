# SPDX-License-Identifier: Apache-2.0
"""The command as a whole: exit statuses, what an error looks like, and that nobody waits for torch in vain."""

import errno
import subprocess
import sys

import pytest

from tests import ledgers
from tp_invariant_recipes import __version__, errors, files
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.machine.versions import lock_dir
from tp_invariant_recipes.start import needed

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TpiError)]
KINDS.remove(errors.Interrupted)


@pytest.fixture
def failing(cli, monkeypatch):
    """`tpi train` where planning raises an error."""

    def run(error: BaseException):
        def raise_(*args, **kwargs):
            raise error

        monkeypatch.setattr(plan, "new", raise_)
        return cli("train", "qwen3_toy")

    return run


def test_tpi_alone_shows_three_commands(cli):
    lines = cli().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  tpi ")] == ["verify", "train", "compare"]
    assert not any("Usage" in line for line in lines)


def test_version(cli):
    ended = cli("--version")
    assert (ended.status, ended.out) == (0, f"tpi {__version__}\n")


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_a_mistake_is_a_message_and_status_2(failing, kind):
    ended = failing(kind("first line\nsecond line"))
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "error: first line\nsecond line\n"


def test_a_message_is_not_taken_for_markup_nor_cut(failing):
    message = f"tp=[1,2] [red]dataset.blend=[/x][/red] {'long ' * 60}"
    assert failing(errors.ConfigError(message)).err == f"error: {message}\n"


@pytest.mark.parametrize("name", ("nowhere", "tp_invariant_recipes.nowhere", "torch.nowhere", "megatron.core.nowhere"))
def test_a_module_that_is_missing_from_an_installed_package_is_a_defect(failing, name):
    """A package that is not installed is a mistake to mend (.ci/plain)."""
    ended = failing(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert (ended.status, "this is a defect of tpi" in ended.err) == (2, True)


def test_a_defect_is_a_traceback_and_status_2_because_1_means_different(failing):
    ended = failing(ZeroDivisionError("no such luck"))
    assert ended.status == 2
    assert "Traceback (most recent call last):" in ended.err
    assert "ZeroDivisionError: no such luck" in ended.err
    assert ended.err.splitlines()[-1].startswith(
        f"error: this is a defect of tpi {__version__}, not a mistake of yours"
    )


def test_ctrl_c(failing):
    ended = failing(KeyboardInterrupt())
    assert ended.status == 130
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "arguments", (("trian",), ("train", "--no-such-option"), ("compare",), ("report",)), ids=" ".join
)
def test_a_command_line_that_is_none_is_status_2(cli, arguments):
    ended = cli(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert "Usage: tpi" in ended.err


COMMANDS = ("--help", "train --help", "compare a b", "compare a missing", "models", "models --json")
COMMANDS += ("show qwen3_8b tp=4 numerics.mode=stock", "train qwen3_toi tpp=2", "doctor --json")

PROGRAM = """
import sys
from tp_invariant_recipes.cli.main import main
for command in sys.argv[1:]:
    sys.argv = ["tpi", *command.split()]
    try:
        main()
    except SystemExit as stop:
        heavy = sorted({"torch", "transformers", "megatron.core", "megatron.bridge"} & set(sys.modules))
        print(f"## {command}: {stop.code}, {heavy}")
"""


def test_only_what_needs_torch_imports_it(tmp_path):
    for name in "ab":
        ledgers.write(tmp_path / name, Header(identity={"rng.seed": 1}), [ledgers.record(1)])
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *COMMANDS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    output = [line for line in ended.stdout.splitlines() if line.startswith("## ")]
    statuses = (0, 0, 0, 2, 0, 0, 0, 2, None)  # what `tpi doctor` finds is not the point here
    for line, command, status in zip(output, COMMANDS, statuses, strict=True):
        assert line.endswith(", []"), line
        assert status is None or line == f"## {command}: {status}, []"


def wrapped(error: OSError) -> RuntimeError:
    outer = RuntimeError("a reader failed")
    outer.__cause__ = error
    return outer


# What planning raises, and the status and the message of the command.
ERRORS = (
    (OSError(errno.ENAMETOOLONG, "File name too long", "n" * 300), 2, f"cannot use {'n' * 300}: File name too long"),
    (PermissionError(errno.EACCES, "Permission denied", "a/b"), 2, "cannot use a/b: Permission denied"),
    (RuntimeError("Could not determine home directory."), 2, "cannot use a path: Could not determine home directory."),
    (RuntimeError("Symlink loop from 'a'"), 2, "cannot use a path: Symlink loop from 'a'"),
    (
        OSError("Not enough free space to write 8 bytes after offset 0"),
        2,
        "the disk is full: Not enough free space to write 8 bytes after offset 0",
    ),  # numpy's, which has no number
    (
        OSError(errno.EDQUOT, "Disk quota exceeded", "runs/a"),
        2,
        "the disk is full: runs/a: the quota of runs is used up",
    ),
    (wrapped(OSError(errno.EMFILE, "Too many open files")), 2, files.too_many_files()),
    (OSError(errno.ENFILE, "Too many open files in system", "a"), 2, files.too_many_files()),
    (errors.Interrupted("stopped; what was trained: runs/a"), 130, "stopped; what was trained: runs/a"),
)


@pytest.mark.parametrize("error, status, words", ERRORS)
def test_what_a_user_can_mend_is_one_line(failing, error, status, words):
    ended = failing(error)
    assert (ended.status, ended.err) == (status, f"error: {words}\n")


def test_an_error_of_the_system_without_a_path_is_a_defect(failing):
    assert "Traceback" in failing(OSError(errno.EIO, "Input/output error")).err


@pytest.mark.parametrize(
    "packages, how",
    (
        (["torch"], "the locks tools.txt, base.txt, torch.txt of {} with Python 3.12"),
        (["torch", "megatron-bridge"], "the locks tools.txt, base.txt, torch.txt, megatron.txt of {} with Python 3.12"),
        (["mamba-ssm"], "torch.txt, megatron.txt, gpu.txt of {} with Python 3.12"),
        (["wandb"], "pip install 'tp-invariant-recipes[wandb]'"),
    ),
)
def test_what_is_not_installed_names_its_lock_or_its_extra(packages, how):
    assert how.format(lock_dir()) in needed.message("tpi train", packages)
