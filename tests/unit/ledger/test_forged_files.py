# SPDX-License-Identifier: Apache-2.0
"""Files that come from elsewhere, forged in every place: reading them succeeds or raises one TpiError, nothing else.

The table of mutations is the same for every kind of file, and every value of a file is forged in turn.
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests.unit.ledger.test_certificate import sealed_archive
from tests.unit.ledger.test_ledger_digests import HEADER, RECORD
from tp_invariant_recipes.comparison.compare import Verdict, compare
from tp_invariant_recipes.comparison.result import CompareResult
from tp_invariant_recipes.comparison.text import remarks, verdict_line
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.data.examples import read_examples
from tp_invariant_recipes.errors import LedgerError, RunError, TpiError
from tp_invariant_recipes.features.bisect import recompute
from tp_invariant_recipes.features.guard import evidence as evidence_judge
from tp_invariant_recipes.features.rollouts import prompts
from tp_invariant_recipes.features.rollouts import prompts as rollout_lines
from tp_invariant_recipes.features.rollouts import requests as rollout_requests
from tp_invariant_recipes.features.rollouts.requests import Sampling
from tp_invariant_recipes.features.score import against as score_against
from tp_invariant_recipes.features.verify.verdict import judge
from tp_invariant_recipes.jobs import registry, states
from tp_invariant_recipes.launch import ranks
from tp_invariant_recipes.ledger import certificate, dumps, evidence, stream
from tp_invariant_recipes.ledger.dumps import RANKS, Dumped, distance, file_of, read_step
from tp_invariant_recipes.ledger.evidence import Evidence, Suspect
from tp_invariant_recipes.ledger.lines import encode_header, encode_step
from tp_invariant_recipes.ledger.open import streamed
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.ledger.stream import parse
from tp_invariant_recipes.multinode import rendezvous
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.reading import parse_json
from tp_invariant_recipes.report import runs as report_runs
from tp_invariant_recipes.runs import checkpoints, restarts
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.runs.sweep_dir import Axis, Configuration, Sweep, SweepDir
from tp_invariant_recipes.sources import weights

DEEP = "DEEP"  # replaced in the text, since Python's own encoder refuses it
# What each value becomes in turn; the text of a forged file is that of json.dumps, lone surrogates and NaN included.
MUTATIONS: dict[str, Any] = {
    "null": None, "true": True, "a list": [], "a list of lists": [[["x"]]], "an object": {},
    "an object of lists": {"x": [1]}, "text": "x", "no text": "", "half a character": "\ud800",
    "a terminal's escape": "\x1b[31m", "long digits": "9" * 5000, "an unknown user": "~nobody-here/x",
    "a zero byte": "a\0b", "a superscript": "layers.²", "zero": 0, "negative": -1, "a fraction": 0.5,
    "huge": 10**300, "endless": float("inf"), "no number": float("nan"), "deep": DEEP,
}  # fmt: skip


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside a value; of a list, those of its first two."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def forged(value: Any) -> Iterator[tuple[str, bytes]]:
    """What was done, and the text: every value mutated or left out, every key renamed, and the text cut in places."""
    whole = as_json(value)
    for path in places(value):
        for name, mutation in MUTATIONS.items():
            yield (
                f"{path} is {name}",
                as_json(changed_at(value, path, lambda inner, key, to=mutation: inner.__setitem__(key, to))),
            )
        yield f"{path} is missing", as_json(changed_at(value, path, lambda inner, key: inner.pop(key)))
        if isinstance(path[-1], str):
            yield f"{path} is renamed", as_json(changed_at(value, path, rename))
            yield (
                f"{path} is there twice",
                whole.replace(f'"{path[-1]}":'.encode(), f'"{path[-1]}": 1, "{path[-1]}":'.encode(), 1),
            )
    for at in range(0, len(whole), max(1, len(whole) // 12)):
        yield f"cut after {at} bytes", whole[:at]
        yield f"another byte at {at}", whole[:at] + b"\xff" + whole[at + 1 :]
    for name, mutation in MUTATIONS.items():
        yield f"all of it is {name}", as_json(mutation)


def changed_at(value: Any, path: tuple, change: Callable[[Any, Any], Any]) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return value


def rename(inner: dict, key: str) -> None:
    inner["\udfff"] = inner.pop(key)


def as_json(value: Any) -> bytes:
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 5_000 + "]" * 5_000, 1).encode()


NOTES = {"resumed": [{"after_step": 1, "changed": {"layout.tp": 2}}]}
FULL = Header(
    identity={"rng.seed": 1, "data.split": [1, 2]},
    layout={"tp": 2, "sp": True},
    numerics={"mode": "tree"},
    versions={"torch": "2"},
    device={"name": "cpu"},
    notes=NOTES,
    parameters=HEADER.parameters,
    initial=HEADER.initial,
)
HEAD, STEP = encode_header(FULL), encode_step(RECORD, FULL)
LEDGER = parse(Path("a/ledger.jsonl"), HEAD + STEP)
RUN = {
    "model": "qwen3_toy", "overrides": ["tp=2"], "device": "cpu", "layout": {"tp": 2}, "identity": {"rng.seed": 1},
    "identity_hash": FULL.identity_hash,
    "attempts": [{"from_step": 0, "to_step": 1, "job": {"id": "12"}, "outcome": "completed", "why": None}],
}  # fmt: skip
CELLS = [
    Configuration(name, name, (name,), 2, 1, FULL.identity_hash, {"tp": 2, "sp": True}, {"mode": "tree"})
    for name in ("tp1", "tp2")
]
MATRIX = Sweep("qwen3_toy", ("tp=1,2",), (Axis("tp", ("1", "2")),), tuple(CELLS), None)


def use(ledger) -> None:
    """All that a command does with a ledger. One that records another thing is never identical to the sound one."""
    for pair in ((ledger, LEDGER), (LEDGER, ledger), (ledger, ledger)):
        comparison = compare(*pair)
        verdict_line(comparison), remarks(comparison), CompareResult((comparison,)).to_json().encode()
        if LEDGER in pair and comparison.verdict is Verdict.IDENTICAL:
            assert _recorded(ledger) == _recorded(LEDGER)


def _recorded(ledger) -> tuple:
    """What runs with equal bits have in common; a run chooses the steps that it traces."""
    header = ledger.header
    steps = [replace(step, trace=None) for step in ledger.steps]
    return header.identity, header.initial, {*header.parameters}, steps


def rehashed(data: bytes) -> bytes:
    """A header with the hash of whatever its identity is now: what a forger can make."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        raw = json.loads(data)
        identity = json.dumps(raw["identity"], sort_keys=True, separators=(",", ":"))
        raw["identity_hash"] = hashlib.sha256(identity.encode()).hexdigest()
        return json.dumps(raw).encode()
    return data


