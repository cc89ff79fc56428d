"""Keys that a command decides itself, and how to say it instead: one table a command, one check."""

from collections.abc import Iterable

from tp_invariant_recipes.config.overrides import Override

# Command -> field -> why. A field is reserved in every spelling: launcher= and launcher.kind=, iters= and
# train.train_iters=, with plus signs or without.
RESERVED: dict[str, dict[str, str]] = {
    "submit": {
        "launcher.kind": "in a job srun starts the ranks; leave it out",
    },
    "submit --resume": {
        "run.dir": "the job goes on in the run's own directory; leave it out",
        "launcher.kind": "in a job srun starts the ranks; leave it out",
        "checkpoint.ckpt_step": "each try of a job goes on at the newest checkpoint; tpi train --resume takes another",
    },
    "verify": {
        "run.dir": "every cell has a run directory of its own in one directory: --dir PATH",
        "launcher.kind": "the cells are trained here, one after the other; in jobs of their own: tpi submit --verify",
    },
    "sweep": {
        "run.dir": "every run has a directory of its own in one directory: --dir PATH",
        "launcher.kind": "the runs are trained here, one after the other; in jobs of their own: tpi submit --sweep",
    },
    "audit": {
        "checkpoint.save_interval": "an audit saves no checkpoints; leave it out",
        "launcher.kind": "an audit runs on this machine; leave it out",
        "run.dir": "an audit has its own directory: --dir PATH",
        "ledger.trace": "an audit records every module itself; leave it out",
        "ledger.dump": "an audit records every tensor itself; leave it out",
    },
    "bench": {
        "numerics.mode": "a benchmark sets the mode itself: --modes stock,tree",
        "train.train_iters": "a benchmark counts its own steps: --warmup N --steps N",
        "checkpoint.save_interval": "a benchmark saves no checkpoints; leave it out",
        "launcher.kind": "a benchmark runs on this machine; leave it out",
        "run.dir": "a benchmark has its own directory: --dir PATH",
        "ledger.digests": "a mode says whether it records digests: --modes tree,tree+digests",
        "ledger.trace": "a benchmark traces no modules; leave it out",
        "ledger.dump": "a benchmark dumps no tensors; leave it out",
    },
}


def check(command: str, overrides: Iterable[Override]) -> tuple[list[str], list[Override]]:
    """Return what is wrong with the overrides that the command decides itself, and the other overrides."""
    table = RESERVED[command]
    problems, sound = [], []
    for override in overrides:
        if override.field in table:
            problems.append(f"{override.text}: {table[override.field]}")
        else:
            sound.append(override)
    return problems, sound
