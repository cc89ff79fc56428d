"""What `tpi init` writes passes `--dry-run` as it is, and trains."""

import shlex

import pytest

from tp_invariant_recipes.cli.init import KINDS

pytestmark = pytest.mark.usefixtures("families")


@pytest.fixture(scope="module")
def commands(shared):
    """The commands that each kind prints, by kind, without `tpi`. The files are written."""
    return {kind: [shlex.split(line, comments=True)[1:] for line in _printed(shared, kind)[1:]] for kind in KINDS}


def _printed(shared, kind):
    return shared("init", kind, status=0).stdout.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_a_dry_run_as_it_is(commands, shared, kind):
    first, *_ = commands[kind]
    assert first[-1] == "--dry-run"
    shared(*first, status=0)


@pytest.mark.release
@pytest.mark.parametrize("kind", ("recipe", "sft", "lora"))
def test_the_other_commands_end_well(commands, shared, kind):
    for number, command in enumerate(commands[kind][1:]):
        more = ["--dir", f"{kind}-{number}"] if command[0] == "verify" else []
        shared(*command, "iters=2", *more, status=0)


def test_a_mistake_in_it_is_refused(commands, shared):
    """The control of the dry runs."""
    file = shared.folder / "wrong.py"
    file.write_text((shared.folder / "my_recipes.py").read_text().replace("RMSNorm", "L2Norm"))
    shared("train", "recipe=wrong.py:small", "tp=2", "--dry-run", status=2)