def header(folder: Path, data: bytes) -> None:
    for line in (data, rehashed(data)):
        with suppress(TpiError):
            use(parse(folder / "ledger.jsonl", line + b"\n" + STEP))


def step(folder: Path, data: bytes) -> None:
    use(parse(folder / "ledger.jsonl", HEAD + data + b"\n"))


def run_json(folder: Path, data: bytes) -> None:
    run = RunDir(folder)
    run.run.write_bytes(data)
    registry.attempts(run)
    for attempt in restarts.read_restarts(run):
        str(attempt.outcome), attempt.job and attempt.job.id


def matrix_json(folder: Path, data: bytes) -> None:
    where = SweepDir(folder)
    where.matrix.write_bytes(data)
    try:
        matrix = where.read_matrix()
    except RunError:
        return
    assert all((folder / cell.name).resolve().parent == folder.resolve() for cell in matrix.cells)
    str(judge(folder).line).encode()


def verify_json(folder: Path, data: bytes) -> None:
    SweepDir(folder).result.write_bytes(data)
    part = registry.JobPart("12", None, registry.JUDGE, RunDir(folder), folder)
    states._state(part, None, {})


def submission_json(folder: Path, data: bytes) -> None:
    RunDir(folder).submission.write_bytes(data)
    for part in registry._read(folder, []).parts:
        assert part.run.path.resolve().is_relative_to(folder.resolve())
        part.id.encode(), part.name.encode()


def progress_jsonl(folder: Path, data: bytes) -> None:
    file = folder / "progress.jsonl"
    file.write_bytes(data + b"\n")
    timings, _ = report_runs._timings(file)
    assert all(isinstance(timing.seconds, int | float) for timing in timings)
    states._last_step(file)


def manifest(folder: Path, data: bytes) -> None:
    (folder / checkpoints.MANIFEST).write_bytes(data)
    checkpoints.RunCheckpoint(folder, 1).verify()


REASON = {"rank": 0, "time": 1.5, "kind": "ValueError", "message": "planted", "user_error": False, "errno": None}


