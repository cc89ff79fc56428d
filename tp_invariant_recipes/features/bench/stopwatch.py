"""The callbacks of a benchmark: one takes the time and memory of every step, one traces the last steps."""

import json
import time
from pathlib import Path
from typing import Literal

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.features.bench.profile import STEP, TRACED
from tp_invariant_recipes.runs.bench_dir import Figures, Pass

# Memory private to CUDA graphs stays reserved after the capture, but no longer counts as allocated.
PEAKS = {"allocated": torch.cuda.max_memory_allocated, "reserved": torch.cuda.max_memory_reserved}


class Start(Callback):
    """Starts the clock of a step. Comes before the callbacks whose time counts, the `Stopwatch` after them."""

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the clock; the memory held from here on is the step's."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.time = time.perf_counter()


class Stopwatch(Callback):
    """Writes one line a step: seconds from the step's start to its end, and the most memory held in between.

    A step is Bridge's: data, forward, backward, gradient reduction, clipping, optimizer; and what our ledger takes.
    What Bridge logs between steps is outside. The device is idle at both readings of the clock.
    """

    def __init__(self, start: Start, file: Path, number: int, bench_pass: Pass) -> None:
        self.start, self.file, self.number, self.bench_pass = start, file, number, bench_pass

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Read the clock, then write."""
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self.start.time
        config, step = context.state.cfg, context.state.train_state.step + 1
        memory: Literal["allocated", "reserved"] = (
            "allocated" if config.model.cuda_graph_impl in (None, "none") else "reserved"
        )
        line = Figures(
            pass_=self.number,
            mode=self.bench_pass.mode,
            round=self.bench_pass.round,
            profile=self.bench_pass.profile,
            step=step,
            counts=step > self.bench_pass.warmup and not self.bench_pass.profile,
            seconds=seconds,
            tokens=config.train.global_batch_size * config.model.seq_length,
            memory=memory,
            peak_bytes=PEAKS[memory](),
        )
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line.as_json()) + "\n")


class Tracer(Callback):
    """Traces the last steps of a pass. The step before them is traced too and thrown away: it starts the tracing."""

    def __init__(self, file: Path, bench_pass: Pass, *, gpu: bool) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                skip_first=bench_pass.steps - TRACED - 1, wait=0, warmup=1, active=TRACED, repeat=1
            ),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
        )

    def on_train_start(self, context: CallbackContext) -> None:
        """Begin to count steps."""
        self.profiler.start()

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Mark the step in the trace."""
        self.step = torch.profiler.record_function(STEP)
        self.step.__enter__()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Close the mark once the device is idle; after the last step the trace is written."""
        torch.cuda.synchronize()
        self.step.__exit__(None, None, None)
        self.profiler.step()

    def on_train_end(self, context: CallbackContext) -> None:
        """Stop."""
        self.profiler.stop()
