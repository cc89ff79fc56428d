"""Certificates: whole or refused, the same bytes for the same run, and read as a ledger wherever one is."""

import hashlib
import io
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tp_invariant_recipes.compare.compare import Verdict, compare
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
    values = dict(samples=4 * step, tokens=256, loss="f32:40c80000", grad_norm="f32:3fa00000", gradients=digests)
    values |= dict(weights=digests, learning_rate="f64:3f33a92a30553261")
    return StepRecord(**{"step": step, **values, **changes})


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
        "model": "qwen3_toy",
        "layout": {"tp": 2, "pp": 1, "sp": True},
        "numerics": {"mode": "tree"},
        "device": {"name": "NVIDIA H200"},
        "identity_hash": HEADER.identity_hash,
        "steps": 3,
        "of": 3,
        "loss": "f32:40c80000",
        "parameters": 1,
        "digests": {"gradients": 3, "weights": 3},
    }
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


def test_cut_short_or_lengthened(certificate_bytes):
    for changed in (
        b"",
        certificate_bytes[:4],
        certificate_bytes[:-1],
        certificate_bytes[1:],
        certificate_bytes + b"\n",
        b"PK\x03\x04" + certificate_bytes,
    ):
        why_not_opened(changed)


def test_a_forged_seal_does_not_hide_a_changed_member(certificate_bytes):
    for name in MEMBERS:
        forged = members(certificate_bytes)
        forged[name] += b"\n"
        assert f"{name} was altered" in why_not_opened(sealed_archive(forged))


def check_bytes(data: bytes) -> certificate.Certificate:
    return open_certificate(Path("a.tpicert"), data)


@pytest.mark.parametrize(
    "change",
    (
        lambda m: {**m, "notes.txt": b"more"},
        lambda m: {name: m[name] for name in m if name != "versions.json"},
        lambda m: {"../config.yaml" if name == "config.yaml" else name: m[name] for name in m},
        lambda m: {"/run.json" if name == "run.json" else name: m[name] for name in m},
        lambda m: dict(reversed(m.items())),
    ),
    ids=("another", "one missing", "a parent", "a root", "another order"),
)
def test_only_the_named_members_may_be_in_it(certificate_bytes, change):
    assert "and not just manifest.json, ledger.jsonl" in why_not_opened(
        sealed_archive(change(members(certificate_bytes)))
    )


def test_a_member_twice_is_refused(certificate_bytes):
    pairs = list(members(certificate_bytes).items())
    with pytest.warns(UserWarning, match="Duplicate name"):
        doubled = sealed_archive([*pairs, pairs[1]])
    assert "and not just" in why_not_opened(doubled)


def test_nothing_hides_between_members(certificate_bytes):
    """A gap that the central directory skips: the same members, with bytes that nobody is shown."""
    body = certificate_bytes[: -certificate._SEAL_SIZE]
    start = body.index(b"PK\x01\x02")
    moved = bytearray(body[:start] + b"hidden" + body[start:])
    end = moved.rindex(b"PK\x05\x06")
    offset = int.from_bytes(moved[end + 16 : end + 20], "little") + len(b"hidden")
    moved[end + 16 : end + 20] = offset.to_bytes(4, "little")
    assert "something stands beside" in why_not_opened(
        certificate._sealed(bytes(moved) + bytes(certificate._SEAL_SIZE))
    )


@pytest.mark.parametrize("field", ("extra", "comment", "flag_bits"))
def test_nothing_hides_in_headers(certificate_bytes, field):
    """A field of the directory alone, as zipfile writes it, and a bit that a reader may take for a key's."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members(certificate_bytes).items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        last = archive.filelist[-1]
        setattr(last, field, 0x0002 if field == "flag_bits" else b"\xfe\xca\x02\x00ab")
        archive.comment = bytes(certificate._SEAL_SIZE)
    assert "something stands beside" in why_not_opened(certificate._sealed(stream.getvalue()))


def test_members_lie_in_the_order_of_the_directory(certificate_bytes):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in reversed(members(certificate_bytes).items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        archive.filelist.reverse()
        archive.comment = bytes(certificate._SEAL_SIZE)
    assert "something stands beside manifest.json" in why_not_opened(certificate._sealed(stream.getvalue()))


def test_the_summary_cannot_lie(certificate_bytes):
    forged = members(certificate_bytes)
    manifest = json.loads(forged[MANIFEST])
    manifest["summary"]["steps"] = 300
    forged[MANIFEST] = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    assert "its summary does not fit its members" in why_not_opened(sealed_archive(forged))
    manifest["more"] = 1
    forged[MANIFEST] = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    assert "more than a manifest does" in why_not_opened(sealed_archive(forged))


def test_a_reordered_ledger_with_a_valid_manifest_is_refused(certificate_bytes):
    forged = members(certificate_bytes)
    first, *steps = forged["ledger.jsonl"].splitlines(keepends=True)
    forged["ledger.jsonl"] = b"".join([first, *reversed(steps)])
    summary = json.loads(forged[MANIFEST])["summary"]
    forged[MANIFEST] = certificate._manifest({name: forged[name] for name in MEMBERS}, certificate.KIND, summary)
    assert "line 2: step 3 where step 1 belongs" in why_not_opened(sealed_archive(forged))


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
    assert (result.verdict, result.steps_compared) == (Verdict.IDENTICAL, 3)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(LedgerError, match="is not a whole certificate: it was altered or cut short"):
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


def test_an_unfinished_run_is_reported(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_directory(tmp_path / "run", steps=2, planned=5)
    assert "the run has 2 of 5 steps: it was not finished" in cli("certify", "run").out


# Arguments, and what the message must hold.
MISTAKES = (
    ([], "name a run directory to certify, or a certificate to check: --check FILE"),
    (["run", "--check", "a.tpicert"], "name a run directory to certify, or a certificate to check"),
    (["run", "--hash", "0" * 64], "--hash is for checking a certificate"),
    (["--check", "a.tpicert", "--out", "b"], "--out is where a new certificate goes"),
    (["--check", "none.tpicert"], "none.tpicert does not exist"),
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