def reason(folder: Path, data: bytes) -> None:
    """A forged reason is none: then the log is shown."""
    run_dir = RunDir(folder)
    run_dir.logs.mkdir(exist_ok=True)
    for rank in (0, 1):
        run_dir.failure(rank).write_bytes(data)
    error = ranks._failure(run_dir, {0: 1, 1: 1})
    assert error.failure.cause < 2**63
    str(error).encode()


PART = {"name": "weights/w", "dtype": "float32", "shape": [2, 3], "row": 0, "step": 1, "column": 0}


def dumped(folder: Path, data: bytes) -> None:
    """The description of a piece, and the number of ranks, in a file that is sound otherwise."""
    described = data.decode(errors="replace")
    for metadata in ({"0": described, RANKS: "1"}, {"0": json.dumps(PART), RANKS: described}):
        file = file_of(folder, 1, 0)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(save({"0": np.zeros((2, 3), "u4")}, metadata=metadata))
        with suppress(LedgerError):
            dumps = read_step(folder, 1)
            for name in dumps.names:
                whole = dumps.read(name)
                assert distance(whole, whole).total == 6


DIGEST = "0" * 64
STAND = {"rank": 1, "count": 9, "place": "in step 4", "late": "has not ended step 4", "seconds": 1.5}
STAND |= {"standing": "busy", "at": ["there"], "node": "n1"}
MESSAGES: dict[str, Any] = {
    "orders": {"start": 0, "agreed": {"identity": {"a": 1}, "environment": {"A": "1"}, "versions": {}}},
    "arrived/1": {"name": "n1", "problems": ["p"], "reached": "10.0.0.1"},
    "next": 1,
    "ended/1": {
        "why": "w", "cause": 1.5, "user_error": False, "hardware": False, "rank_states": [STAND], "node": "n1",
    },
    "failing": True,
    "over": {"outcome": "completed", "requeued": False, "why": None},
    "alive/1": 1,
}  # fmt: skip


def message_of(key: str) -> Callable[[Path, bytes], None]:
    def read(folder: Path, data: bytes) -> None:
        value = rendezvous.parse(key, data)
        if key.startswith("ended"):
            assert value is True or not value.rank_states or str(ranks.hanging(value.rank_states, RunDir(folder)))

    return read


MANIFEST = {"schema": 1, "step": 1, "identity_hash": "x", "layout": {}, "optimizer_state": "x", "experts_apart": False}
MANIFEST |= {"files": {"a": {"bytes": 1, "xxh3_128": "x"}}}

ROWS = {
    "tpi score": {"id": "s", "token_ids": [3, 4], "logprobs": [-1.5, -2.5]},
    "vLLM": {
        "request_id": "s",
        "prompt_token_ids": [3],
        "prompt_logprobs": [None],
        "outputs": [{"token_ids": [4], "logprobs": [{"4": {"logprob": -2.5, "rank": 1}}]}],
    },
    "SGLang": {"id": "s", "meta_info": {"output_token_logprobs": [[-1.5, 3, "a"], [-2.5, 4, "b"]]}},
    "verl": {
        "id": "s", "responses": [3, 4, 0], "response_mask": [0, 1, 0], "attention_mask": [1, 1, 1, 0],
        "rollout_log_probs": [-1.5, -2.5, 0.0],
    },
    "NeMo-RL": {
        "id": "s", "input_ids": [3, 4, 0], "input_lengths": 2, "token_mask": [0, 1, 0],
        "generation_logprobs": [0.0, -2.5, 0.0],
    },
    "tpi generate": {"id": "s", "token_ids": [3, 4], "logprobs": [-1.5, -2.5], "digests": ["0a", "0b"]},
    "NeMo-RL's messages": {"id": "s", "message_log": [{"token_ids": [3, 4], "generation_logprobs": [-1.5, -2.5]}]},
}  # fmt: skip
SCORED = {"id": "s", "first": 1, "token_ids": [3, 4], "logprobs": [-1.5, -2.5], "bits": ["", ""], "sum": -4.0}
SCORED |= {"digests": ["0a", "0b"]}


def engine_row(folder: Path, data: bytes) -> None:
    """What an engine returned, beside the scores."""
    scores, file = folder / "scores.jsonl", folder / "engine.jsonl"
    scores.write_text(json.dumps(SCORED) + "\n")
    file.write_bytes(data + b"\n")
    json.dumps(score_against.compare(scores, file, 0.0, str).as_json(), allow_nan=False).encode()


