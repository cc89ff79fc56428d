# SPDX-License-Identifier: Apache-2.0
"""Keys that a command decides itself are refused by it, however they are spelt."""

import pytest

from tp_invariant_recipes.config import overrides
from tp_invariant_recipes.config.overrides import DECIDED_BY, parse
from tp_invariant_recipes.settings.keys import SHORT_KEYS

SHORT = {key.path: name for name, key in SHORT_KEYS.items()}
GROUPS = {f"{group}.{field}": group for group, field in DECIDED_BY.items()}
VALUES = {"numerics.mode": "stock", "launcher.kind": "local", "ledger.trace": "1:2", "ledger.dump": "[]"}

# Command, its arguments but the override.
COMMANDS = {
    "submit": ("submit", "qwen3_toy", "--dry-run"), "verify": ("verify", "qwen3_toy", "tp=1,2"),
    "audit": ("audit", "qwen3_toy", "--against", "tp=2"),
    "audit --resume-at": ("audit", "qwen3_toy", "--resume-at", "2"),
    "bench": ("bench", "qwen3_toy"),
}  # fmt: skip
FIELDS = {
    "submit": "launcher.kind",
    "submit --resume": "run.dir launcher.kind checkpoint.ckpt_step",
    "verify": "run.dir launcher.kind",
    "audit": "checkpoint.save_interval launcher.kind run.dir ledger.trace ledger.dump",
    "audit --resume-at": "checkpoint.save_interval checkpoint.ckpt_step launcher.kind run.dir",
    "bench": "numerics.mode train.train_iters checkpoint.save_interval launcher.kind run.dir ledger.digests"
    " ledger.trace ledger.dump",
}
ROWS = [(command, field) for command, fields in FIELDS.items() for field in fields.split()]


def spellings(field: str) -> list[str]:
    names = [name for name in (field, SHORT.get(field), GROUPS.get(field)) if name]
    return [f"{signs}{name}={VALUES.get(field, '1')}" for name in names for signs in ("", "+", "++")]


def test_every_command_has_its_arguments():
    """But one, which needs a run: tests/distributed/runs/test_submit.py."""
    assert COMMANDS.keys() == overrides.RESERVED.keys() - {"submit --resume"}
    assert {command: len(fields.split()) for command, fields in FIELDS.items()} == {
        command: len(rules) for command, rules in overrides.RESERVED.items()
    }


@pytest.mark.parametrize("command, field", ROWS, ids=[" ".join(row) for row in ROWS])
def test_a_reserved_key_is_refused_in_every_spelling(command, field):
    for text in spellings(field):
        (problem,), sound = overrides.check_reserved(command, [parse(text)])
        assert problem.startswith(f"{text}: ")
        assert "; " in problem
        assert sound == []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("text", ("launcher=local", "launcher.kind=local", "++launcher.kind=local"))
def test_the_command_says_so(cli, here, no_gpus, command, text):
    """One key in all spellings; the table above is what each command asks."""
    ended = cli(*COMMANDS[command], text)
    assert (ended.status, ended.out) == (2, "")
    (problem,), _ = overrides.check_reserved(command, [parse(text)])
    assert problem in ended.err
