"""The callback of guard=products and guard=shadow: four nets around a step, and the end of a run that has a wrong bit.

    when                                  what
    a step begins                         which of its products are sampled
    its passes, of a shadow step          shadow.py
    before the optimizer's step           samples go to the judge; weights of all replicas, and what lay in memory since
                                          the last step, are compared
    after it                              elements of it are computed again; what lies in memory now is digested
    a checkpoint, the end of training     all that is undecided is waited for, on all ranks

What the judge finds ends the run when the next of these comes. No checkpoint counts before.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.bridge.training.callbacks import CallbackContext

from tp_invariant_recipes.coverage.guard import SHADOW, ranks_apart
from tp_invariant_recipes.errors import HardwareFault
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.numerics.products import sampling
from tp_invariant_recipes.numerics.products.judge import require_definition
from tp_invariant_recipes.replacement import Replacement
from tp_invariant_recipes.runs import guard_files
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.training.gathering import gathered
from tp_invariant_recipes.training.guard import products
from tp_invariant_recipes.training.guard.fault import Reporter, WrongBits, described
from tp_invariant_recipes.training.guard.judge import Judge
from tp_invariant_recipes.training.guard.optimizer import Adam, Memory
from tp_invariant_recipes.training.guard.shadow import ReplicaPair, Shadow
from tp_invariant_recipes.training.guard.weights import TURNS, Replicas
from tp_invariant_recipes.training.optimizer_state import OptimizerState
from tp_invariant_recipes.training.optimizer_step import AroundOptimizerStep
from tp_invariant_recipes.training.shards import Shards, gather_weights
from tp_invariant_recipes.training.trace import site_of

PROOFS = (evidence.PRODUCT, evidence.ATTENTION)  # of one rank alone


class Guard(AroundOptimizerStep):
    """For every rank, after the digests' callback, so that it comes before them around a step."""

    def __init__(self, config: RunConfig, run_dir: RunDir, rank: int) -> None:
        self.config, self.run_dir, self.rank = config, run_dir, rank
        self.settings = config.guard
        seed = f"{config.section('rng')['seed']} {rank}"
        self._sampler = sampling.Sampler(self.settings.products, seed)
        self._draw = random.Random(seed)
        self._shadow: Shadow | None = None
        if self.settings.kind == SHADOW:
            self._shadow = Shadow(ranks_apart(config), config.numerics.data_shards or 1)
        self._judge: Judge | None = None
        self._step = 0
        self._gathers_later = bool(config.section("ddp").get("overlap_param_gather"))
        self._captures = cuda_graphs.requested(config.model)

    def replacements(self) -> tuple[Replacement, ...]:
        """What shadow steps replace, for the time of training."""
        return () if self._shadow is None else (self._shadow.replacement(),)

    def on_train_start(self, context: CallbackContext) -> None:
        """Learn what this rank holds, and who the others are."""
        self._model, self._start = context.model, context.state.train_state.step
        self._judge = Judge()
        require_definition(next(context.model[0].parameters()).device)
        shards, state = Shards(context.model), OptimizerState(context.optimizer)
        names = {part.owner: part.name for part in shards.parts if part.owner.requires_grad}
        arithmetic = self.config.numerics.arithmetic
        stated = arithmetic is not None and arithmetic.any_machine
        self._reporter = Reporter(self.run_dir, self.rank, gathered(described(self.rank)), self.config.numerics)
        self._products = products.SampledProducts(self._sampler, products.WeightNames(shards), self._judge, self.rank)
        self._adam = Adam(state, names, self._judge, self.rank, stated)
        self._memory = Memory(state, names, self._judge, self.rank)
        self._replicas = Replicas(names, self._judge, self.rank)
        self._good = guard_files.read_good(self.run_dir, self._start)
        if self._shadow is not None:
            self._shadow.names, self._shadow.state = names, context.state
            self._shadow.site, self._shadow.due = site_of(context), self._due
            self._shadow.judged = self._judge_pairs
        sampling.use(self._sampler)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Raises HardwareFault."""
        self._raise_what_is_found()
        self._step = context.state.train_state.step + 1
        self._products.restart(self._step)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """While a graph is captured no thread may wait for the GPU."""
        soon = self._step - self._start <= (context.state.cfg.model.cuda_graph_warmup_steps or 0) + 1
        if self._captures and soon and self._judge is not None:
            self._judge.wait()

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Raises HardwareFault."""
        self._products.hand_over(self._step)
        self._memory.look()
        if self._step > self._start + 1:
            every = self._shadow is not None and self._due()
            self._replicas.compare(self._step - 1, range(TURNS) if every else None)
        self._raise_what_is_found()
        self._draw.seed(f"{self._sampler.seed} {self._step}")
        before = self._adam.before(self._draw)
        yield
        if before is not None:
            self._adam.after(before, self._step)
        self._memory.leave(self._step, weights=not self._gathers_later)

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Have everything decided before the manifest is written, which makes the checkpoint count."""
        self._settle()

    def on_train_end(self, context: CallbackContext) -> None:
        """Have everything decided."""
        self._settle()
        self.close()

    def close(self) -> None:
        """Sample no more."""
        sampling.use(None)
        self._sampler.samples, self._sampler.fixed = [], []
        if self._judge is not None:
            print(f"guard: {self._judge.decided} checks, {len(self._judge.findings)} of them found wrong bits")
            self._judge.close()
            self._judge = None

    def trusted(self, step: int) -> int:
        """The last step whose checkpoint is trusted after a fault at a step.

        A good shadow step vouches for all before it. Samples find a fault late, so that it may be older.
        """
        return min(self._good, step - 1) if self._shadow is not None else max(0, step - 1 - self.settings.every)

    def _due(self) -> bool:
        return self._step % self.settings.every == 0

    def _settle(self) -> None:
        gather_weights(self._model)
        self._memory.look()
        if self._step > self._start:
            self._replicas.compare(self._step, range(TURNS))
        assert self._judge is not None
        self._end_together(next(iter(self._judge.wait()), None))

    def _raise_what_is_found(self) -> None:
        found = self._judge.found() if self._judge is not None else []
        if found:
            raise self._fault(found[0])

    def _fault(self, finding: WrongBits) -> HardwareFault:
        return self._reporter.report(finding, self.trusted(finding.step))

    def _judge_pairs(self, pairs: list[ReplicaPair], again: Callable[[], list[ReplicaPair]]) -> None:
        """After the passes of a shadow step, on all ranks. Raises HardwareFault."""
        unlike = [pair for pair in pairs if pair.first is not None]
        group = dist.get_process_group_ranks(_replica_group())
        if not any(gathered(bool(unlike))):
            self._good = self._step
            if self.rank == 0:
                guard_files.write_good(self.run_dir, self._step)
            return
        self._products.hand_over(self._step)
        self._sampler.everything = True
        unsteady = [pair for pair in again() if pair.first is not None]
        self._products.hand_over(self._step)
        assert self._judge is not None
        proofs = [one for one in self._judge.wait() if one.found_by in PROOFS]
        self._end_together(proofs[0] if proofs else None)
        self._end_together(self._from_digests(unlike, unsteady, group))

    def _end_together(self, finding: WrongBits | None) -> None:
        """Raises HardwareFault on all ranks, with one message, if any has a finding."""
        fault = None if finding is None else self._fault(finding)
        texts = [text for text in gathered(None if fault is None else str(fault)) if text]
        if texts:
            raise HardwareFault(texts[0])

    def _from_digests(
        self, unlike: Sequence[ReplicaPair], unsteady: Sequence[ReplicaPair], group: Sequence[int]
    ) -> WrongBits | None:
        """Of two that differ, the one that does not repeat its own bits, or that differs from a third."""
        if not unlike:
            return None
        first = min(unlike, key=lambda pair: pair.depth)
        suspects = [pair.own for pair in unsteady]
        judge = "its own repetition, which has other bits" if suspects else None
        if not suspects:
            suspects = _in_most(unlike)
            judge = "a third replica" if len(suspects) == 1 else None
        ranks = tuple(sorted(group[n] for n in suspects))
        details = {"pairs": [{"own": group[p.own], "shadow": group[p.shadow], "first": p.first} for p in unlike]}
        return WrongBits(evidence.SHADOW, self._step, str(first.first), ranks, judge=judge, details=details)


def _in_most(unlike: Sequence[ReplicaPair]) -> list[int]:
    """Whoever is in more pairs than all others; else all."""
    places = [n for pair in unlike for n in (pair.own, pair.shadow)]
    most = max(places.count(n) for n in places)
    chosen = sorted({n for n in places if places.count(n) == most})
    return chosen if len(chosen) == 1 else sorted(set(places))


def _replica_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()
