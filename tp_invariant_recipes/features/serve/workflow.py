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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from tp_invariant_recipes import __version__
from tp_invariant_recipes.check import rollouts as check
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError, RunError, reason, refuse
from tp_invariant_recipes.features.inference.model import Model, model_of
from tp_invariant_recipes.features.rollouts.prompts import end_tokens
from tp_invariant_recipes.features.serve.backend import READY, STARTING, Backend
from tp_invariant_recipes.features.serve.bodies import Prompts
from tp_invariant_recipes.features.serve.http import CONNECTIONS, Http, Service
from tp_invariant_recipes.features.serve.messages import Weights
from tp_invariant_recipes.launch import local, train
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.launch.ranks import Outcome, RankFn, Stop, stopping
from tp_invariant_recipes.machine import progress, terminal
from tp_invariant_recipes.portable.ieee.rotary import LARGEST_ANGLE
from tp_invariant_recipes.reading import read_limited
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.text import first_line

MODE = "portable"  # the numerics of a folder
SHORTEST_KEY = 16  # characters of a key
ANY_VALUE = {"seq_length", "initial_weights"}  # of which weights are independent


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


def serve(request: ServeRequest, console: Console) -> bool:
    """Serve until SIGTERM or Ctrl-C. Returns whether all requests were answered. Raises TpiError."""
    key = _key(request.api_key_file) if request.api_key_file else None
    with _listening(request.host, request.port) as listening:
        with progress.busy(console, "reading weights"):
            loaded = _model(request, request.source, request.step)
            first = _weights(loaded)
            where = request.tokenizer or loaded.tokenizer
            codec = sequences.tokenizer(where) if where else None
        run_dir = RunDir((request.logs or Path(tempfile.mkdtemp(prefix="tpi-serve-"))).absolute())
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        config = loaded.config
        plan = Plan(loaded.composed, config, config.layout, run_dir, {}, environment.of_run(config))
        with progress.busy(console, "importing Megatron-Bridge and checking the configuration"):
            train.validate(plan)
        from tp_invariant_recipes.features.serve.rank import Serve  # it imports Megatron, which is there now

        pipes = [Pipe() for _ in range(config.layout.world)]
        vocabulary, folder = config.shape.vocabulary, None if loaded.checkpoint else request.source.expanduser()
        longest = int(min(LARGEST_ANGLE, loaded.longest or LARGEST_ANGLE))
        names = str(request.source), request.source.name, "default"
        prompts = Prompts(codec, vocabulary, end_tokens(folder, codec, vocabulary), longest, names)
        located = partial(_located, request, loaded)
        backend = Backend([mine for mine, _ in pipes], config.layout.dp, first, request.queue, located)
        http = Http(listening, Service(backend, prompts, request.body, key, *_facts(request, loaded, where)))
        theirs = [end for _, end in pipes]
        serves = Serve(config, first, where, request.engine, theirs)
        drained = _until_the_end(http, plan, serves, console, theirs)
    if request.logs is None:
        shutil.rmtree(run_dir.path, ignore_errors=True)
    return drained


def _until_the_end(http: Http, plan: Plan, serves: RankFn, console: Console, theirs: Sequence[Connection]) -> bool:
    """Run ranks and HTTP. Returns whether all requests were answered. Raises RunError: a rank has died.

    theirs: the ends of pipes that ranks have.
    """
    stop, told = Stop(), set[str]()

    def say(text: str) -> None:
        if text not in told:
            told.add(text)
            terminal.print_line(console, text)

    with stopping() as noted:

        def tick() -> None:
            for end in theirs:  # else half a message of a killed rank would hold up all answers
                end.close()
            http.start()  # not before ranks are forked
            if http.backend.state == READY:
                say(f"{http.url}: ready")
            if noted.requests > 1 or (noted.signals and http.backend.state == STARTING):
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
    old, new = ({**of.config.model, **vars(of.config.numerics)} for of in (loaded, other))
    unlike = [key for key in sorted({*old, *new} - ANY_VALUE) if old.get(key) != new.get(key)]
    refuse([f"{source} has {key}={new.get(key)}, and the server {old.get(key)}" for key in unlike])
    return _weights(other)


def _facts(request: ServeRequest, loaded: Model, tokenizer: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `/get_model_info` answers, and what `/get_server_info` adds."""
    config = loaded.config
    model = {
        "model_path": str(request.source), "tokenizer_path": tokenizer, "is_generation": True,
        "preferred_sampling_params": None, "vocab_size": config.shape.vocabulary,
    }  # fmt: skip
    layout = config.layout.as_dict()
    server = {"version": __version__, "identity": loaded.identity, "layout": layout, "max_body_bytes": request.body}
    return model, server


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
