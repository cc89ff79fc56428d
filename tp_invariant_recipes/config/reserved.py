"""Keys that a command decides itself, and how to say it instead: one table a command, one check."""

from collections.abc import Iterable

from tp_invariant_recipes.config.overrides import Override
from tp_invariant_recipes.errors import Problem

_OUT = "leave it out"
_SRUN = {"launcher.kind": ("in a job srun starts the ranks", _OUT)}

# Command -> field, in whatever spelling -> why it is not taken, and what to do instead.
RESERVED: dict[str, dict[str, tuple[str, str]]] = {
    "submit": _SRUN,
    "submit --resume": {
        **_SRUN,
        "run.dir": ("the job goes on in the run's own directory", _OUT),
        "checkpoint.ckpt_step": (
            "each try of a job goes on at the newest checkpoint",
            "tpi train --resume takes another",
        ),
    },
    "verify": {
        "run.dir": ("every cell has a run directory of its own in one directory", "--dir PATH"),
        "launcher.kind": (
            "the cells are trained here, one after the other",
            "in jobs of their own: tpi submit --verify",
        ),
    },
    "audit": {
        "checkpoint.save_interval": ("an audit saves no checkpoints", _OUT),
        "launcher.kind": ("an audit runs on this machine", _OUT),
        "run.dir": ("an audit has its own directory", "--dir PATH"),
        "ledger.trace": ("an audit records every module itself", _OUT),
        "ledger.dump": ("an audit records every tensor itself", _OUT),
    },
    "bench": {
        "numerics.mode": ("a benchmark sets the mode itself", "--modes stock,tree"),
        "train.train_iters": ("a benchmark counts its own steps", "--warmup N --steps N"),
        "checkpoint.save_interval": ("a benchmark saves no checkpoints", _OUT),
        "launcher.kind": ("a benchmark runs on this machine", _OUT),
        "run.dir": ("a benchmark has its own directory", "--dir PATH"),
        "ledger.digests": ("a mode says whether it records digests", "--modes tree,tree+digests"),
        "ledger.trace": ("a benchmark traces no modules", _OUT),
        "ledger.dump": ("a benchmark dumps no tensors", _OUT),
    },
}


def check(command: str, overrides: Iterable[Override]) -> tuple[list[str], list[Override]]:
    """Return what is wrong with the overrides that the command decides itself, and the other overrides."""
    problems, sound = [], []
    for override in overrides:
        if reserved := RESERVED[command].get(override.field):
            problems.append(str(Problem(override.text, *reserved)))
        else:
            sound.append(override)
    return problems, sound
