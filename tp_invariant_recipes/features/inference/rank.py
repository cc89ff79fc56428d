# SPDX-License-Identifier: Apache-2.0
"""A rank of `tpi score` and `tpi generate`: the model with a checkpoint's weights, without a training."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tp_invariant_recipes.data.sequences import Sequence
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources import recipe_layer
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.start.bridge import deterministic_mode_without_its_extras
from tp_invariant_recipes.training import heartbeat
from tp_invariant_recipes.training.heartbeat import Phase
from tp_invariant_recipes.training.rank import adapt

LEAST = 64  # tokens; a multiple of every tp with sequence parallelism
STEPS = 8  # padded lengths between a power of two and the next: at most 1/8 of a sequence is padding
# Tokens that are sorted by length, computed and written together, by what torch calls the device; about a minute's.
WINDOWS = {"cuda": 1 << 18, "cpu": 1 << 14}
MOST = 4096  # sequences of a window


@dataclass(frozen=True)
class Batch:
    """One forward pass. places: of its sequences in the window. length: tokens of each, with padding."""

    places: tuple[int, ...]
    length: int


def padded(length: int, multiple: int) -> int:
    """Return the tokens that a sequence is computed with. multiple: what must divide it, a power of two."""
    step = max(LEAST, multiple, (1 << (length - 1).bit_length()) // (2 * STEPS))
    return -(-length // step) * step


def windows(sequences: Iterable[Sequence], most: int) -> Iterator[list[Sequence]]:
    """Yield the sequences in parts of about `most` tokens, so that memory does not grow with the file."""
    window: list[Sequence] = []
    tokens = 0
    for sequence in sequences:
        window.append(sequence)
        tokens += len(sequence.tokens)
        if tokens >= most or len(window) == MOST:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def plan(lengths: list[int], multiple: int, tokens: int, ranks: int, rank: int) -> list[Batch]:
    """Return the passes of one of several data-parallel ranks over a window; every rank has as many.

    lengths: of the sequences. tokens: of a pass, at most; 0: every sequence by itself. multiple: as of `padded`.
    A pass that only fills up has no place of its own: it repeats another rank's.
    """
    sized: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        sized.setdefault(padded(length, multiple), []).append(place)
    batches = []
    for length, places in sorted(sized.items(), reverse=True):  # the longest first: memory runs out early or never
        batches += [Batch(tuple(part), length) for part in _divided(places, _power(max(1, tokens // length)))]
    rounds = -(-len(batches) // ranks)
    return [batches[min(n * ranks + rank, len(batches) - 1)] for n in range(rounds)]


def _divided(places: list[int], most: int) -> Iterator[list[int]]:
    """Parts of `most`, then of smaller powers of two, so that few shapes occur: products are tried for each."""
    while places:
        size = min(most, _power(len(places)))
        yield places[:size]
        places = places[size:]


def _power(most: int) -> int:
    return 1 << (most.bit_length() - 1)


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
    from tp_invariant_recipes.numerics.megatron import replacements
    from tp_invariant_recipes.replacement import applied
    from tp_invariant_recipes.training.saved_weights import load_weights

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
