# SPDX-License-Identifier: Apache-2.0
"""The callbacks that write a run's ledger, and the one that writes the file and its progress file."""

import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.check.recording import steps
from tp_invariant_recipes.comparison import comparability
from tp_invariant_recipes.errors import CheckpointError
from tp_invariant_recipes.ledger.bits import float_bits
from tp_invariant_recipes.ledger.open import streamed
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord, resume
from tp_invariant_recipes.ledger.run_files import ProgressLine, RunFile
from tp_invariant_recipes.ledger.schema import CAPABILITY, FINAL_VALIDATION, TEST, VALIDATION
from tp_invariant_recipes.machine import processor
from tp_invariant_recipes.machine.versions import versions
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.megatron.attention.core_attention import backend_in_force
from tp_invariant_recipes.observe.digests.callback import Digests
from tp_invariant_recipes.observe.digests.merge import Recorded
from tp_invariant_recipes.observe.trace import Tracing
from tp_invariant_recipes.runs.checkpoints import iteration_dir
from tp_invariant_recipes.runs.run_dir import RunDir, cannot_write
from tp_invariant_recipes.settings.environment import recorded
from tp_invariant_recipes.settings.sections import LedgerSettings

if TYPE_CHECKING:
    from tp_invariant_recipes.training.rank import RankInfo

LOSS = "lm loss"  # Bridge's name for the language-model loss


def recording(run_dir: RunDir, rank_info: "RankInfo", run: RunFile, ledger: LedgerSettings) -> list[Any]:
    """Return the callbacks that write the ledger of a run directory, on this rank."""
    traced = steps(ledger.trace) if ledger.trace else ()
    digests = Digests(ledger.digests, ledger.state_digests, traced, ledger.experts) if ledger.digests else None
    tracing = Tracing(traced, ledger.dump, run_dir) if traced else None
    callbacks: list[Any] = [callback for callback in (digests, tracing) if callback]
    if rank_info.rank == rank_info.world_size - 1:
        parts = {"numerics": run.numerics, "layout": run.layout, "notes": run.notes}
        callbacks.append(Recorder(run_dir, run.identity, parts, digests, tracing))
    return callbacks


