"""Certificates of rollouts: a file of `tpi generate` and what decides its lines, in one file that reveals any change.

It is an archive with manifest, hash and seal as `ledger/certificate.py` has them. No layout, batch or machine is part
of it: whoever has the weights generates the file again, in any layout, and gets a certificate with the same hash.
"""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import LedgerError, reason
from tp_invariant_recipes.ledger import certificate
from tp_invariant_recipes.ledger.certificate import LARGEST, MANIFEST
from tp_invariant_recipes.ledger.reader import contents
from tp_invariant_recipes.ledger.run_files import LARGEST as LARGEST_META
from tp_invariant_recipes.ledger.schema import canonical
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.reading import TOKENS, parse_object

KIND = "tpi-rollouts"
IDENTITY, LINES = MEMBERS = ("identity.json", "rollouts.jsonl")
WRITTEN = "written"  # key of FILE.meta.json: hash and number of FILE's lines when tpi wrote it


@dataclass(frozen=True)
class RolloutCertificate:
    """A certificate that passed all checks. hash: sha256 of its manifest, as 64 hexadecimal digits."""

    path: Path
    hash: str
    summary: dict[str, Any]


def certify(file: Path) -> bytes:
    """Certify a file of rollouts. Raises LedgerError: `tpi generate` did not write it, or it was changed."""
    meta = file.with_name(f"{file.name}.meta.json")
    if not meta.is_file():
        raise LedgerError(f"{file} is not a run directory, nor a file of tpi generate: there is no {meta.name}")
    try:
        identity = parse_object(contents(meta, LARGEST_META))
        written = identity.pop(WRITTEN)["sha256"]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise LedgerError(f"{meta}: not of tpi generate: {reason(error)}") from error
    data = contents(file, LARGEST)
    if "requests" not in identity:
        raise LedgerError(f"{file} is of tpi score, whose scores are computed again by one pass; certify rollouts")
    if hashlib.sha256(data).hexdigest() != written:
        raise LedgerError(f"{file} was changed since tpi wrote it: {meta.name} has another hash")
    members = {IDENTITY: canonical(identity).encode(), LINES: data}
    return certificate.pack(members, KIND, _summary(file, members))


def is_kind(file: Path) -> bool:
    """Whether a file claims to be a certificate of rollouts; `check` says whether it is one."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.namelist()[1:] == [*MEMBERS]
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def check(file: Path) -> RolloutCertificate:
    """Read a certificate and check all of it. Raises LedgerError: it is missing, unreadable, altered or cut short."""
    members, manifest = certificate.unpack(file, contents(file, LARGEST), MEMBERS, KIND)
    if canonical(manifest.summary) != canonical(_summary(file, members)):
        raise LedgerError(f"{file} is not a whole certificate: its summary does not fit its members")
    return RolloutCertificate(file, hashlib.sha256(members[MANIFEST]).hexdigest(), manifest.summary)


def _summary(file: Path, members: dict[str, bytes]) -> dict[str, Any]:
    """Summarise for people. Raises LedgerError: the members are no rollouts, or do not belong together."""
    try:
        identity = parse_object(members[IDENTITY])
        rows = [parse_object(line, most=TOKENS) for line in members[LINES].splitlines()]
        summary = {
            "weights": identity["weights"],
            "numerics": identity["numerics"]["mode"],
            "sampling": identity["sampling"],
            "requests": identity["requests"]["count"],
            "completions": len(rows),
            "tokens": sum(len(row["token_ids"]) for row in rows),
            "digests": identity["digests"],
        }
        if len({row["request"] for row in rows}) != summary["requests"]:
            raise ValueError("it has completions of another number of requests")
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{file}: not rollouts: {reason(error)}") from error
    return summary


def summary_words(summary: dict[str, Any]) -> str:
    """Write the summary in one line that is safe to print."""
    parts = (
        f"{counted(summary['completions'], 'completion', ',')} of {counted(summary['requests'], 'request', ',')}",
        counted(summary["tokens"], "token", ","),
        f"numerics={summary['numerics']}",
        "with digests of the vocabulary" if summary["digests"] else "without digests",
    )
    return "".join(letter if letter.isprintable() else "?" for letter in ", ".join(parts))
