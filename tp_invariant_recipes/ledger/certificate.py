# SPDX-License-Identifier: Apache-2.0
"""Certificates: a run's ledger, configuration and versions in one small file that reveals any change to it.

A certificate is a zip archive of `manifest.json` and the files of MEMBERS, in this order and nothing else.

    manifest      canonical JSON: schema, a summary of the run, size and sha256 of each member
    hash          sha256 of the manifest's bytes: whoever got it through a separate channel need not trust the file
    seal          the archive's comment: sha256 of all bytes before it, which reveals damage without the hash
"""

import hashlib
import io
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import LedgerError, reason
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.ledger import run_files
from tp_invariant_recipes.ledger.bits import described
from tp_invariant_recipes.ledger.reader import CERTIFICATE_START, FILE_NAME, Ledger, contents
from tp_invariant_recipes.ledger.schema import DIGESTED, canonical
from tp_invariant_recipes.ledger.stream import parse
from tp_invariant_recipes.reading import MIB, Record, checked, parse_object, parse_yaml
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.text import plural

SCHEMA = 1
KIND = "tpi-certificate"
SUFFIX = ".tpicert"

MANIFEST = "manifest.json"
MEMBERS = (FILE_NAME, "config.yaml", "run.json", "versions.json", "environment.json")
LARGEST = 4 * 2**30 - 1  # bytes of a certificate and of a ledger in one: the limit of a zip archive without extension
# A small archive may claim, and hold, a thousand times its size. Digests hardly compress, and repeated lines do so by
# less than this factor; a small ledger may have any.
_FACTOR, _SMALL = 32, 64 * MIB

_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest date of a zip archive; the time of certification is irrelevant to the run
_SEAL = "tpi-certificate sha256:"
_SEAL_SIZE = len(_SEAL) + 64
_LOCAL_HEADER, _CENTRAL_HEADER, _END = 30, 46, 22  # bytes of a zip archive's records, without names and comments
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CertificateManifest(Record):
    """`manifest.json`. summary: of the run, for people. members: name → "bytes" and "sha256" of a member."""

    kind: str
    schema: int
    summary: dict[str, Any]
    members: dict[str, Any]


@dataclass(frozen=True)
class Certificate(Result):
    """A certificate that passed all checks.

    hash: sha256 of its manifest, as 64 hexadecimal digits. expected: whether somebody has named that hash before.
    """

    path: Path
    hash: str
    summary: dict[str, Any]
    ledger: Ledger
    expected: bool = False

    @property
    def exit_status(self) -> int:
        """0: it was made, or is intact."""
        return 0

    def lines(self) -> Iterator[str]:
        """Return the summary and the hash."""
        yield f"{self.path}: {summary_words(self.summary)}"
        if (steps := self.summary["steps"]) != (of := self.summary["of"]):
            yield f"the run has {steps} of {plural(of, 'step')}: it was not finished"
        yield f"certificate hash {self.hash}{', as expected' if self.expected else ''}"

    def as_json(self) -> dict[str, Any]:
        """Return path, hash and summary."""
        named = {"certificate": str(self.path), "hash": self.hash}
        return named | self.summary | {"loss": described(self.summary["loss"])}


def write(run: Path, out: Path | None = None) -> Certificate:
    """Write the certificate of a run, and check it. Raises LedgerError as `certify`, or where another file is there.

    out: None: NAME.tpicert in the current directory, after the run directory NAME.
    """
    data, file = certify(run), out or Path(f"{run.resolve().name}{SUFFIX}")
    try:
        if not file.exists():
            write_atomically(file, data)
        elif not (file.is_file() and file.stat().st_size == len(data) and file.read_bytes() == data):
            raise LedgerError(f"{file} is there and is something else; --out FILE chooses another")
    except OSError as error:
        raise LedgerError(f"cannot write {file}: {error.strerror or error}; --out FILE chooses another") from error
    return check(file)


def check_hash(file: Path, expected: str | None) -> Certificate:
    """Check a certificate, and its hash where one is expected. Raises LedgerError."""
    if expected is not None and not _HASH.fullmatch(expected.strip().lower()):
        raise LedgerError(f"--hash {expected}: a hash has 64 hexadecimal digits")
    certified = check(file)
    if expected is not None and expected.strip().lower() != certified.hash:
        raise LedgerError(f"{file} is another certificate: its hash is {certified.hash} and not {expected}")
    return replace(certified, expected=expected is not None)


