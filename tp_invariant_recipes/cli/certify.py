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

_HASH = re.compile(r"[0-9a-f]{64}")


def certify(
    run: Annotated[Path | None, argument("RUN", "The run directory to pack.")] = None,
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
    """Pack a run into a small file, or check one.

    The file holds the run's ledger, configuration and versions. The printed hash stands for all of it; send the hash
    through a separate channel. tpi compare and tpi verify --against accept the file like a run. Exit status: 0 the file
    was made or is intact, 2 otherwise.

    \b
    tpi certify runs/qwen3_8b-tp4-…
    tpi certify --check qwen3_8b-tp4-….tpicert --hash 5a3f…
    """
    from tp_invariant_recipes.ledger import certificate

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
    terminal.print_text(f"{certified.path}: {certificate.summary_words(summary)}")
    if summary["steps"] != summary["of"]:
        terminal.print_text(f"the run has {summary['steps']} of {counted(summary['of'], 'step')}: it was not finished")
    terminal.print_text(f"certificate hash {certified.hash}{', as expected' if expected else ''}")


def _certify(run: Path, out: Path | None) -> "Certificate":
    from tp_invariant_recipes.ledger import certificate

    data = certificate.certify(run)
    file = out.expanduser() if out is not None else Path(f"{run.resolve().name}{certificate.SUFFIX}")
    try:
        if not file.exists():
            write_atomically(file, data)
        elif not (file.is_file() and file.stat().st_size == len(data) and file.read_bytes() == data):
            raise LedgerError(f"{file} is there and is something else; --out FILE chooses another")
    except OSError as error:
        raise LedgerError(f"cannot write {file}: {error.strerror or error}; --out FILE chooses another") from error
    return certificate.check(file)


def _check(file: Path, expected: str | None) -> "Certificate":
    from tp_invariant_recipes.ledger import certificate

    if expected is not None and not _HASH.fullmatch(expected.strip().lower()):
        raise LedgerError(f"--hash {expected}: a hash has 64 hexadecimal digits")
    certified = certificate.check(file.expanduser())
    if expected is not None and expected.strip().lower() != certified.hash:
        raise LedgerError(f"{file} is another certificate: its hash is {certified.hash} and not {expected}")
    return certified


def _report(certified: "Certificate") -> dict[str, Any]:
    from tp_invariant_recipes.ledger.bits import described

    loss = described(certified.summary["loss"])
    return {"certificate": str(certified.path), "hash": certified.hash} | certified.summary | {"loss": loss}
