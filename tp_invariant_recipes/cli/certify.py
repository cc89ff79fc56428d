"""`tpi certify`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tp_invariant_recipes.cli.arguments import Json, argument, option
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.plural import counted

if TYPE_CHECKING:
    from tp_invariant_recipes.ledger.certificate import Certificate
    from tp_invariant_recipes.ledger.rollout_certificate import RolloutCertificate

_HASH = re.compile(r"[0-9a-f]{64}")


def certify(
    run: Annotated[
        Path | None, argument("RUN|ROLLOUTS", "The run directory, or the file of tpi generate, to pack.")
    ] = None,
    out: Annotated[
        Path | None,
        option("FILE", "Where to write; default NAME.tpicert in the current directory, after the run directory NAME."),
    ] = None,
    check: Annotated[Path | None, option("FILE", "Check this certificate instead of making one.")] = None,
    expected: Annotated[
        str | None, option("HASH", "With --check: the hash that you received from its maker.", "--hash")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pack a run or rollouts into a small file, or check one.

    The file holds the run's ledger, configuration and versions; or rollouts, the digest of their weights and how they
    were sampled, but no layout: who generates them again gets the same hash. The printed hash stands for all of it;
    send the hash through a separate channel. tpi compare and tpi verify --against accept the file of a run like a run.
    Exit status: 0 the file was made or is intact, 2 otherwise.

    \b
    tpi certify runs/qwen3_8b-tp4-…
    tpi certify rollouts.jsonl
    tpi certify --check qwen3_8b-tp4-….tpicert --hash 5a3f…
    """
    from tp_invariant_recipes.ledger import certificate, rollout_certificate

    if (run is None) == (check is None):
        raise LedgerError("name a run directory to certify, or a certificate to check: --check FILE")
    if check is not None:
        if out is not None:
            raise LedgerError("--out is where a new certificate goes; --check makes none")
        certified = _check(check, expected)
    else:
        if expected is not None:
            raise LedgerError("--hash is for checking a certificate: --check FILE --hash HASH")
        certified = _certify(Path(str(run)), out)
    if as_json:
        terminal.print_json(_report(certified))
        return
    summary = certified.summary
    words = rollout_certificate if isinstance(certified, rollout_certificate.RolloutCertificate) else certificate
    terminal.print_text(f"{certified.path}: {words.summary_words(summary)}")
    if "steps" in summary and summary["steps"] != summary["of"]:
        terminal.print_text(f"the run has {summary['steps']} of {counted(summary['of'], 'step')}: it was not finished")
    terminal.print_text(f"certificate hash {certified.hash}{', as expected' if expected else ''}")


def _certify(run: Path, out: Path | None) -> "Certificate | RolloutCertificate":
    from tp_invariant_recipes.ledger import certificate, rollout_certificate

    kind = rollout_certificate if run.is_file() else certificate
    data = kind.certify(run)
    file = out.expanduser() if out is not None else Path(f"{run.resolve().name}{certificate.SUFFIX}")
    try:
        if not file.exists():
            write_atomically(file, data)
        elif not (file.is_file() and file.stat().st_size == len(data) and file.read_bytes() == data):
            raise LedgerError(f"{file} is there and is something else; --out FILE chooses another")
    except OSError as error:
        raise LedgerError(f"cannot write {file}: {error.strerror or error}; --out FILE chooses another") from error
    return kind.check(file)


def _check(file: Path, expected: str | None) -> "Certificate | RolloutCertificate":
    from tp_invariant_recipes.ledger import certificate, rollout_certificate

    if expected is not None and not _HASH.fullmatch(expected.strip().lower()):
        raise LedgerError(f"--hash {expected}: a hash has 64 hexadecimal digits")
    kind = rollout_certificate if rollout_certificate.is_kind(file.expanduser()) else certificate
    certified = kind.check(file.expanduser())
    if expected is not None and expected.strip().lower() != certified.hash:
        raise LedgerError(f"{file} is another certificate: its hash is {certified.hash} and not {expected}")
    return certified


def _report(certified: "Certificate | RolloutCertificate") -> dict[str, Any]:
    from tp_invariant_recipes.ledger.bits import described

    loss = {"loss": described(certified.summary["loss"])} if "loss" in certified.summary else {}
    return {"certificate": str(certified.path), "hash": certified.hash} | certified.summary | loss
