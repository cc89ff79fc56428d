"""`tpi check`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tp_invariant_recipes.cli.arguments import Json
from tp_invariant_recipes.host import needed, terminal


def check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory with dumps.", show_default=False)],
    step: Annotated[int, typer.Option(metavar="N", help="The step, counted from 1; 2 or later.", show_default=False)],
    module: Annotated[str, typer.Option(metavar="MODULE", help="A linear layer.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Compute a layer of a dumped step again on this CPU.

    The run has numerics=portable and has dumped the module's input, output, gradients and weight; a message says how.
    tpi computes the output and the gradients of input and weight, and compares every bit. So the bits of a GPU run can
    be checked without a GPU. Exit status: 0 identical, 1 different, 2 a mistake.

    \b
    tpi check runs/big --step 2 --module decoder.layers.3.mlp.linear_fc2
    """
    needed.check("tpi check", ("torch",))
    from tp_invariant_recipes.workflows import check as again

    found = again.check(run.expanduser(), step, module)
    status = again.exit_status(found)
    if as_json:
        tensors = [{"name": one.name, "identical": one.identical, **asdict(one.distance)} for one in found]
        terminal.print_json({"exit_status": status, "tensors": tensors})
    else:
        for one in found:
            terminal.print_text(str(one))
        verdict = "different" if status else "identical"
        terminal.print_text(f"{verdict}: step {step} of {module}, computed again on this CPU")
    raise typer.Exit(status)
