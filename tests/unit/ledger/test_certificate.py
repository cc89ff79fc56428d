# SPDX-License-Identifier: Apache-2.0
"""Certificates: whole or refused, the same bytes for the same run, and read as a ledger wherever one is."""

import hashlib
import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.ledgers import record
from tp_invariant_recipes.comparison.compare import Verdict, compare
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger import certificate
from tp_invariant_recipes.ledger.certificate import MANIFEST, MEMBERS, certify, check, open_certificate
from tp_invariant_recipes.ledger.digests import Parameter
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord

PARAMETERS = (Parameter("embedding.word_embeddings.weight", (8, 4), "float32", "bfloat16"),)
HEADER = Header(
    identity={"model.num_layers": 2, "rng.seed": 1234},
    layout={"tp": 2, "pp": 1, "sp": True},
    numerics={"mode": "tree"},
    device={"name": "NVIDIA H200"},
    parameters=PARAMETERS,
)


def digested_step(step: int, **changes) -> StepRecord:
    digests = {PARAMETERS[0].name: f"{step:032x}"}
    return record(step, **{"gradients": digests, "weights": digests, **changes})


def run_directory(folder: Path, steps: int = 3, planned: int = 3, header: Header = HEADER) -> Path:
    """A run directory with all that is certified, and something that is not."""
    folder.mkdir(parents=True)
    with LedgerWriter(folder).create(header) as writer:
        for step in range(1, steps + 1):
            writer.append(digested_step(step))
    (folder / "config.yaml").write_text(yaml.safe_dump({"train": {"train_iters": planned}}))
    run = {"model": "qwen3_toy", "identity_hash": header.identity_hash, "attempts": [{"host": "node"}]}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "versions.json").write_text('{"torch": "2.11.0"}\n')
    (folder / "environment.json").write_text('{"OMP_NUM_THREADS": "1"}\n')
    (folder / "logs").mkdir()
    return folder


@pytest.fixture
def run_to_certify(tmp_path):
    return run_directory(tmp_path / "run")


@pytest.fixture(scope="module")
def certificate_bytes(tmp_path_factory) -> bytes:
    return certify(run_directory(tmp_path_factory.mktemp("certificate") / "run"))


def sealed_archive(members: dict[str, bytes] | list[tuple[str, bytes]]) -> bytes:
    """An archive of these members with a right seal: what a forger can make."""
    pairs = list(members.items()) if isinstance(members, dict) else members
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in pairs:
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        archive.comment = bytes(certificate._SEAL_SIZE)
    return certificate._sealed(stream.getvalue())


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def why_not_opened(data: bytes) -> str:
    with pytest.raises(LedgerError) as error:
        open_certificate(Path("a.tpicert"), data)
    assert str(error.value).startswith("a.tpicert")
    return str(error.value)


def test_the_same_run_gives_the_same_bytes(run_to_certify, tmp_path):
    first = certify(run_to_certify)
    copied = tmp_path / "copy"
    shutil.copytree(run_to_certify, copied)
    assert certify(copied) == first
    assert list(members(first)) == [MANIFEST, *MEMBERS]
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert all(members(first)[name] == (run_to_certify / name).read_bytes() for name in MEMBERS)


def test_it_says_what_it_is_of(run_to_certify):
    result = open_certificate(Path("a.tpicert"), certify(run_to_certify))
    manifest = members(certify(run_to_certify))[MANIFEST]
    assert result.hash == hashlib.sha256(manifest).hexdigest()
    assert manifest == json.dumps(json.loads(manifest), sort_keys=True, separators=(",", ":")).encode()
    assert result.summary == {
        "model": "qwen3_toy", "layout": {"tp": 2, "pp": 1, "sp": True}, "numerics": {"mode": "tree"},
        "device": {"name": "NVIDIA H200"}, "identity_hash": HEADER.identity_hash, "steps": 3, "of": 3,
        "loss": "f32:40c80000", "parameters": 1, "digests": {"gradients": 3, "weights": 3},
    }  # fmt: skip
    words = certificate.summary_words(result.summary)
    assert words == "qwen3_toy tp=2, numerics=tree, NVIDIA H200, 3 of 3 steps, gradients of 3 steps, weights of 3 steps"


def test_words_are_safe_to_print():
    summary = {"model": "a\x1b[2Jb\n", "layout": {}, "numerics": {}, "device": {"name": "\x9bc"}, "steps": 1, "of": 1}
    words = certificate.summary_words(summary)
    assert words.isprintable()
    assert words.startswith("a?[2Jb?, numerics=unknown")


