"""`tpi`: the commands, and what an error looks like."""

import errno
import sys
import traceback

import typer
from rich.console import Console

from tp_invariant_recipes import __version__
from tp_invariant_recipes.cli import (
    audit,
    bench,
    bisect,
    certify,
    compare,
    data,
    doctor,
    jobs,
    report,
    show,
    submit,
    train,
    verify,
)
from tp_invariant_recipes.errors import TpiError

app = typer.Typer(
    name="tpi",
    help="Train Megatron-Bridge models, record every step's exact bits, and prove that runs compute the same ones.",
    epilog="Exit status: 0 done or identical, 1 different, 2 a mistake that the message says how to mend.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("train")(train.train)
app.command("compare")(compare.compare)
app.command("verify")(verify.verify)
app.command("certify")(certify.certify)
app.command("report")(report.report)
app.command("bisect")(bisect.bisect)
app.command("bench")(bench.bench)
app.command("audit")(audit.audit)
app.command("submit")(submit.submit)
app.command("jobs")(jobs.jobs)
app.command("logs")(jobs.logs)
app.command("wait")(jobs.wait)
app.command("cancel")(jobs.cancel)
app.command("show")(show.show)
app.command("models")(show.models)
app.command("doctor")(doctor.doctor)
app.add_typer(data.data_app, name="data")


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        print(f"tpi {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: run a command; print a mistake on one screen and exit with status 2."""
    try:
        app()
    except TpiError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _fail(f"the disk is full: {error.filename or error}")
        # Python would exit with 1, which here means that two runs differ.
        traceback.print_exc()
        _fail(f"this is a defect of tpi {__version__}, not a mistake of yours; the lines above say where")


def _fail(message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {_escape(message)}")
    sys.exit(2)


def _escape(message: str) -> str:
    from rich.markup import escape

    return escape(message)
