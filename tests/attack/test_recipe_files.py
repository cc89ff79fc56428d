# SPDX-License-Identifier: Apache-2.0
"""Recipe files that do odd things when imported or called: one message, and nothing of this process changes."""

import os
import sys
import threading
from pathlib import Path

import pytest
from typer.main import except_hook

# As a file is imported, and as its function is called.
DEEDS = {
    "exit 0": "import sys; sys.exit(0)",
    "exit 1": "raise SystemExit(1)",
    "exit with words": "raise SystemExit('bye')",
    "_exit": "import os; os._exit(0)",
    "Ctrl-C": "raise KeyboardInterrupt",
    "BaseException": "raise BaseException('odd')",
    "GeneratorExit": "raise GeneratorExit",
    "an exception without text": "raise ValueError",
    "an exception that cannot be shown": "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "control characters": "raise ValueError('\\x1b[31m red \\x07\\u202e')",
    "many lines": "raise ValueError('a\\n' * 1000)",
    "output": "print('\\x1b]0;owned\\x07' * 9); import sys; sys.stderr.write('\\x1b[2J')",
    "another folder": "import os; os.chdir('/')",
    "no environment": "import os; os.environ.clear()",
    "other environment": "import os; os.environ['PATH'] = os.environ['HOME'] = '/nowhere'",
    "endless recursion": "f = lambda: f(); f()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "closed output": "import os; os.close(1); os.close(2)",
    "a thread": "import threading, time; threading.Thread(target=time.sleep, args=(0.5,)).start()",
    "a child": "import os; pid = os.fork(); pid or os._exit(3)",
    "an excepthook": "import sys; sys.excepthook = None; sys.stdout = None; sys.stderr = None",
    "no builtins": "import builtins; builtins.open = None",
    "modules": "import sys; sys.modules['json'] = None",
    "path": "import sys; sys.path.clear(); sys.argv[:] = []",
    "an import that is missing": "import no_such_module_anywhere",
    "no Python": "def (",
    "a zero byte": "x = '\0'",
}
RESULTS = (
    "None", "1", "object()", "__import__('itertools').count()", "type('L', (list,), {'__len__': lambda s: 1 / 0})()",
    "print",
)  # fmt: skip
SAMPLE = (("BaseException", "when called"),)
CASES = [(deed, when) for deed in DEEDS for when in ("on import", "when called")]


def source(deed: str, when: str) -> str:
    if when == "on import" or deed in ("no Python", "a zero byte"):
        return f"{DEEDS[deed]}\ndef small():\n    return None\n"
    return f"def small():\n    {DEEDS[deed]}\n"


def state() -> tuple:
    """What a recipe's code could change of this process."""
    return os.getcwd(), dict(os.environ), sys.path[:], sys.excepthook, open, threading.active_count()


def refused(attack, text: str) -> str | None:
    Path("odd.py").write_text(text)
    sys.excepthook = except_hook  # as the first command of a process has it from Typer
    before = state()
    result = attack("train", "recipe=odd.py:small", "--dry-run", allowed=(2,))
    changed = [(a, b) for a, b in zip(before, state(), strict=True) if a != b]
    return result or (f"changed: {changed}" if changed else None)


@pytest.mark.parametrize(
    "deed, when", (*SAMPLE, *(pytest.param(*case, marks=pytest.mark.release) for case in CASES if case not in SAMPLE))
)
def test_an_odd_recipe_is_one_message(attack, run, deed, when):
    assert refused(attack, source(deed, when)) is None


@pytest.mark.release
@pytest.mark.parametrize("result", RESULTS)
def test_a_recipe_that_returns_something_else_is_one_message(attack, run, result):
    assert refused(attack, f"def small():\n    return {result}\n") is None