def test_every_changed_byte_is_seen(certificate_bytes):
    for place in range(len(certificate_bytes)):
        for bit in (0, 7):
            changed = bytearray(certificate_bytes)
            changed[place] ^= 1 << bit
            with pytest.raises(LedgerError):
                open_certificate(Path("a.tpicert"), bytes(changed))


def check_bytes(data: bytes) -> certificate.Certificate:
    return open_certificate(Path("a.tpicert"), data)


def written(data: bytes, change: Callable[[zipfile.ZipFile], object], names: Iterable[str] = ()) -> bytes:
    """The members, written in this order, with a change of the directory alone and a right seal."""
    held, stream = members(data), io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names or held:
            archive.writestr(zipfile.ZipInfo(name), held[name], zipfile.ZIP_DEFLATED)
        change(archive)
        archive.comment = bytes(certificate._SEAL_SIZE)
    return certificate._sealed(stream.getvalue())


def with_a_gap(data: bytes) -> bytes:
    """The same members, with bytes that the central directory skips and nobody is shown."""
    body = data[: -certificate._SEAL_SIZE]
    start = body.index(b"PK\x01\x02")
    moved = bytearray(body[:start] + b"hidden" + body[start:])
    end = moved.rindex(b"PK\x05\x06")
    offset = int.from_bytes(moved[end + 16 : end + 20], "little") + len(b"hidden")
    moved[end + 16 : end + 20] = offset.to_bytes(4, "little")
    return certificate._sealed(bytes(moved) + bytes(certificate._SEAL_SIZE))


