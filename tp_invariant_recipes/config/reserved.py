"""Keys that a command decides itself, and how to say it instead: one table of rules a command, one check."""

from collections.abc import Iterable

from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.config.overrides import Override
from tp_invariant_recipes.errors import lines


def _reserved(field: str, text: str, solve: str = "leave it out") -> Rule[Override]:
    """Reserves a field in every spelling: launcher= and launcher.kind=, with plus signs or without."""
    return Rule(lambda override: override.field == field, text, solve, head=lambda override: override.text)


RESERVED: dict[str, tuple[Rule[Override], ...]] = {
    "submit": (_reserved("launcher.kind", "in a job srun starts the ranks"),),
    "submit --resume": (
        _reserved("run.dir", "the job goes on in the run's own directory"),
        _reserved("launcher.kind", "in a job srun starts the ranks"),
        _reserved(
            "checkpoint.ckpt_step",
            "each try of a job goes on at the newest checkpoint",
            "tpi train --resume takes another",
        ),
    ),
    "verify": (
        _reserved("run.dir", "every cell has a run directory of its own in one directory", "--dir PATH"),
        _reserved(
            "launcher.kind",
            "the cells are trained here, one after the other",
            "in jobs of their own: tpi submit --verify",
        ),
    ),
    "sweep": (
        _reserved("run.dir", "every run has a directory of its own in one directory", "--dir PATH"),
        _reserved(
            "launcher.kind",
            "the runs are trained here, one after the other",
            "in jobs of their own: tpi submit --sweep",
        ),
    ),
    "audit": (
        _reserved("checkpoint.save_interval", "an audit saves no checkpoints"),
        _reserved("launcher.kind", "an audit runs on this machine"),
        _reserved("run.dir", "an audit has its own directory", "--dir PATH"),
        _reserved("ledger.trace", "an audit records every module itself"),
        _reserved("ledger.dump", "an audit records every tensor itself"),
    ),
    "bench": (
        _reserved("numerics.mode", "a benchmark sets the mode itself", "--modes stock,tree"),
        _reserved("train.train_iters", "a benchmark counts its own steps", "--warmup N --steps N"),
        _reserved("checkpoint.save_interval", "a benchmark saves no checkpoints"),
        _reserved("launcher.kind", "a benchmark runs on this machine"),
        _reserved("run.dir", "a benchmark has its own directory", "--dir PATH"),
        _reserved("ledger.digests", "a mode says whether it records digests", "--modes tree,tree+digests"),
        _reserved("ledger.trace", "a benchmark traces no modules"),
        _reserved("ledger.dump", "a benchmark dumps no tensors"),
    ),
}


def check(command: str, overrides: Iterable[Override]) -> tuple[list[str], list[Override]]:
    """Return what is wrong with the overrides that the command decides itself, and the other overrides."""
    problems, sound = [], []
    for override in overrides:
        broken = broken_rules(override, RESERVED[command])
        problems += lines(broken)
        if not broken:
            sound.append(override)
    return problems, sound
