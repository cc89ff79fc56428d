# SPDX-License-Identifier: Apache-2.0
"""The callback of guard=GEMMs and guard=shadow: four nets around a step, and the end of a run that has a corrupted
value.

    when                                  what
    a step begins                         which of its GEMMs are sampled; messages are digested until it ends
    its passes, of a recomputation on another replica          shadow.py
    before the optimizer's step           ranks tell each other whether the judge has found anything, and compare
                                          what the last step's messages were (collectives.py); the judge begins
                                          with what the last step left; samples are copied for it;
                                          weights of all replicas, and memory between the two steps, are compared
    after it                              elements of it are computed again; what lies in memory now is digested
    a checkpoint, the end of training     all that is undecided is decided, on all ranks

No checkpoint counts before. A finding of any rank ends all ranks in the same step, with the finding that comes first
in SilentDataCorruption.order: a message does not depend on which rank, or which detector, was faster.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import CallbackContext
from megatron.core import parallel_state

from tp_invariant_recipes.check.recording import SHADOW, rank_distance
from tp_invariant_recipes.errors import HardwareFault
from tp_invariant_recipes.features.guard.collectives import SHARES, CollectiveNet
from tp_invariant_recipes.features.guard.judge import Judge, SampledGemms, SilentDataCorruption, described, machine
from tp_invariant_recipes.features.guard.memory import TURNS, Memory, Replicas
from tp_invariant_recipes.features.guard.optimizer import Adam
from tp_invariant_recipes.features.guard.shadow import (
    Recompute,
    ReplicaPair,
    Shadow,
    earliest,
    narrowed,
    of_replicas,
    replacement,
)
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.ledger.evidence import Evidence
from tp_invariant_recipes.numerics.gemm import sampling
from tp_invariant_recipes.numerics.gemm.judge import UnlikeBits, require_definition
from tp_invariant_recipes.observe.optimizer_state import OptimizerState
from tp_invariant_recipes.observe.optimizer_step import AroundOptimizerStep
from tp_invariant_recipes.observe.shards import Shards, gather_weights
from tp_invariant_recipes.observe.trace import site_of
from tp_invariant_recipes.observe.union import gathered
from tp_invariant_recipes.replacement import Replacement
from tp_invariant_recipes.runs import checkpoints
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig

ELSEWHERE = "its own recomputation at other offsets of the launches, which differs"


class Guard(AroundOptimizerStep):
    """For every rank, after the digests' callback, so that it comes before them around a step."""

    def __init__(self, config: RunConfig, run_dir: RunDir, rank: int) -> None:
        self.config, self.run_dir, self.rank = config, run_dir, rank
        self.settings = config.guard
        seed = f"{config.section('rng')['seed']} {rank}"
        self._sampler = sampling.Sampler(self.settings.products, seed)
        self._draw = random.Random(seed)
        self._shadows = self.settings.kind == SHADOW
        self._shadow: Shadow | None = None
        self._judging = False  # from the start of training to its end
        self._step = 0
        self._gathers_later = bool(config.section("ddp").get("overlap_param_gather"))
        self._captures = cuda_graphs.requested(config.model)
        share = SHARES.get(self.settings.collectives) if config.layout.world > 1 else None
        self._net = CollectiveNet(share, rank) if share else None
        self._gloo: dist.ProcessGroup | None = None

    def replacements(self) -> tuple[Replacement, ...]:
        """Return what the nets replace, for the time of training."""
        passes = (replacement(self._due),) if self._shadows else ()
        return (*passes, *(self._net.replacements() if self._net else ()))

    def on_train_start(self, context: CallbackContext) -> None:
        """Learn what this rank holds, and who the others are."""
        self._model, self._start = context.model, context.state.train_state.step
        self._judge, self._judging = Judge(), True
        require_definition(next(context.model[0].parameters()).device)
        shards, state = Shards(context.model), OptimizerState(context.optimizer)
        names = {part.owner: part.name for part in shards.parts if part.owner.requires_grad}
        arithmetic = self.config.numerics.arithmetic
        stated = arithmetic is not None and arithmetic.any_machine
        self._everyone = gathered(described(self.rank))
        self._products = SampledGemms(self._sampler, shards, self._judge, self.rank)
        self._adam = Adam(state, names, self._judge, self.rank, stated)
        self._memory = Memory(state, names, self._judge, self.rank)
        self._replicas = Replicas(names, self._judge)
        self._good = checkpoints.read_good(self.run_dir, self._start)
        if self._shadows:
            distance, data_shards = rank_distance(self.config), self.config.numerics.data_shards or 1
            site = site_of(context)
            self._shadow = Shadow(distance, data_shards, names, context.state, site, self._judge_pairs)
        if self.config.layout.world > 1:
            self._gloo = dist.new_group(backend="gloo")
        if self._net is not None:
            self._net.start(context.model, next(context.model[0].parameters()).device)
        sampling.use(self._sampler)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Count the step."""
        self._step = context.state.train_state.step + 1
        self._products.restart(self._step)
        if self._net is not None:
            self._net.step_begins(self._step)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """While a graph is captured no thread may wait for the GPU."""
        if self._net is not None:
            self._net.step_ends()
        soon = self._step - self._start <= (context.state.cfg.model.cuda_graph_warmup_steps or 0) + 1
        if self._captures and soon:
            self._judge.wait()

    @contextmanager
    def around_optimizer_step(self) -> Iterator[None]:
        """Raise HardwareFault."""
        self._end_if_any(self._judge.decided())
        self._judge.begin()
        self._products.hand_over(self._step)
        self._memory.look()
        if self._step > self._start + 1:
            self._replicas.compare(self._step - 1, range(TURNS) if self._in_full(self._step) else None)
        self._draw.seed(f"{self._sampler.seed} {self._step}")
        self._adam.before(self._draw)
        yield
        self._adam.after(self._step)
        self._memory.leave(self._step, weights=not self._gathers_later, whole=self._in_full(self._step + 1))

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Bridge has written a checkpoint, and with `checkpoint.async_save` has trained more steps since."""
        if not context.state.cfg.checkpoint.async_save:
            self.on_checkpoint_scheduled()

    def on_checkpoint_scheduled(self) -> None:
        """Have everything decided before the manifest is written, which makes the checkpoint count."""
        self._settle()

    def on_train_end(self, context: CallbackContext) -> None:
        """Have everything decided."""
        self._settle()
        self.close()

    def cause(self) -> HardwareFault | None:
        """Return what this rank's own samples show where it fails: a NaN ends a run before ranks tell each other."""
        if not self._judging:
            return None
        if not self._captures:  # a graph that was not replayed has filled no sample
            self._products.hand_over(self._step)
        own = [finding for finding in self._judge.wait() if finding.ranks == (self.rank,)]
        if not own:
            return None
        return self._reported(min(own, key=lambda finding: finding.order), min(finding.step for finding in own))

    def close(self) -> None:
        """Sample no more."""
        sampling.use(None)
        self._sampler.samples, self._sampler.fixed = [], []
        if self._net is not None:
            self._net.close()
        if self._judging:
            print(
                f"guard: {self._judge.count} checks, {len(self._judge.findings)} of them detected silent "
                f"data corruption; digests of {self._net.messages if self._net else 0} messages"
            )
            self._judge.close()
        self._judging = False

    def trusted(self, step: int) -> int:
        """Return the last step whose checkpoint is trusted after a fault at a step.

        A good recomputation on another replica vouches for all before it. Samples find a fault late, so that it may be
        older.
        """
        return min(self._good, step - 1) if self._shadows else max(0, step - 1 - self.settings.every)

    def _due(self) -> Shadow | None:
        return self._shadow if self._in_full(self._step) else None

    def _in_full(self, step: int) -> bool:
        """Return whether a step is a recomputation on another replica, before which all memory is looked at."""
        return self._shadows and step % self.settings.every == 0

    def _settle(self) -> None:
        gather_weights(self._model)
        self._memory.look()
        if self._step > self._start:
            self._replicas.compare(self._step, range(TURNS))
        self._end_if_any(self._judge.wait())

    def _end_if_any(self, findings: Sequence[SilentDataCorruption]) -> None:
        """Raise HardwareFault if a rank has findings, or got another message than was sent. A collective of all ranks.

        After a finding all that any rank has begun is decided: it may tell which of several suspects is wrong.
        """
        counts = torch.tensor([self._net.unbalanced() if self._net else 0, len(findings)])
        if self._gloo is not None:
            dist.all_reduce(counts, group=self._gloo)
        unbalanced, found = counts.tolist()
        if unbalanced and self._net is not None and (corrupted := self._net.unlike(self._gloo)) is not None:
            self._end_run([corrupted])
        if found:
            self._end_run(self._judge.wait())

    def _judge_pairs(self, pairs: list[ReplicaPair], recompute: Recompute) -> None:
        """After the passes of a recomputation on another replica, on all ranks. Raises HardwareFault."""
        group = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
        first = of_replicas(pairs, group, parallel_state.get_pipeline_model_parallel_rank())
        if earliest(first) is None:
            self._good = self._step
            if self.rank == 0:
                checkpoints.write_good(self.run_dir, self._step)
            return
        self._products.hand_over(self._step)
        self._sampler.everything = True
        first = narrowed(first, recompute(in_one_launch=False), group, "its own recomputation, which differs")
        self._products.hand_over(self._step)
        self._end_run([finding for finding in self._judge.wait() if len(finding.ranks) == 1])
        suspicion = earliest(first)
        assert suspicion is not None
        if len(suspicion.ranks) > 1:
            self._sampler.everything = False
            try:
                moved = recompute(in_one_launch=True)
            except RuntimeError as error:  # such as too little memory; others may wait for this rank, and end with it
                finding = suspicion.wrong_bits(self._step)
                raise self._reported(finding, self._step) from error
            suspicion = earliest(narrowed(first, moved, group, ELSEWHERE)) or suspicion
        self._end_run([suspicion.wrong_bits(self._step)])

    def _end_run(self, findings: Sequence[SilentDataCorruption]) -> None:
        """Raise HardwareFault on all ranks, with one message and one file of evidence, if any rank has findings.

        No checkpoint from the earliest of all findings on is trusted. A collective of all ranks.
        """
        everyone = gathered([finding.order for finding in findings])
        orders = [(order, rank) for rank, of_rank in enumerate(everyone) for order in of_rank]
        if not orders:
            return
        first, reporter = min(orders)
        message = None
        if self.rank == reporter:
            finding = next(finding for finding in findings if finding.order == first)
            message = str(self._reported(finding, min(order.step for order, _ in orders)))
        raise HardwareFault(gathered(message)[reporter])

    def _reported(self, finding: SilentDataCorruption, step: int) -> HardwareFault:
        """Return the error to raise; its files are written (runs/checkpoints.py). step: the earliest that is wrong."""
        unlike, trusted = finding.difference or UnlikeBits(0, 0, 0), self.trusted(step)
        file = checkpoints.evidence_file(self.run_dir, finding.step, self.rank)
        written = Evidence(
            detector=finding.detector,
            step=finding.step,
            where=finding.where,
            suspects=tuple(self._everyone[rank] for rank in finding.ranks),
            judge=finding.judge,
            outputs=unlike.outputs,
            of_=unlike.elements,
            bits=unlike.bits,
            trusted=trusted,
            numerics=self.config.numerics.mode,
            machine={} if finding.portable else machine(),
            details=dict(finding.details),
        )
        evidence.write(file, written, finding.tensors)
        hosts = tuple(sorted({suspect.host for suspect in written.suspects}))
        checkpoints.distrust(self.run_dir, checkpoints.Untrusted(trusted, hosts))
        steps = [checkpoint.step for checkpoint in checkpoints.finished(self.run_dir.checkpoints)]
        last = max((step for step in steps if step <= trusted), default=None)
        goes_on = "no checkpoint is trusted: the run begins again from its start"
        if last is not None:
            resumed = f"tpi train --resume {self.run_dir.path} goes on from it"
            goes_on = f"the last trusted checkpoint is of step {last}; {resumed}"
        return HardwareFault(f"{written.text()}\n{goes_on}\nevidence: tpi check {file}")
