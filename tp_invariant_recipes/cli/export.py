"""`tpi export`."""

from pathlib import Path
from typing import Annotated

from tp_invariant_recipes.cli.arguments import Json, TrustRecipe, argument, flag, option
from tp_invariant_recipes.cli.output import verdict
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.start import needed


def export(
    run: Annotated[Path, argument("RUN", "The run directory.")],
    folder: Annotated[Path, argument("FOLDER", "A folder that is not there yet, or empty.")],
    step: Annotated[int | None, option("N", "The checkpoint of this step; default: the newest.", min=0)] = None,
    masters: Annotated[
        bool, flag("Write the optimizer's fp32 master weights, not the bf16 weights.", "--masters")
    ] = False,
    merge: Annotated[
        bool, flag("Of a run with adapters: write the weights with the adapters added.", "--merge")
    ] = False,
    _trusted: TrustRecipe = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder.

    The folder holds config.json and *.safetensors, and the tokenizer of the folder that the run has started from.
    Transformers loads it, and weights=FOLDER starts another run from it. Of a run with LoRA adapters it holds what the
    library peft loads, and with --merge whole weights. Exit status: 0 written, 2 otherwise; then FOLDER is as it was.

    \b
    tpi export runs/qwen3_8b-tp4-… ~/models/mine
    tpi export runs/qwen3_8b-tp4-… ~/models/mine --step 500 --masters
    tpi export runs/my-adapters ~/models/merged --merge
    """
    needed.check("tpi export", needed.TRAINING)
    from tp_invariant_recipes.features.export import workflow

    request = workflow.ExportRequest(run, folder, step, masters, merge)
    verdict.finish(workflow.export(request, terminal.console_of_its_own()), as_json=as_json)