def sequence(folder: Path, data: bytes) -> None:
    (folder / "s.jsonl").write_bytes(data + b"\n")
    sequences.survey(folder / "s.jsonl", 300, sequences.tokenizer("byte"))
    for sequence in sequences.sequences(folder / "s.jsonl", 300, sequences.tokenizer("byte")):
        json.dumps([sequence.id, sequence.tokens, sequence.first])


def request(folder: Path, data: bytes) -> None:
    """A line of `tpi generate`'s input."""
    (folder / "p.jsonl").write_bytes(data + b"\n")
    read = prompts.read(folder / "p.jsonl", sequences.tokenizer("byte"), Sampling(do_sample=True))
    rollout_requests.check(read, 300, 100, text=True)
    prompts.digest(read)


def completion(folder: Path, data: bytes) -> None:
    """A line of `tpi generate`'s output: in OUT.partial, and as a sequence."""
    (folder / "part-0.jsonl").write_bytes(data + b"\n")
    rollout_lines.places(folder)
    sequence(folder, data)


COMPLETED = {"id": "a[0]", "request": "a", "sample": 0, "prompt_token_ids": [5], "token_ids": [3, 4]}


def example(folder: Path, data: bytes) -> None:
    (folder / "training.jsonl").write_bytes(data + b"\n")
    read_examples(folder, ["training.jsonl"], None, ("input",), chat=False)


EVIDENCE = Evidence(
    detector=evidence.PRODUCT, step=1, where="w", suspects=(Suspect(0, "n", "a CPU"),), judge=None, outputs=1, of_=6,
    bits=1, trusted=0, numerics="tree", machine={"threads": "1"},
    details={"kind": "library", "segments": [2, 2], "shards": 2},
)  # fmt: skip
GROUP = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
UPDATED = replace(EVIDENCE, detector=evidence.OPTIMIZER, details={"group": GROUP, "updates": 1.0})


def evidence_of(tensors: dict[str, list[int]]) -> Callable[[Path, bytes], None]:
    def read(folder: Path, data: bytes) -> None:
        """Forged metadata of tensors that are sound."""
        held = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
        (folder / "x.evidence").write_bytes(save(held, {"evidence": data.decode(errors="replace")}))
        str(evidence_judge.judge(folder / "x.evidence")).encode()

    return read


OF_PRODUCT = {"a": [2, 4], "b": [4, 3], "out": [1, 2, 3]}
OF_UPDATE = {f"{at}.{name}": [8] for at in ("before", "after") for name in ("p", "exp_avg", "exp_avg_sq")}
OF_UPDATE |= {"before.g": [8]}

# Kinds whose reader here passes over what is forged.
TOLERANT = ("ledger's header", "verify.json", "progress.jsonl", "matrix.json", "rank-N.error.json", "dump's metadata")

# Kind of file -> what reads it, and a valid one.
KINDS: dict[str, tuple[Callable[[Path, bytes], None], Any]] = {
    "ledger's header": (header, json.loads(HEAD)),
    "ledger's step": (step, json.loads(STEP)),
    "run.json": (run_json, RUN),
    "matrix.json": (matrix_json, None),
    "verify.json": (verify_json, {"verdict": "identical", "exit_status": 0, "text": "identical"}),
    "submission.json": (submission_json, {"schema": 1, "jobs": [{"id": "1", "role": "cells"}], "cells": ["a", "b"]}),
    "progress.jsonl": (progress_jsonl, {"step": 1, "loss": 1.5, "seconds": 0.5, "tokens": 8, "peak_memory": 0}),
    "rank-N.error.json": (reason, REASON),
    "dump's metadata": (dumped, PART),
    **{f"rendezvous {key}": (message_of(key), value) for key, value in MESSAGES.items()},
    "manifest": (manifest, MANIFEST),
    **{f"row of {program}": (engine_row, row) for program, row in ROWS.items()},
    "sequence": (sequence, {"id": "s", "tokens": [0, 3, 4], "attention_mask": [0, 1, 1], "prompt_length": 1}),
    "packed sequences": (sequence, {"tokens": [3, 4, 5, 6], "cu_seqlens": [0, 2, 4]}),
    "prompt and response": (sequence, {"prompt": "a", "response": [3, 4]}),
    "rollout": (sequence, COMPLETED),
    "request": (request, {"id": "s", "prompt": "ab", "n": 2, "top_p": 0.5, "eos_token_id": [3], "stop": ["x"]}),
    "completion": (completion, COMPLETED | {"digests": ["00", "01"]}),
    "example": (example, {"input": "a"}),
    "evidence of a product": (evidence_of(OF_PRODUCT), EVIDENCE.as_json()),
    "evidence of an update": (evidence_of(OF_UPDATE), UPDATED.as_json()),
}