class Recorder(Callback):
    """Records every step. For the last rank: it is on the last pipeline stage, the only one that has the loss."""

    def __init__(
        self,
        run_dir: RunDir,
        identity: dict[str, Any],
        parts: dict[str, Any],
        digests: Digests | None,
        tracing: Tracing | None,
    ) -> None:
        self.run_dir = run_dir
        self.identity = identity
        self.parts = parts
        self.digests = digests
        self.tracing = tracing
        self.pending: StepRecord | None = None  # whose digests the GPU is still at
        if digests:
            digests.listener, digests.check = self._append_with_digests, self._check_loaded
        self.writer: LedgerWriter  # opened when training starts
        self.validation = VALIDATION  # the kind of the next one

    def on_train_start(self, context: CallbackContext) -> None:
        """Open the ledger: new, or continued after the step the checkpoint holds. Raises CheckpointError."""
        asked, step = context.state.cfg.checkpoint.ckpt_step, context.state.train_state.step
        if asked is not None and asked != step:
            folder = context.state.cfg.checkpoint.load
            raise CheckpointError(
                f"Megatron-Bridge begins at step {step}, not at step {asked} of {folder}: it looks for "
                f"latest_train_state.pt there first; cp {iteration_dir(Path(folder), asked)}/train_state.pt "
                f"{folder}/latest_train_state.pt"
            )
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        described = {"name": properties.name, "compute_capability": f"{properties.major}.{properties.minor}"}
        config = context.state.cfg
        if properties.name == "cpu":
            described |= {"machine": platform.machine(), CAPABILITY: processor.capability()}
        attention = backend_in_force(context.model, config.model.seq_length, config.train.micro_batch_size)
        product = mode.definition(self.parts["numerics"]["mode"], "cpu" if properties.name == "cpu" else "gpu")
        layers = getattr(config.model, "fp8_layers", None)
        defined = {"attention": attention, "product": product, "fp8": layers and layers.definition}
        header = Header(
            identity=self.identity,
            versions=versions(),
            device=(described | {name: value for name, value in defined.items() if value is not None}),
            environment=recorded(os.environ),
            parameters=self.digests.plan.parameters if self.digests else (),
            initial=self.digests.initial if self.digests else None,
            **self.parts,
        )
        if self.run_dir.ledger.exists():
            self.writer = resume(self.run_dir.ledger, header, context.state.train_state.step)
        else:
            self.writer = LedgerWriter(self.run_dir.ledger).create(header)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Note the learning rate that this step will use; afterwards it is already the next step's."""
        groups = [g for g in context.optimizer.param_groups if g and not g.get("is_decoupled_lr")]
        self.learning_rate = float(groups[0]["lr"])
        self.started = time.monotonic()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Append the step to the ledger, at once or when its digests are there; add a line to the progress file."""
        config, state = context.state.cfg, context.state.train_state
        samples = config.train.global_batch_size
        loss = (context.loss_dict or {}).get(LOSS)
        # Bridge rounds the norm to fp32 when it synchronises it over the model-parallel ranks.
        width = 64 if config.train.skip_sync_grad_norm_across_mp else 32
        norm = context.grad_norm
        record = StepRecord(
            step=state.step + 1,
            samples=state.consumed_train_samples + samples,
            tokens=samples * config.model.seq_length,
            loss=None if loss is None else float_bits(loss.float().item(), 32),
            grad_norm=None if norm is None else float_bits(float(norm), width),
            learning_rate=float_bits(self.learning_rate, 64),
            skipped=bool(context.skipped_iter),
            trace=self.tracing.latest if self.tracing else None,
            diverged=self.tracing.diverged if self.tracing else (),
        )
        if self.digests:
            self.pending = record
        else:
            self.writer.append(record)
        line = ProgressLine(
            step=record.step,
            loss=None if loss is None else loss.item(),
            grad_norm=None if norm is None else float(norm),
            learning_rate=self.learning_rate,
            tokens=record.tokens,
            seconds=time.monotonic() - self.started,
            peak_memory=torch.cuda.max_memory_allocated(),
            peak_reserved=torch.cuda.max_memory_reserved(),
            flops=float(state.floating_point_operations_so_far),
            time=time.time(),
        )
        self._write_progress(line)

    def on_eval_end(self, context: CallbackContext) -> None:
        """Add the loss of the validation to the step that has just ended."""
        self._evaluated(context, self.validation)

    def on_train_end(self, context: CallbackContext) -> None:
        """Bridge validates once more."""
        self.validation = FINAL_VALIDATION

    def on_test_end(self, context: CallbackContext) -> None:
        """Add the loss of the test."""
        self._evaluated(context, TEST)

    def _evaluated(self, context: CallbackContext, kind: str) -> None:
        settings = context.state.cfg.validation
        samples = settings.eval_iters * settings.eval_global_batch_size
        end = samples if kind == TEST else context.state.train_state.consumed_valid_samples
        losses = {f"{kind}/{end - samples}:{end}": float_bits(context.total_loss_dict[LOSS].item(), 32)}
        if self.pending:
            self.pending = replace(self.pending, evaluations={**self.pending.evaluations, **losses})
        else:
            self.writer.add(losses)

    def _append_with_digests(self, step: int, recorded: Recorded) -> None:
        """Append the step that waits for these digests; none waits if another callback failed in between."""
        record, self.pending = self.pending, None
        if record is not None and record.step == step:
            self.writer.append(replace(record, **vars(recorded) | {"diverged": record.diverged + recorded.diverged}))

    def _check_loaded(self, step: int, loaded: Recorded) -> str | None:
        """Return what is wrong with the state a run goes on from, by its ledger; None: nothing, or no ledger."""
        ledger = streamed(self.run_dir.ledger) if self.run_dir.ledger.exists() else None
        if ledger is None or len(ledger.steps) < step:
            return None  # `resume` refuses a ledger that is too short
        line = ledger.steps[step - 1]
        here = replace(line, **vars(loaded))
        wrong = comparability.problem(line, here)
        if wrong is None:
            print(comparability.remark(line, here))
        return wrong

    def _write_progress(self, line: ProgressLine) -> None:
        try:
            with self.run_dir.progress.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line.as_json()) + "\n")
        except OSError as error:
            raise OSError(error.errno, cannot_write(self.run_dir.progress, error)) from error
