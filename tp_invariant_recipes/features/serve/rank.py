# SPDX-License-Identifier: Apache-2.0
"""A rank of `tpi serve`: between passes of the engine, requests join and leave, and weights change."""

import pickle
import signal
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.inference.rank import loaded_for_inference
from tp_invariant_recipes.features.rollouts.engine import Engine
from tp_invariant_recipes.features.rollouts.requests import Completion
from tp_invariant_recipes.features.rollouts.schedule import SampleState
from tp_invariant_recipes.features.score.rank import Forward, Wanted
from tp_invariant_recipes.features.serve import messages
from tp_invariant_recipes.features.serve.messages import Event, Message, Versions, Weights
from tp_invariant_recipes.portable.ieee.draw import request_key
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources import weights as folders
from tp_invariant_recipes.text import abbreviated
from tp_invariant_recipes.training import heartbeat
from tp_invariant_recipes.training.heartbeat import Phase

PART = 32  # tokens without a stream that are told together: their decimals are made while ranks decode
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
    """A sample in the engine. part: new tokens that are told together. told: tokens that the HTTP process has.

    drawn: with weights of before, by version.
    """

    state: SampleState
    part: int
    told: int = 0
    drawn: Versions = ()

    def versions(self, now: str) -> Versions:
        """Return the versions of its tokens; the last ones have those of now."""
        rest = len(self.state.drawn) - sum(count for _, count in self.drawn)
        return (*self.drawn, (now, rest)) if rest or not self.drawn else self.drawn

    def news(self, now: str, reason: str | None = None) -> messages.Drawn:
        """Return the tokens that the HTTP process does not have."""
        state, new, self.told = self.state, slice(self.told, None), len(self.state.drawn)
        tokens, values = state.drawn[new], state.log_probabilities[new]
        return messages.Drawn(state.request.id, state.sample, tokens, values, self.versions(now), reason)


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
        self.open: dict[tuple[str, int], Sample] = {}
        self.held = False
        self.queue: deque[Message] = deque()
        self.task: messages.Task | None = None

    def run(self) -> None:
        """Serve until END comes."""
        if self.tells:
            blocks = self.plan.blocks
            self.pipe.send([messages.Ready(self.home, self.first, blocks.count * blocks.size)])
        while (task := self.task) != messages.END:
            if task is not None:
                answer = self._load(task, task.weights) if task.weights else self._score(task)
                if dist.get_rank() == 0:
                    self.pipe.send([answer])
            self.task = None
            self.engine.serve(self.plan, self.between)

    def between(self, ended: Sequence[Completion], idle: bool) -> bool:
        """Tell what was drawn, and let requests join and leave; False: there is something to do outside of passes."""
        self._tell(ended)
        while True:
            if not self.queue:
                self.queue.extend(self._received(wait=idle or self.held))
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
                    case messages.Task():
                        self.task = message
                        return False
            if not self.held:
                return True

    def _received(self, *, wait: bool) -> list[Message]:
        """Return the messages that have come, the same on all ranks that compute together."""
        received: list[Message] = []
        if dist.get_rank() == self.first:
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
        request, key = message.request, request_key(message.request.sampling.seed, message.draws)
        for n in range(request.sampling.num_return_sequences if message.home == self.home else 0):
            state = SampleState(request, n, key)
            self.open[request.id, n] = Sample(state, 1 if message.stream else PART)
            self.plan.waiting.append(state)

    def _leave(self, key: str) -> None:
        left = [self.open.pop(place) for place in [*self.open] if place[0] == key]
        for sample in left:
            self.plan.leave(sample.state)
        self._send(sample.news(self.version, messages.ABORT) for sample in left)

    def _tell(self, ended: Sequence[Completion]) -> None:
        """Tell all that a pass has drawn at once."""
        last = {(each.request, each.sample): each.finish_reason for each in ended}
        news = ((p, s) for p, s in self.open.items() if p in last or len(s.state.drawn) - s.told >= s.part)
        self._send(sample.news(self.version, last.get(place)) for place, sample in news)
        for place in last:
            del self.open[place]

    def _send(self, events: Iterable[Event]) -> None:
        if self.tells and (several := [*events]):
            self.pipe.send(several)

    def _score(self, task: messages.Task) -> messages.Answer:
        """Rank 0 has the scores, and finds one that is no number."""
        try:
            pairs = zip(task.scored, self.forward.window([*task.scored], self.job.batch_tokens), strict=False)
            lines = [output.line(one, values, Wanted().columns) for one, values in pairs]
        except RunError as error:
            return messages.Answer(task.key, self.version, problem=str(error))
        return messages.Answer(task.key, self.version, lines)

    def _load(self, task: messages.Task, new: Weights) -> messages.Answer:
        self.plan.forget()
        if not _fits_beside(self.engine.model):
            self.engine.release()
        problem = _loaded(self.engine.model, new)
        self.engine.refit()
        if problem is None:
            for sample in self.open.values():
                sample.drawn = tuple(run for run in sample.versions(self.version) if run[1])
            self.version = new.version
        return messages.Answer(task.key, self.version, problem=problem)


def _gloo_group(ranks: Sequence[int]) -> Any:
    """Return a group of these ranks for the host's memory; None: there is one rank. Every rank calls it."""
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, [*ranks])
    mine = None
    for members in sorted({tuple(each) for each in all_ranks}):
        group = dist.new_group([*members], backend="gloo") if len(members) > 1 else None
        mine = group if dist.get_rank() in members else mine
    return mine


def _loaded(model: Any, weights: Weights) -> str | None:
    """Load weights into the memory of a model, unwrapped. Returns why it has its weights of before; None: it does not.

    Every rank calls it. Until all ranks have read the new weights, these lie beside the others.
    """
    tensors, problem = [*model.parameters(), *model.buffers()], None
    before = [tensor.data for tensor in tensors]
    try:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data.clone()
        _read(model, weights)
    except Exception as error:  # of a file, of memory, of Bridge or of Megatron's checkpoints
        problem = reason(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    problem = next((text for text in problems if text is not None), None)
    for tensor, data in zip(tensors, before, strict=True):
        if problem is None:
            data.copy_(tensor.data)
        tensor.data = data
    return problem


def _fits_beside(model: Any) -> bool:
    """Whether the memory of this rank's GPU has room for a second copy of the weights."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return True
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return sum(weight.nbytes for weight in model.parameters()) < unused + torch.cuda.mem_get_info(device)[0]


def _read(model: Any, weights: Weights) -> None:
    from tp_invariant_recipes.training.imported_weights import ImportedWeights
    from tp_invariant_recipes.training.saved_weights import load_weights

    if weights.checkpoint is not None:
        load_weights([model], weights.checkpoint, "")
    else:
        assert weights.folder is not None
        ImportedWeights(weights.folder).load([model])
        if folders.read(weights.folder).digest() != weights.version:
            raise RunError(f"{weights.folder} was written while it was read")
    named = chain(model.named_parameters(), model.named_buffers())
    if wrong := [name for name, tensor in named if tensor.is_floating_point() and not torch.isfinite(tensor).all()]:
        raise RunError(f"not all values are finite of {abbreviated(wrong, 5)}")