def forgeries(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A certificate cut short or lengthened, then what a forger can make: all of these have a right seal."""
    yield from (
        ("nothing", b""), ("a start", data[:4]), ("without its end", data[:-1]), ("without its start", data[1:]),
    )  # fmt: skip
    yield from (("a line more", data + b"\n"), ("a header before it", b"PK\x03\x04" + data))
    held = members(data)
    for name in MEMBERS:
        yield f"{name} is longer", sealed_archive(held | {name: held[name] + b"\n"})
    yield "another member", sealed_archive(held | {"notes.txt": b"more"})
    yield "a missing member", sealed_archive({name: held[name] for name in held if name != "versions.json"})
    for other in ("../config.yaml", "/config.yaml"):
        yield (
            f"{other} in place of a member",
            sealed_archive({other if name == "config.yaml" else name: content for name, content in held.items()}),
        )
    yield "another order", sealed_archive(dict(reversed(held.items())))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Duplicate name")
        yield "a member twice", sealed_archive([*held.items(), ("ledger.jsonl", held["ledger.jsonl"])])
    yield "another order than the directory's", written(data, lambda archive: archive.filelist.reverse(), [*held][::-1])
    yield "bytes between members", with_a_gap(data)
    for field, value in (("extra", b"\xfe\xca\x02\x00ab"), ("comment", b"\xfe\xca\x02\x00ab"), ("flag_bits", 2)):
        yield (
            f"{field} in the directory",
            written(data, lambda archive, field=field, value=value: setattr(archive.filelist[-1], field, value)),
        )
    manifest = json.loads(held[MANIFEST])
    for title, change in (("summary", {"summary": manifest["summary"] | {"steps": 300}}), ("key", {"more": 1})):
        text = json.dumps(manifest | change, sort_keys=True, separators=(",", ":"))
        yield f"another {title} of the manifest", sealed_archive(held | {MANIFEST: text.encode()})
    first, *steps = held["ledger.jsonl"].splitlines(keepends=True)
    turned = {name: held[name] for name in MEMBERS} | {"ledger.jsonl": b"".join([first, *reversed(steps)])}
    made = certificate._manifest(turned, manifest["summary"])
    yield "a reordered ledger with its manifest", sealed_archive({MANIFEST: made} | turned)


def test_a_forgery_is_refused(certificate_bytes, data_regression):
    """With the reasons of forgeries.yml; `--regen-all` writes it anew."""
    reasons = {title: why_not_opened(forged) for title, forged in forgeries(certificate_bytes)}
    data_regression.check(reasons, fullpath=Path(__file__).parent / "forgeries.yml")


def test_of_a_torn_or_unfinished_run_the_whole_steps_are_certified(tmp_path):
    run = run_directory(tmp_path / "run", steps=2, planned=5)
    unfinished = certify(run)
    with (run / "ledger.jsonl").open("ab") as stream:
        stream.write(b'{"step": 3, "sam')
    assert certify(run) == unfinished
    result = check_bytes(unfinished)
    assert (result.summary["steps"], result.summary["of"], result.ledger.torn) == (2, 5, False)
    assert certificate.summary_words(result.summary).endswith("2 of 5 steps, gradients of 2 steps, weights of 2 steps")


def test_files_that_do_not_match_are_not_certified(run_to_certify, tmp_path):
    other = run_directory(tmp_path / "other", header=replace(HEADER, identity={"rng.seed": 1}))
    shutil.copy(other / "ledger.jsonl", run_to_certify / "ledger.jsonl")
    with pytest.raises(LedgerError, match="of different runs"):
        certify(run_to_certify)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_missing_or_broken_file_is_named(run_to_certify, name):
    (run_to_certify / name).write_text("]")
    with pytest.raises(LedgerError, match=name if name == "ledger.jsonl" else "not the files of a run"):
        certify(run_to_certify)
    (run_to_certify / name).unlink()
    with pytest.raises(LedgerError, match=f"{name} does not exist"):
        certify(run_to_certify)


def test_it_is_read_as_the_ledger_that_it_holds(run_to_certify, tmp_path):
    file = tmp_path / "a.tpicert"
    file.write_bytes(certify(run_to_certify))
    ledger = read(file)
    assert (ledger.header, ledger.steps) == (read(run_to_certify).header, read(run_to_certify).steps)
    result = compare(read(run_to_certify), ledger)
    assert (result.verdict, result.tally.compared) == (Verdict.IDENTICAL, 3)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(LedgerError, match="is not a whole certificate: it was altered or truncated"):
        read(file)


def test_the_command_packs_and_checks(cli, run_to_certify, monkeypatch):
    monkeypatch.chdir(run_to_certify.parent)
    made = cli("certify", "run")
    assert made.status == 0, made.err
    file = run_to_certify.parent / "run.tpicert"
    digest = check(file).hash
    assert made.out == (
        "run.tpicert: qwen3_toy tp=2, numerics=tree, NVIDIA H200, 3 of 3 steps, gradients of 3 steps, weights of 3 "
        "steps\n"
        f"certificate hash {digest}\n"
    )
    assert cli("certify", "run").status == 0  # the same bytes are there
    checked = cli("certify", "--check", "run.tpicert", "--hash", digest.upper())
    assert (checked.status, f"certificate hash {digest}, as expected" in checked.out) == (0, True)
    output = json.loads(cli("certify", "--check", "run.tpicert", "--json").out)
    assert (output["hash"], output["steps"], output["loss"]) == (digest, 3, {"bits": "f32:40c80000", "value": 6.25})
    assert sorted(p.name for p in run_to_certify.parent.glob("*.*")) == ["run.tpicert"]  # and nothing half written
    assert cli("compare", "run", "run.tpicert").status == 0


# Arguments, and what the message must hold.
MISTAKES = (
    ([], "name a run directory to certify, or a certificate to check: --check FILE"),
    (["run", "--hash", "0" * 64], "--hash is for checking a certificate"),
    (["--check", "a.tpicert", "--out", "b"], "--out is where a new certificate goes"),
    (["--check", "a.tpicert", "--hash", "12"], "--hash 12: a hash has 64 hexadecimal digits"),
    (["--check", "a.tpicert", "--hash", "0" * 64], "a.tpicert is another certificate: its hash is "),
    (["--check", "run/ledger.jsonl"], "run/ledger.jsonl is not a whole certificate"),
    (["run/ledger.jsonl"], "run/ledger.jsonl is not a run directory"),
    (["run", "--out", "taken"], "taken is there and is something else; --out FILE chooses another"),
    (["run", "--out", "none/b"], "cannot write none/b: No such file or directory; --out FILE chooses another"),
)  # fmt: skip


@pytest.mark.parametrize("arguments, says", MISTAKES, ids=[" ".join(a) or "nothing" for a, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(cli, run_to_certify, monkeypatch, arguments, says):
    monkeypatch.chdir(run_to_certify.parent)
    Path("a.tpicert").write_bytes(certify(run_to_certify))
    Path("taken").write_text("mine")
    ended = cli("certify", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert says in ended.err
    assert Path("taken").read_text() == "mine"
    assert sorted(p.name for p in run_to_certify.parent.iterdir()) == ["a.tpicert", "run", "taken"]