def certify(run: Path) -> bytes:
    """Return the certificate of a run's whole lines; the same run gives the same bytes.

    LedgerError: a file of the run directory is missing or unreadable, or the files do not belong together.
    """
    if not run.is_dir():
        raise LedgerError(f"{run} is not a run directory: a certificate holds its configuration too")
    members = {name: contents(run / name, _most(name)) for name in MEMBERS}
    file = run / FILE_NAME
    ledger = parse(file, members[FILE_NAME])
    lines = members[FILE_NAME].split(b"\n")[: 1 + len(ledger.steps)]
    members[FILE_NAME] = b"".join(line + b"\n" for line in lines)
    return _sealed(_archive({MANIFEST: _manifest(members, _summary(run, members, ledger))} | members))


def check(path: str | os.PathLike) -> Certificate:
    """Read a certificate and check all of it. LedgerError: it is missing, unreadable, altered or cut short."""
    file = Path(path)
    return open_certificate(file, contents(file, LARGEST))


def open_certificate(file: Path, data: bytes) -> Certificate:
    """Check the bytes of a certificate; `file` names it in errors. LedgerError: as `check`."""
    try:
        members = _unpack(data)
        manifest = _checked(members)
        ledger = parse(file, members[FILE_NAME])
        summary = manifest.summary
        if canonical(summary) != canonical(_summary(file, members, ledger)):
            raise ValueError("its summary does not fit its members")
    except (ValueError, zipfile.BadZipFile) as error:
        raise LedgerError(f"{file} is not a whole certificate: {reason(error)}") from error
    return Certificate(file, hashlib.sha256(members[MANIFEST]).hexdigest(), summary, ledger)


# Member -> how it is read, and its type.
_TYPES: dict[str, tuple[Callable[[bytes], Any], Any]] = {
    "run.json": (parse_object, run_files.CertifiedRun),
    "versions.json": (parse_object, run_files.Versions),
    "environment.json": (parse_object, run_files.Environment),
    "config.yaml": (parse_yaml, run_files.Config),
}


def _most(name: str) -> int:
    if name.endswith(".jsonl"):
        return LARGEST
    return run_files.LARGEST_CONFIG if name == "config.yaml" else run_files.LARGEST


def _summary(source: Path, members: dict[str, bytes], ledger: Ledger) -> dict[str, Any]:
    """Return a summary of the run for people. LedgerError: the files belong to different runs, or are invalid."""
    name = ""
    try:
        typed = {}
        for name, (read, kind) in _TYPES.items():
            typed[name] = checked(kind, read(members[name]))
    except ValueError as error:
        raise LedgerError(f"{source}: not the files of a run: {name}: {reason(error)}") from error
    run, header = typed["run.json"], ledger.header
    if run.identity_hash != header.identity_hash:
        raise LedgerError(f"{source}: {FILE_NAME} and run.json are of different runs: their identities differ")
    last = ledger.steps[-1] if ledger.steps else None
    digested = {kind: sum(getattr(step, kind) is not None for step in ledger.steps) for kind in DIGESTED}
    return {
        "model": run.model,
        "layout": header.layout,
        "numerics": header.numerics,
        "device": header.device,
        "identity_hash": run.identity_hash,
        "steps": len(ledger.steps),
        "of": typed["config.yaml"].train.train_iters,
        "loss": last.loss if last else None,
        "parameters": len(header.parameters),
        "digests": {kind: count for kind, count in digested.items() if count},  # steps that have them
    }


def _manifest(members: dict[str, bytes], summary: dict[str, Any]) -> bytes:
    described = {name: _member(data) for name, data in members.items()}
    return canonical(CertificateManifest(KIND, SCHEMA, summary, described).as_json()).encode()


