# SPDX-License-Identifier: Apache-2.0
"""Recordings for `tpi audit --recorded`, from programs with a training loop of their own.

    from tp_invariant_recipes import recordings

    with recordings.record(model, optimizer, "recordings/tp4", sequence=4096, batch=8):
        train_one_step(model, optimizer)

Every rank runs this. Do it once with the layout in question, and four times with a simple one: as it is, and with
`dither=1`, 2 and 3, into one folder. `tpi audit --recorded recordings/tp4 recordings/tp1` judges them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@contextmanager
def record(
    model: Any,
    optimizer: Any,
    folder: str | Path,
    *,
    sequence: int,
    batch: int,
    micro_batch: int = 1,
    loader: str = "single",
    step: int = 1,
    dither: int | None = None,
    follow: str | Path | None = None,
) -> Iterator[None]:
    """Record what the block computes: one step, with all its micro-batches and `optimizer.step()`.

    model:       Megatron's model or the list of its chunks, wrapped by DDP. optimizer: Megatron's.
    folder:      where the recording is written; the same for all ranks.
    sequence:    tokens of a sequence. batch: sequences of the step, on all ranks. micro_batch: of a micro-batch.
    loader:      the order of sequences: "single" or "batch", as Megatron's `dataloader_type`.
    step:        counted from 1; at step 1 the weights before it are recorded, too.
    dither:      of a repetition with the last bit of every module's output moved: its number, from 1 to 3.
    follow:      of a reference: the recording whose choices of experts it takes. Without it, rounding may send a token
                 to another expert, which counts as a difference.
    Raises RunError: Megatron does not say where a parameter lies in the whole model, or a file cannot be written.
    """
    from tp_invariant_recipes.features.audit.recording import AuditRecording
    from tp_invariant_recipes.observe.optimizer_step import OptimizerStep
    from tp_invariant_recipes.observe.shards import unwrapped
    from tp_invariant_recipes.observe.trace import site_here
    from tp_invariant_recipes.runs.sweep_dir import AuditedRun

    chunks = list(model) if isinstance(model, Sequence) else [model]
    site = site_here(unwrapped(chunks[0]).config, sequence=sequence, batch=batch, samples=micro_batch, sampler=loader)
    run = AuditedRun(Path(folder))
    where = run.path if dither is None else run.dithered(dither).path
    state = SimpleNamespace(train_state=SimpleNamespace(step=step - 1))
    context: Any = SimpleNamespace(model=chunks, optimizer=optimizer, grad_norm=None, state=state, loss_dict=None)
    recording = AuditRecording(
        where, range(step, step + 1), dither, None if follow is None else Path(follow), lambda _: site
    )
    wrapped = OptimizerStep([recording])
    try:
        recording.on_train_start(context)
        wrapped.on_train_start(context)
        recording.on_train_step_start(context)
        yield
        context.grad_norm = wrapped.result[1] if wrapped.result else None
        recording.on_train_step_end(context)
    finally:
        wrapped.restore()
        recording.close()
