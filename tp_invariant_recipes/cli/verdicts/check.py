"""`tpi check`."""

from pathlib import Path
from typing import Annotated

from tp_invariant_recipes.cli.arguments import Json, argument, option
from tp_invariant_recipes.cli.output.verdict import finish
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.start import needed


def check(
    what: Annotated[Path, argument("EVIDENCE|RUN", "A guard's evidence, or a run with dumps.")],
    step: Annotated[int | None, option("N", "Of a run: the step, counted from 1; 2 or later.")] = None,
    module: Annotated[str | None, option("MODULE", "Of a run: a linear layer.")] = None,
    as_json: Json = False,
) -> None:
    """Judge a guard's evidence, or compute a dumped layer again.

    EVIDENCE is a file that a run with guard= has written. tpi computes again what it holds.

    RUN has numerics=portable and has dumped the module's input, output, gradients and weight; a message says how.
    tpi computes the output and the gradients of input and weight, and compares every bit. So the bits of a GPU run can
    be checked without a GPU. Exit status: 0 identical, 1 different, 2 a mistake.

    \b
    tpi check runs/big/guard/step-12-rank-1.evidence
    tpi check runs/big --step 2 --module decoder.layers.3.mlp.linear_fc2
    """
    needed.check("tpi check", ("torch",))
    what = what.expanduser()
    options = [f"--step {step}"] * (step is not None) + [f"--module {module}"] * (module is not None)
    if what.is_file() and options:
        raise ConfigError(f"{what} is a file, of which a guard's evidence says what to compute: leave out {options[0]}")
    if what.is_file():
        from tp_invariant_recipes.features import evidence

        finish(evidence.judge(what), as_json=as_json)
    if not what.exists():
        raise ConfigError(f"{what}: there is no such file and no such run")
    if step is None or module is None:
        raise ConfigError(
            f"{what}: which layer? --step N --module MODULE; without them tpi check takes a guard's evidence"
        )
    from tp_invariant_recipes.features import check as recompute

    finish(recompute.check(what, step, module), as_json=as_json)