def _member(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _checked(members: dict[str, bytes]) -> CertificateManifest:
    """Return the manifest. ValueError: it is invalid, or describes other members."""
    data = members[MANIFEST]
    manifest = checked(CertificateManifest, parse_object(data))
    if manifest.kind != KIND or manifest.schema != SCHEMA:
        raise ValueError(f"its manifest is not of schema {SCHEMA}, which this version reads")
    for name in MEMBERS:
        if manifest.members.get(name) != _member(members[name]):
            raise ValueError(f"{name} was altered: it differs from the manifest")
    # The manifest must have exactly this content and form, since the hash covers its bytes.
    if data != _manifest({name: members[name] for name in MEMBERS}, manifest.summary):
        raise ValueError("its manifest holds more than a manifest does, or in another form")
    return manifest


def _archive(members: dict[str, bytes]) -> bytes:
    """Return a zip archive with room for the seal. Its bytes depend only on the members."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, allowZip64=False, compresslevel=9) as archive:
        for name, data in members.items():
            if len(data) > _most(name):
                raise LedgerError(f"{name} has {len(data)} bytes; a certificate holds at most {_most(name)} of it")
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system = 3  # Unix, on every system
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
        archive.comment = b" " * _SEAL_SIZE
        for entry in archive.infolist():
            if entry.file_size > max(_SMALL, _FACTOR * entry.compress_size):
                raise LedgerError(f"{entry.filename} compresses to less than a {_FACTOR}th, as no ledger of a run does")
    return stream.getvalue()


def _sealed(archive: bytes) -> bytes:
    body = archive[:-_SEAL_SIZE]
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return f"{_SEAL}{hashlib.sha256(body).hexdigest()}".encode()


def _unpack(data: bytes) -> dict[str, bytes]:
    """Return the members. ValueError or BadZipFile: the archive is damaged, or does not hold exactly these members."""
    body, seal = data[:-_SEAL_SIZE], data[-_SEAL_SIZE:]
    if not data.startswith(CERTIFICATE_START) or seal != _seal(body):
        raise ValueError("it was altered or truncated: its seal does not fit its bytes")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        if names != [MANIFEST, *MEMBERS]:
            raise ValueError(f"it holds {', '.join(names)} and not just {', '.join((MANIFEST, *MEMBERS))}")
        offset = 0
        for entry in entries:
            # Refuse any data between the members, since nobody would see it; the size shows what headers are longer.
            if entry.header_offset != offset or entry.flag_bits:
                raise ValueError(f"something stands beside {entry.filename}")
            if entry.compress_type != zipfile.ZIP_DEFLATED:
                raise ValueError(f"{entry.filename} is not deflated")
            if entry.file_size > min(_most(entry.filename), max(_SMALL, _FACTOR * entry.compress_size)):
                raise ValueError(
                    f"{entry.filename} claims {entry.file_size} bytes, too many for its kind and size here"
                )
            offset += _LOCAL_HEADER + len(entry.filename) + entry.compress_size
        offset += sum(_CENTRAL_HEADER + len(name) for name in names) + _END + _SEAL_SIZE
        if offset != len(data):
            raise ValueError("something stands beside its members")
        try:
            return {entry.filename: _content(archive, entry) for entry in entries}
        except (EOFError, NotImplementedError, OSError, RuntimeError, zlib.error) as error:
            raise ValueError(str(error)) from error


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return a member, of which no more is decompressed than it claims. ValueError or BadZipFile: it is shorter."""
    with archive.open(entry) as stream:
        data = stream.read(entry.file_size)  # without a size, zipfile decompresses 2 GiB before it looks at the claim
    if len(data) != entry.file_size:
        raise ValueError(f"{entry.filename} is shorter than it claims")
    return data


def summary_words(summary: dict[str, Any]) -> str:
    """Return the summary in one line that is safe to print, since a certificate may come from anyone."""
    degrees = [f"{key}={value}" for key, value in summary["layout"].items() if key == "tp" or value not in (1, False)]
    parts = (
        " ".join(map(str, (summary["model"], *degrees))),
        f"numerics={summary['numerics'].get('mode', 'unknown')}",
        summary["device"].get("name", "unknown device"),
        f"{summary['steps']} of {plural(summary['of'], 'step')}",
        *(f"{kind} of {plural(count, 'step')}" for kind, count in summary.get("digests", {}).items()),
    )
    return "".join(letter if letter.isprintable() else "?" for letter in ", ".join(map(str, parts)))
