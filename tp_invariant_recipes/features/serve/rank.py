# SPDX-License-Identifier: Apache-2.0
"""A rank of `tpi serve`: between passes of the engine, requests join and leave, and weights change."""

import pickle
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.inference.rank import loaded_for_inference
from tp_invariant_recipes.features.rollouts.engine import Engine
from tp_invariant_recipes.features.rollouts.requests import Completion
from tp_invariant_recipes.features.rollouts.schedule import SampleState
from tp_invariant_recipes.features.score.rank import Forward, Wanted
from tp_invariant_recipes.features.serve import messages, weights
from tp_invariant_recipes.features.serve.messages import Event, Message, Versions, Weights
from tp_invariant_recipes.portable.ieee.draw import request_key
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.training import heartbeat
from tp_invariant_recipes.training.heartbeat import Phase

IDLE = 1.0  # seconds that a rank without work waits for a message before it gives a heartbeat
CPU_CACHE = 1 << 16  # tokens of the cache on a CPU, by default


@dataclass(frozen=True)
class Serve:
    """What a rank does: serve until it is told to end.

    tokenizer: as of `sequences.tokenizer`; None: there is none. options: of `Engine`. pipes: of each rank.
    batch_tokens: of a forward pass of scores.
    """

    config: RunConfig
    weights: Weights
    tokenizer: str | None
    options: Mapping[str, Any]
    pipes: Sequence[Connection]
    batch_tokens: int = 16384

    def __call__(self, run_dir: RunDir, rank_info: Any) -> None:
        """Raise RunError: a log-probability is no number."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a whole group of processes: the launcher drains
        with loaded_for_inference(self.config, self.weights.checkpoint) as model:
            loop = Loop(self, model, self.pipes[rank_info.rank])
            loop.run()
            loop.engine.release()


@dataclass
class Sample:
    """A sample in the engine. told: tokens that the HTTP process has. drawn: with weights of before, by version."""

    state: SampleState
    stream: bool
    told: int = 0
    drawn: list[tuple[str, int]] = field(default_factory=list)

    def versions(self, now: str) -> Versions:
        """Return the versions of its tokens; the last ones have those of now."""
        rest = len(self.state.drawn) - sum(count for _, count in self.drawn)
        return (*self.drawn, (now, rest)) if rest or not self.drawn else (*self.drawn,)


class Loop:
    """The life of a rank. Ranks that compute passes together apply the same messages between the same passes."""

    def __init__(self, job: Serve, model: Any, pipe: Connection) -> None:
        from megatron.core import parallel_state as state

        decode = sequences.tokenizer(job.tokenizer).decode if job.tokenizer else None
        options = {**job.options}
        if options.get("tokens") is None and job.config.device.kind == "cpu":
            options["tokens"] = CPU_CACHE
        self.engine, self.pipe, self.job = Engine(model, decode=decode, **options), pipe, job
        self.plan = self.engine.opened()
        self.forward = Forward(model, job.config, Wanted())
        self.version = job.weights.version
        self.home, self.tells = state.get_data_parallel_rank(), state.get_tensor_model_parallel_rank() == 0
        ranks = dist.get_process_group_ranks(state.get_tensor_model_parallel_group())
        if self.engine.coupled is not None:
            ranks = [*range(dist.get_world_size())]
        self.first, self.group = ranks[0], _gloo_group(ranks)
        self.open: dict[str, dict[int, Sample]] = {}
        self.held, self.fresh = False, True
        self.queue: deque[Message] = deque()
        self.task: Message | None = None

    def run(self) -> None:
        """Serve until `End` comes."""
        if self.tells:
            blocks = self.plan.blocks
            self.pipe.send([messages.Ready(self.home, self.listens, blocks.count * blocks.size)])
        while not isinstance(self.task, messages.End):
            match self.task:
                case messages.Score(key, scored):
                    self._score(key, scored)
                case messages.Load(key, new):
                    self._load(key, new)
            self.task, self.fresh = None, True
            self.engine.serve(self.plan, self.between)

    @property
    def listens(self) -> bool:
        """Whether this rank reads messages, for all that compute with it."""
        return dist.get_rank() == self.first

    def between(self, ended: Sequence[Completion], idle: bool) -> bool:
        """Tell what was drawn, and let requests join and leave; False: there is something to do outside of passes."""
        self._tell(ended)
        wait, self.fresh = idle and not self.fresh, False
        while True:
            if not self.queue:
                self.queue.extend(self._received(wait=wait or self.held))
                heartbeat.sign(Phase.LONG_STEP)
            while self.queue:
                message = self.queue.popleft()
                match message:
                    case messages.Join():
                        self._join(message)
                    case messages.Leave(key):
                        self._leave(key)
                    case messages.Hold(held, forget):
                        self.held = held
                        if forget:
                            self.plan.forget()
                    case _:
                        self.task = message
                        return False
            if not self.held:
                return True

    def _received(self, *, wait: bool) -> list[Message]:
        """Return the messages that have come, the same on all ranks that compute together."""
        received: list[Message] = []
        if self.listens:
            while self.pipe.poll(IDLE if wait and not received else 0):
                received += self.pipe.recv()
        if self.group is None:
            return received
        data = pickle.dumps(received) if received else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        dist.broadcast(size, self.first, group=self.group)
        if not size.item():
            return []
        whole = torch.frombuffer(bytearray(data or bytes(int(size.item()))), dtype=torch.uint8)
        dist.broadcast(whole, self.first, group=self.group)
        return pickle.loads(whole.numpy().tobytes())

    def _join(self, message: messages.Join) -> None:
        if message.home != self.home:
            return
        request = message.request
        key = request_key(request.sampling.seed, message.draws)
        states = [SampleState(request, n, key) for n in range(request.sampling.num_return_sequences)]
        self.open[request.id] = {state.sample: Sample(state, message.stream) for state in states}
        self.plan.waiting.extend(states)

    def _leave(self, key: str) -> None:
        left = self.open.pop(key, {}).values()
        for sample in left:
            self.plan.leave(sample.state)
        if self.tells and left:
            completions = ((sample.state.completion(messages.ABORT), sample) for sample in left)
            self.pipe.send([messages.Ended(each, sample.versions(self.version)) for each, sample in completions])

    def _tell(self, ended: Sequence[Completion]) -> None:
        """Tell all that a pass has drawn at once."""
        events: list[Event] = []
        for completion in ended:
            samples = self.open[completion.request]
            events.append(messages.Ended(completion, samples.pop(completion.sample).versions(self.version)))
            if not samples:
                del self.open[completion.request]
        for key, samples in self.open.items():
            for number, sample in samples.items():
                state, told = sample.state, sample.told
                if sample.stream and len(state.drawn) > told:
                    sample.told = len(state.drawn)
                    new, versions = slice(told, None), sample.versions(self.version)
                    events.append(messages.Drawn(key, number, state.drawn[new], state.log_probabilities[new], versions))
        if events and self.tells:
            self.pipe.send(events)

    def _score(self, key: str, scored: Sequence[sequences.Sequence]) -> None:
        """Rank 0 has the scores, and finds one that is no number."""
        problem, lines = None, []
        try:
            scores = self.forward.window([*scored], self.job.batch_tokens)
            lines = [output.line(one, values, self.columns) for one, values in zip(scored, scores, strict=False)]
        except RunError as error:
            problem = str(error)
        if dist.get_rank() == 0:
            self.pipe.send([messages.Answer(key, self.version, lines, problem)])

    columns = Wanted().columns

    def _load(self, key: str, new: Weights) -> None:
        self.plan.forget()
        if not weights.fits_beside(self.engine.model):
            self.engine.release()
        problem = weights.load(self.engine.model, new)
        self.engine.refit()
        if problem is None:
            for samples in self.open.values():
                for sample in samples.values():
                    sample.drawn = [run for run in sample.versions(self.version) if run[1]]
            self.version = new.version
        if dist.get_rank() == 0:
            self.pipe.send([messages.Answer(key, self.version, problem=problem)])


def _gloo_group(ranks: Sequence[int]) -> Any:
    """Return a group of these ranks for the host's memory; None: there is one rank. Every rank calls it."""
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, [*ranks])
    mine = None
    for members in sorted({tuple(each) for each in all_ranks}):
        group = dist.new_group([*members], backend="gloo") if len(members) > 1 else None
        mine = group if dist.get_rank() in members else mine
    return mine
