"""A rank of `tpi score` and `tpi generate`: the model with a checkpoint's weights, without a training."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources import recipe_layer
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.start.bridge import deterministic_mode_without_its_extras
from tp_invariant_recipes.training import heartbeat
from tp_invariant_recipes.training.heartbeat import Phase
from tp_invariant_recipes.training.rank import adapt


@contextmanager
def loaded_for_inference(config: RunConfig, checkpoint: Path | None) -> Iterator[Any]:
    """Set up this rank and yield its model; after the block, when all ranks are there, end the process groups."""
    bridge.load()
    heartbeat.sign(Phase.SETTING_UP)
    recipe_layer.enter(config.recipe)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        yield loaded_model(stack, config, checkpoint)
        dist.barrier()
        leave()


def loaded_model(stack: ExitStack, config: RunConfig, checkpoint: Path | None) -> Any:
    """Megatron's model on this rank, with weights. What it replaces ends with `stack`.

    checkpoint: of a run; None: `config.weights.folder` has the weights.
    """
    from tp_invariant_recipes.config import container
    from tp_invariant_recipes.features.export.rank import load_weights
    from tp_invariant_recipes.numerics.megatron import replacements
    from tp_invariant_recipes.replacement import applied

    adapt(stack, config)
    stack.enter_context(applied(replacements.replacements(config.numerics)))
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.setup import initialize_megatron  # as cpu_host/cpu.py has it

    # Its own generators are the faster way to weights that are replaced.
    built = container.build(config.with_fields("numerics", initial_weights="megatron"))
    if checkpoint is None:
        from tp_invariant_recipes.training.imported_weights import ImportedWeights

        built.model.register_pre_wrap_hook(ImportedWeights(Path(str(config.weights.folder))).load)
    runtime_config_update(built)
    initialize_megatron(cfg=built)
    if config.device.kind != "cpu" and config.numerics.mode != STOCK:
        deterministic_mode_without_its_extras()
    chunks = built.model.provide_distributed_model(wrap_with_ddp=False)
    if checkpoint is not None:
        load_weights(chunks, checkpoint, "")
    return chunks[0]


def leave() -> None:
    """End the process groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
