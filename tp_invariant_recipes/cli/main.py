# SPDX-License-Identifier: Apache-2.0
"""`tpi`: the commands, and the format of errors."""

import errno
import itertools
import re
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import typer

from tp_invariant_recipes import __version__
from tp_invariant_recipes.cli import audit, checks, inference, ledgers, runs, show, submit, train, verify
from tp_invariant_recipes.cli.arguments import help_text, with_config
from tp_invariant_recipes.errors import Interrupted, TpiError, reason
from tp_invariant_recipes.files import DISK_FULL, TOO_MANY_FILES, errno_of, shortage, too_many_files
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.settings.secrets import redacted
from tp_invariant_recipes.start import cache, needed
from tp_invariant_recipes.text import single_line, visible

SUMMARY = "Train Megatron-Bridge models, record every step's exact bits, and prove that runs computed the same bits."
# What `tpi` alone prints.
FIRST_COMMANDS = f"""{SUMMARY}

  tpi verify qwen3_toy tp=1,2 iters=10   train in two layouts and compare the bits of every step
  tpi train qwen3_toy tp=2               train a model and record the exact bits of every step
  tpi compare RUN_A RUN_B                find the first difference of two runs

`tpi --help` lists all commands, and `tpi COMMAND --help` explains one."""
app = typer.Typer(
    name="tpi",
    help=SUMMARY,
    epilog="Exit status: 0 done or identical, 1 different, 2 a mistake; the message names the key to change; "
    "130 Ctrl-C. A closed pipe changes none of these.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS = (
    ("train", train.train), ("compare", ledgers.compare), ("verify", verify.verify), ("certify", ledgers.certify),
    ("check", checks.check), ("export", inference.export), ("score", inference.score), ("generate", inference.generate),
    ("serve", inference.serve), ("report", ledgers.report), ("runs", runs.runs), ("bisect", ledgers.bisect),
    ("bench", verify.bench), ("audit", audit.audit), ("submit", submit.submit), ("jobs", runs.jobs),
    ("logs", runs.logs), ("wait", runs.wait), ("cancel", runs.cancel), ("show", show.show), ("models", show.models),
    ("doctor", checks.doctor), ("conformance", checks.conformance),
)  # fmt: skip
for _name, _function in COMMANDS:
    app.command(_name, help=help_text(_function))(with_config(_function))
app.add_typer(train.data_app, name="data")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        terminal.print_text(f"tpi {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        terminal.print_text(FIRST_COMMANDS)


def main() -> None:
    """Entry point: run a command; print a mistake on one screen and exit with status 2."""
    terminal.install()
    cache.keep_bytecode()  # of what commands import from here on
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()  # a full disk is an error of this command, and not of Python's end
    except Interrupted as error:
        _fail(str(error), 130)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if hasattr(error, "format_message"):  # click's, of which typer has a copy of its own in some versions
            _fail_usage(error)
        mistake = _mistake(error)
        if mistake is None:
            # Show the exception. Python would exit with 1, which here means that two runs differ.
            sys.stderr.write(redacted(visible(traceback.format_exc())))
            _fail(f"this is a defect of tpi {__version__}, not a mistake of yours; the lines above say where")
        _fail(mistake)
    sys.exit(status if isinstance(status, int) else 0)


def _mistake(error: Exception) -> str | None:
    """Return the message of an error that users can mend; None: it is a defect."""
    if isinstance(error, TpiError):
        return str(error)
    if (number := errno_of(error)) in DISK_FULL:
        file = getattr(error, "filename", None)
        lacks = f"{file}: {shortage(Path(file).parent, number)}" if file else reason(error)
        return f"the disk is full: {lacks}"
    if number in TOO_MANY_FILES:
        return too_many_files()
    match error:
        case ModuleNotFoundError() if (missing := needed.missing(error)) is not None:
            named = [*itertools.takewhile(lambda word: word[0:1] != "-", sys.argv[1:])][:2]
            return needed.message(" ".join(["tpi", *named[: 2 if named[:1] == ["data"] else 1]]), [missing])
        case OSError(filename=path) if path is not None and error.errno in OF_A_PATH:
            return f"cannot use {path}: {error.strerror}"
        case RuntimeError() if str(error).startswith(OF_PATHLIB):
            return f"cannot use a path: {error}"
    return None


# What is wrong with a path rather than with tpi.
OF_A_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EIO)

# How the messages of Path.resolve() and Path.expanduser() begin.
OF_PATHLIB = ("Symlink loop", "Could not determine home directory")


def _key_hint(option: str) -> str | None:
    """How to write a key that was typed as an option, with its value: `--tp 2`."""
    from tp_invariant_recipes.settings import conf_files
    from tp_invariant_recipes.settings.keys import suggestions

    named = [*suggestions(option), *(name for name in conf_files.group_names() if f"--{name}" == option)]
    if not named:
        return None
    words = [part for word in sys.argv[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    value = "".join(words[words.index(option) + 1 :][:1]) if option in words else ""
    return single_line(
        f"A key has no dashes: write {named[0] if '=' in named[0] else f'{named[0]}={value or "VALUE"}'}"
    )


def _fail_usage(error: Any) -> NoReturn:
    """Print a usage error as typer does, but with control characters as text."""
    message = redacted(single_line(error.format_message()))
    option = getattr(error, "option_name", None) or ""
    if hint := _key_hint(option):
        message = f"{re.split(r' Did you mean| .Possible options', message)[0].rstrip('.')}. {hint}."
    from typer import rich_utils

    error.format_message = lambda: message
    rich_utils.rich_format_error(error)
    sys.exit(2)


def _fail(message: str, status: int = 2) -> NoReturn:
    from rich.text import Text

    message = redacted(message)  # it may repeat what was typed
    terminal.console(stderr=True, soft_wrap=True).print(Text.assemble(("error:", "bold red"), f" {message}"))
    sys.exit(status)
