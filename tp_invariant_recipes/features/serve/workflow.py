# SPDX-License-Identifier: Apache-2.0
"""`tpi serve`: ranks that hold a model, and HTTP in a thread beside their launcher."""

import hashlib
import json
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tp_invariant_recipes import __version__
from tp_invariant_recipes.check import rollouts as check
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError, RunError, reason, refuse
from tp_invariant_recipes.features.inference.model import Model, model_of
from tp_invariant_recipes.features.rollouts import prompts
from tp_invariant_recipes.features.serve.backend import READY, STARTING
from tp_invariant_recipes.features.serve.bodies import Prompts
from tp_invariant_recipes.features.serve.messages import Weights
from tp_invariant_recipes.launch import local, train
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.launch.ranks import Outcome, RankFn, Stop, stopping
from tp_invariant_recipes.machine import progress, terminal
from tp_invariant_recipes.portable.ieee.rotary import LARGEST_ANGLE
from tp_invariant_recipes.reading import read_limited
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.text import first_line

if TYPE_CHECKING:
    from tp_invariant_recipes.features.serve.http import Http

MODE = "portable"  # the numerics of a folder
CONNECTIONS = 4096  # that may wait to be taken
SHORTEST_KEY = 16  # characters of a key


@dataclass(frozen=True)
class ServeRequest:
    """What to serve, and where.

    source: a run directory or a Hugging Face folder. overrides: as typed. step, tokenizer: None: the newest, the
    folder's. logs: None: a folder that is removed at the end. queue: completions that may be open. body: bytes.
    engine: keywords of `Engine`, which change no bit.
    """

    source: Path
    overrides: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 30000
    step: int | None = None
    tokenizer: str | None = None
    api_key_file: Path | None = None
    logs: Path | None = None
    queue: int = 8192
    body: int = 1 << 26
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServeResult(Result):
    """How a server ended. drained: all requests were answered."""

    drained: bool

    @property
    def exit_status(self) -> int:
        """0: after all answers; 130: without them."""
        return 0 if self.drained else 130

    def lines(self) -> list[str]:
        """Return nothing: it was told before."""
        return []

    def as_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        return {"drained": self.drained}


def serve(request: ServeRequest, console: Console) -> ServeResult:
    """Serve until SIGTERM or Ctrl-C. Raises a TpiError: a mistake; or a rank has died."""
    key = _key(request.api_key_file) if request.api_key_file else None
    with _listening(request.host, request.port) as listening:
        with progress.busy(console, "reading weights"):
            loaded = _model(request, request.source, request.step)
            first = _weights(loaded)
            where = request.tokenizer or loaded.tokenizer
            codec = sequences.tokenizer(where) if where else None
        logs = (request.logs or Path(tempfile.mkdtemp(prefix="tpi-serve-"))).absolute()
        config, run_dir = loaded.config, RunDir(logs)
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        plan = Plan(loaded.composed, config, config.layout, run_dir, {}, environment.of_run(config))
        with progress.busy(console, "importing Megatron-Bridge and checking the configuration"):
            train.validate(plan)
        from tp_invariant_recipes.features.serve.http import Http
        from tp_invariant_recipes.features.serve.rank import Serve  # it imports Megatron, which is there now

        pipes = [Pipe() for _ in range(config.layout.world)]
        vocabulary, folder = config.shape.vocabulary, None if loaded.checkpoint else request.source.expanduser()
        ends = prompts.end_tokens(folder, codec, vocabulary)
        longest = int(min(LARGEST_ANGLE, loaded.longest or LARGEST_ANGLE))
        source = str(request.source)
        http = Http(
            listening, [mine for mine, _ in pipes], config.layout.dp, first, partial(_located, request, loaded),
            Prompts(codec, vocabulary, ends, longest, (source, request.source.name, "default")), request, key,
            _facts(request, loaded, where),
        )  # fmt: skip
        serves = Serve(config, first, where, request.engine, [theirs for _, theirs in pipes])
        drained = _until_the_end(http, plan, serves, console)
    if request.logs is None:
        shutil.rmtree(logs, ignore_errors=True)
    return ServeResult(drained)


def _until_the_end(http: "Http", plan: Plan, serves: RankFn, console: Console) -> bool:
    """Run ranks and HTTP. Returns whether all requests were answered. Raises RunError: a rank has died."""
    stop, told = Stop(), set[str]()

    def say(text: str) -> None:
        if text not in told:
            told.add(text)
            terminal.print_line(console, text)

    with stopping() as noted:

        def tick() -> None:
            http.start()  # not before ranks are forked
            if http.state == READY:
                say(f"{http.url}: ready")
            if noted.requests > 1 or (noted.signals and http.state == STARTING):
                stop.requests = 2
            elif noted.signals:
                http.drain()
                say("the server ends when its open requests have ended; a second signal ends it now")

        reason = "the server was stopped"
        try:
            return local.run(plan, tick, rank_fn=serves, stop=stop) is Outcome.COMPLETED
        except RunError as error:
            reason = f"the server ends: {first_line(str(error))}"
            raise
        finally:
            http.end(reason)


def _model(request: ServeRequest, source: Path, step: int | None) -> Model:
    return model_of(source, parse_all(request.overrides), step, "tpi serve", check.problems, (), MODE)


def _weights(loaded: Model) -> Weights:
    """Return where weights are. Their version: the digest of a folder's tensors, or of a checkpoint's files."""
    of_weights = loaded.identity["weights"]
    version = of_weights.get("digest") or hashlib.sha256(json.dumps(of_weights).encode()).hexdigest()
    folder = None if loaded.checkpoint else Path(str(loaded.config.weights.folder))
    return Weights(folder, loaded.checkpoint, version)


def _located(request: ServeRequest, loaded: Model, source: str, step: int | None) -> Weights:
    """Return other weights of the model that is served. Raises ConfigError: they are of another."""
    other = _model(request, Path(source), step)
    before, after = loaded.config, other.config
    sections = (("model", before.model, after.model), ("numerics", vars(before.numerics), vars(after.numerics)))
    refuse(
        [
            f"{source} has {name}.{field}={new.get(field)}, and the server {old.get(field)}"
            for name, old, new in sections
            for field in sorted({*old, *new} - ANY_VALUE)
            if old.get(field) != new.get(field)
        ]
    )
    return _weights(other)


ANY_VALUE = {"seq_length", "initial_weights"}  # of which weights are independent


def _facts(request: ServeRequest, loaded: Model, tokenizer: str | None) -> dict[str, Any]:
    config = loaded.config
    model = {
        "model_path": str(request.source), "tokenizer_path": tokenizer, "is_generation": True,
        "preferred_sampling_params": None, "vocab_size": config.shape.vocabulary,
    }  # fmt: skip
    server = {"version": __version__, "identity": loaded.identity, "layout": config.layout.as_dict()}
    return {"model": model, "server": server | {"max_body_bytes": request.body}}


def _key(file: Path) -> str:
    try:
        key = read_limited(file.expanduser(), 4096).decode().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {file}: {reason(error)}") from error
    if not key.isascii() or not key.isprintable() or len(key) < SHORTEST_KEY or " " in key:
        raise ConfigError(f"--api-key-file {file}: must hold one key of at least {SHORTEST_KEY} printable characters")
    return key


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {reason(error)}; --host and --port name others") from error
