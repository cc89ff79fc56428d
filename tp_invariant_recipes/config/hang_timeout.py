"""How long a rank may give no sign of life before its run ends: `run.hang_timeout`."""

from dataclasses import dataclass

from tp_invariant_recipes.check import recording
from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig

# By default a step may take so many times the longest of the last steps, and always so many seconds: a file system or a
# network may be away for a minute.
FACTOR, LEAST = 5, 120.0
# Seconds for what each rank does by itself: to import Bridge, to read and write a checkpoint, to capture CUDA graphs.
ALONE = 1800.0
# The others wait in a collective for a rank that is late in a step, and their library gives up at its own limit. This
# part of it is ours: then the message names the rank that is late, not one of those that waited.
OF_COLLECTIVES = 0.9
# Seconds for a rank that SIGSTOP stopped, whatever it did: nothing that a run waits for stops a process.
STOPPED = 60.0
SETTLING = 2  # steps after a start that compile and warm up


@dataclass(frozen=True)
class Limits:
    """Seconds without a sign of life.

    step:      None: it follows the longest of the last steps.
    long_step: of a step that compiles, captures or writes tensors; of one of an evaluation.
    alone:     of what ranks do outside of steps.
    stopped:   of a rank that a signal has stopped, while its launcher runs.
    """

    step: float | None
    long_step: float
    alone: float
    stopped: float = STOPPED

    def of_step(self, longest: float | None) -> float:
        """longest: of the last steps, in seconds; None: none is known."""
        if self.step is not None:
            return self.step
        if longest is None:
            return self.long_step
        return max(LEAST, 2 * longest, min(FACTOR * longest, self.long_step))


def limits(config: RunConfig) -> Limits | None:
    """Return the limits of a run; None: off."""
    requested, dist = config.run.hang_timeout, config.section("dist")
    if requested == "off":
        return None
    if isinstance(requested, int):
        return Limits(requested, requested, requested, requested)
    of_collectives = dist.get("distributed_timeout_seconds_after_init") or 60 * dist.get(
        "distributed_timeout_minutes", 10
    )
    long_step = max(OF_COLLECTIVES * of_collectives, LEAST)
    return Limits(None, long_step, max(ALONE, long_step))


def takes_long(config: RunConfig, step: int, start: int) -> bool:
    """Whether a step may take longer than those around it.

    start: steps that were done when the ranks were started.
    """
    done, model, trace = step - 1 - start, config.model, config.ledger.trace
    if done < SETTLING or (trace and step in recording.steps(trace)):
        return True
    if not cuda_graphs.requested(model):
        return False
    return 0 <= done + 1 - (model.get("cuda_graph_warmup_steps") or 0) <= SETTLING