def valid(kind: str, folder: Path) -> Any:
    if kind != "matrix.json":
        return KINDS[kind][1]
    SweepDir(folder).write_matrix(MATRIX)
    return json.loads(SweepDir(folder).matrix.read_bytes())


def refused_with(read: Callable[[Path, bytes], None], folder: Path, data: bytes, what: str) -> str | None:
    """The message of the TpiError with which a file is refused. None: it was read."""
    try:
        read(folder, data)
    except TpiError as error:
        return str(error)
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}")
    return None


@pytest.mark.parametrize("every", (7, pytest.param(1, marks=pytest.mark.release)), ids=("a seventh", "all"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_forged_file_is_read_or_refused_with_one_message(kind, every, tmp_path):
    read, _ = KINDS[kind]
    whole = valid(kind, tmp_path)
    if kind != "manifest":  # its files are not there
        read(tmp_path, as_json(whole))
    refused = tried = 0
    for what, data in itertools.islice(forged(whole), 0, None, every):
        tried += 1
        message = refused_with(read, tmp_path, data, f"{kind}: {what}")
        refused += message is not None
        assert kind in ("manifest", "request") or message is None or len(message.splitlines()) == 1, (what, message)
    assert every * tried > (60 if isinstance(whole, dict) else 20)
    assert refused or kind in TOLERANT


@pytest.mark.parametrize(
    "change",
    (
        {"details": EVIDENCE.details | {"shards": 2**62}}, {"details": EVIDENCE.details | {"shards": True}},
        {"details": EVIDENCE.details | {"segments": [4, 0]}},
        {"details": EVIDENCE.details | {"segments": [2**61, -(2**61), 4]}}, {"machine": {"threads": "many"}},
        {"machine": {"threads": "9" * 30}}, {"machine": {"threads": "0"}},
    ),
)  # fmt: skip
def test_evidence_of_no_product_is_refused_at_once(change, tmp_path):
    message = refused_with(evidence_of(OF_PRODUCT), tmp_path, as_json(EVIDENCE.as_json() | change), str(change))
    assert message is not None


def test_the_sound_evidence_is_judged_and_what_holds_nothing_to_compute_is_not(tmp_path):
    evidence_of(OF_PRODUCT)(tmp_path, as_json(EVIDENCE.as_json()))
    assert evidence_judge.judge(tmp_path / "x.evidence").exit_status == 1  # 4, and not 1
    evidence_of(OF_PRODUCT)(tmp_path, as_json(replace(EVIDENCE, detector=evidence.REPLICAS).as_json()))
    result = evidence_judge.judge(tmp_path / "x.evidence")
    assert result.exit_status == 2
    assert "not comparable: nothing was computed again" in str(result)


@pytest.mark.parametrize("shape", ((), (4,), (2, 4), (0, 1, 4), (2, 1, 3)))
def test_dumps_of_no_linear_layer_are_refused(shape):
    names = recompute.names_of("decoder.layers.0.mlp.linear_fc2")
    shapes = dict(zip((*names.operands, names.weight), (shape, (2, 1, 3), (3, 4)), strict=True))
    results = {
        name: Dumped("bfloat16", size, np.zeros((1, int(np.prod(size))), np.uint16)) for name, size in shapes.items()
    }
    with pytest.raises(LedgerError, match="the dumps are not of a linear layer: forward/"):
        recompute._computed(results, names, "row", 1, NumericsSettings(), None)


@pytest.mark.parametrize(
    "change, words",
    (
        ({"name": "tp1"}, "cells.0 and cells.1 have one name"),
        ({"label": "tp1"}, "cells.0 and cells.1 have one label"),
        ({"overrides": ["tp1"]}, "cells.0 and cells.1 have one set of overrides"),
        ({"name": "link"}, "cells.0 and cells.1 have one run directory"), ({"name": "../tp1"}, "cells.1.name: "),
        ({"name": "."}, "cells.1.name: "), ({"ranks": "2"}, "cells.1.ranks: "),
    ),
)  # fmt: skip
def test_a_matrix_that_compares_a_run_with_itself_is_refused(change, words, tmp_path):
    (tmp_path / "tp1").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "tp1")
    SweepDir(tmp_path).write_matrix(MATRIX)
    assert SweepDir(tmp_path).read_matrix() == MATRIX
    raw = json.loads(SweepDir(tmp_path).matrix.read_bytes())
    raw["cells"][1] |= change
    SweepDir(tmp_path).matrix.write_text(json.dumps(raw))
    with pytest.raises(RunError, match=r"is not a directory of tpi verify: matrix\.json: ") as caught:
        judge(tmp_path)
    assert words in str(caught.value)


CONFIG = b"train: {train_iters: 1}\n"
MEMBERS = {"ledger.jsonl": HEAD + STEP, "config.yaml": CONFIG, "run.json": as_json(RUN), "versions.json": b"{}"}
MEMBERS |= {"environment.json": b"{}"}
CONFIGS = (
    b"[" * 1_500, b"train: {train_iters: '1'}", b"train: [1]", b"&a [*a]", b"train: &a {train_iters: 1, x: *a}",
    b"".join(b"a%d: &a%d [%s]\n" % (n, n, b"*a%d," % (n - 1) * 9 if n else b"1") for n in range(12)),
    b"train: {train_iters: 1, x: 2001-99-99}", b'train: {train_iters: 1, x: "\\ud800"}', b"? [1]\n: 2", b"\xff\xfe",
    b"!!python/object:os.system x", b"train: {train_iters: %s}" % (b"9" * 5000), b"",
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=[repr(config[:24]) for config in CONFIGS])
def test_a_certificate_with_a_forged_configuration_is_refused(config):
    members = MEMBERS | {"config.yaml": config}
    manifest = certificate._manifest(members, {})
    with pytest.raises(LedgerError) as caught:
        certificate.open_certificate(Path("a.tpicert"), sealed_archive({certificate.MANIFEST: manifest} | members))
    assert str(caught.value).startswith("a.tpicert: not the files of a run: config.yaml: ")


@pytest.mark.parametrize("name", ("ledger.jsonl", pytest.param("run.json", marks=pytest.mark.release)))
def test_a_certificate_that_would_swell_is_refused_before_it_is_decompressed(name, monkeypatch):
    members = {certificate.MANIFEST: b"{}"} | MEMBERS | {name: b" " * (65 << 20)}
    data = sealed_archive(members)
    assert len(data) < 1 << 20
    monkeypatch.setattr(certificate, "_content", lambda *_: pytest.fail("decompressed"))
    with pytest.raises(LedgerError, match=f"{name} claims 68157440 bytes, too many"):
        certificate.open_certificate(Path("a.tpicert"), data)


LONG = b"[" + b"{}," * 1_000_000 + b"{}]"


def test_what_would_take_much_memory_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    """A line of 100 MB took 2.6 GiB, and a header of 2 million tensors 1.2 GiB."""
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(ValueError, match="more than 1000000 values"):
        parse_json(LONG)
    monkeypatch.undo()
    assert len(parse_json(b"[" + b"0," * 999_998 + b"0]")) == 999_999  # the control
    problems: list[str] = []
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(LONG).to_bytes(8, "little") + LONG)
    assert weights._header(file, problems) == {}
    [problem] = problems
    assert problem.startswith("x.safetensors: it is damaged, truncated or no safetensors file")
    monkeypatch.setattr(dumps, "LARGEST_HEADER", 1 << 20)
    file = file_of(tmp_path, 1, 0)
    file.parent.mkdir(parents=True)
    file.write_bytes(len(LONG).to_bytes(8, "little") + LONG)
    with pytest.raises(LedgerError, match="its header is larger than a dump's"):
        read_step(tmp_path, 1)


def test_a_line_of_a_ledger_has_a_longest_length(tmp_path, monkeypatch):
    file, longest = tmp_path / "ledger.jsonl", max(len(HEAD), len(STEP))
    file.write_bytes(HEAD + STEP)
    monkeypatch.setattr(stream, "LONGEST_LINE", longest)
    assert len(streamed(file).steps) == stream.last_step(file).step == 1  # the control
    monkeypatch.setattr(stream, "LONGEST_LINE", longest - 1)
    number = 1 if len(HEAD) >= len(STEP) else 2
    with pytest.raises(LedgerError, match=rf"ledger\.jsonl line {number}: more than {longest - 1} bytes"):
        streamed(file)
    monkeypatch.setattr(stream, "LONGEST_LINE", 10)
    monkeypatch.setattr(stream, "_BLOCK", 4)
    with pytest.raises(ValueError, match="a line of more than 10 bytes"):
        stream.last_step(file)
