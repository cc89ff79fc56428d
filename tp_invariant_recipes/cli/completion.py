"""Completion in bash, zsh and fish: the scripts that shells load, and the answers that they ask for.

A script calls `tpi` with three variables: `_TPI_COMPLETE`, the name of the shell; `_TPI_LINE`, the command up to the
cursor; in bash also `_TPI_TEXT`, the part of the word that bash will replace, which begins after the last `=` or `:`.
The first line of the answer is `files` where a file name may stand, else `words`; then a word a line, after a tab its
meaning.
"""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tp_invariant_recipes.cli import init
from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.foreign_text import single_line

SHELL, LINE, TEXT = "_TPI_COMPLETE", "_TPI_LINE", "_TPI_TEXT"

SHELLS = Path(__file__).with_name("shells")  # a script for each shell
# Where each script is written below the home directory, and the file and the line that load it.
INSTALL_PATHS: dict[str, tuple[str, tuple[str, str] | None]] = {
    "bash": (".bash_completions/tpi.sh", (".bashrc", "source '{file}'")),
    "zsh": (".zfunc/_tpi", (".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")),
    "fish": (".config/fish/completions/tpi.fish", None),
}


def requested() -> bool:
    """Whether a shell requests completions."""
    return SHELL in os.environ


def answer(root: Any) -> str:
    """Return the answer to a shell; empty for an unknown shell. root: the command of all commands."""
    if os.environ[SHELL] not in INSTALL_PATHS:
        return ""
    words, incomplete = split(os.environ.get(LINE, ""))
    files, offers = _offers(root, words[1:], incomplete)
    if os.environ[SHELL] == "bash":
        text = os.environ.get(TEXT, "")
        before = incomplete.removesuffix(text) if incomplete.endswith(text) else ""
        lines = [word.removeprefix(before) for word, _ in offers if word.startswith(before)]
    else:
        lines = [f"{word}\t{single_line(about)}" for word, about in offers]
    return "".join(f"{line}\n" for line in ("files" if files else "words", *lines))


def split(line: str) -> tuple[list[str], str]:
    """Return the whole words of a line, and the one that is being typed; it may have an open quote."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
        started = not line[-1:].isspace() and bool(words)
    except ValueError:  # an open quote, or a backslash at the end
        words.append(lexer.token or "")
        started = True
    return (words[:-1], words[-1]) if started else (words, "")


def install() -> str:
    """Write the script where the shell of $SHELL loads it; returns what was done. Raises RunError."""
    shell = _shell()
    place, loaded = INSTALL_PATHS[shell]
    file = Path.home() / place
    done = [f"wrote {file}"]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, script())
        if loaded:
            start, line = Path.home() / loaded[0], loaded[1].format(file=file)
            before = start.read_text() if start.exists() else ""
            if line not in before.splitlines():
                with start.open("a") as stream:
                    stream.write(("" if not before or before.endswith("\n") else "\n") + line + "\n")
                done.append(f"added to {start}: {line}")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"completion is not installed: {reason(error)}") from error
    return "\n".join([*done, f"a new {shell} has it"])


def script() -> str:
    """Return the script for the shell of $SHELL. Raises RunError."""
    return (SHELLS / f"tpi.{_shell()}").read_text(encoding="utf-8")


def _shell() -> str:
    given = os.environ.get("SHELL", "")
    name = Path(given).name
    if name not in INSTALL_PATHS:
        raise RunError(f"SHELL={given}: completion is for {', '.join(INSTALL_PATHS)}, as in SHELL=bash")
    return name


def _offers(root: Any, words: list[str], incomplete: str) -> tuple[bool, list[tuple[str, str]]]:
    """Whether a file may stand here, and the words that may."""
    command, rest = _command(root, words)
    options = {name: option for option in command.params for name in option.opts if name.startswith("-")}
    if incomplete.startswith("-"):
        offers = {name: option.help or "" for name, option in options.items()} | {"--help": "Show help."}
    elif hasattr(command, "commands"):
        offers = {n: c.get_short_help_str(80) for n, c in command.commands.items() if not c.hidden}
    else:
        parameter = _parameter(command, rest, options)
        return (False, []) if parameter is None else _value(parameter, command.name, rest, incomplete)
    return False, [(name, about) for name, about in offers.items() if name.startswith(incomplete)]


def _parameter(command: Any, rest: list[str], options: dict[str, Any]) -> Any:
    """Return the option or argument whose value comes next; None: the command takes no more."""
    if rest and (option := options.get(rest[-1])) is not None and not option.is_flag:
        return option
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    number = len(_positional(rest, options))
    if number < len(arguments):
        return arguments[number]
    return arguments[-1] if arguments and arguments[-1].nargs != 1 else None


def _value(parameter: Any, command: str, words: list[str], incomplete: str) -> tuple[bool, list[tuple[str, str]]]:
    complete = COMPLETIONS.get(parameter.metavar)
    return complete(command, words, incomplete) if complete else (True, [])


def _model(command: str, words: list[str], incomplete: str) -> tuple[bool, list[tuple[str, str]]]:
    from tp_invariant_recipes.config import completion

    if "--resume" in words:  # then the first word is an override
        return _override(command, words, incomplete)
    return incomplete.startswith("recipe="), completion.models(incomplete)


def _override(command: str, words: list[str], incomplete: str) -> tuple[bool, list[tuple[str, str]]]:
    from tp_invariant_recipes.config import completion

    several = command == "verify" or "--verify" in words
    return completion.takes_file(incomplete), completion.overrides(incomplete, several=several)


def _job(command: str, words: list[str], incomplete: str) -> tuple[bool, list[tuple[str, str]]]:
    from tp_invariant_recipes.jobs.registry import completions

    return True, completions(incomplete)


def _command(root: Any, words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the words name, and the words after it."""
    command, rest = root, list(words)
    while hasattr(command, "commands") and rest:
        name = rest.pop(0)
        command = command.commands.get(name, command)
    return command, rest


def _positional(words: list[str], options: dict[str, Any]) -> list[str]:
    """Return the words that are neither options nor values of options."""
    positional, value = [], False
    for word in words:
        if value:
            value = False
        elif word.startswith("-"):
            value = "=" not in word and word in options and not options[word].is_flag
        else:
            positional.append(word)
    return positional


def _launcher(command: str, words: list[str], incomplete: str) -> tuple[bool, list[tuple[str, str]]]:
    from tp_invariant_recipes.config import completion

    offers = completion.overrides(f"launcher={incomplete}")
    return False, [(word.removeprefix("launcher="), about) for word, about in offers]


def _template(command: str, words: list[str], incomplete: str) -> tuple[bool, list[tuple[str, str]]]:
    return False, [(kind, "") for kind in init.KINDS if kind.startswith(incomplete)]


# The metavar of an argument or option -> the function that completes it. Others complete files.
COMPLETIONS: dict[str, Callable[[str, list[str], str], tuple[bool, list[tuple[str, str]]]]] = {
    "MODEL": _model,
    "[KEY=VALUE]…": _override,
    "JOB": _job,
    "KIND": _launcher,
    "WHAT": _template,
}
