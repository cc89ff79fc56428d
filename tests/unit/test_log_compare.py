"""Text logs: what they print is compared as printed, and never passes for a proof."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.unit.compare.ledgers import HEADER, record
from tp_invariant_recipes.cli.compare import compare as compare_command
from tp_invariant_recipes.compare.log_compare import (
    DIFFERENT,
    NOT_COMPARABLE,
    SAME,
    Log,
    compare_logs,
    line,
    parse_log,
    read_log,
    remarks,
)
from tp_invariant_recipes.ledger.record import Header, LedgerWriter

# As Megatron-Bridge 0.6.2 and Megatron-LM 0.19 write it.
LINE = (
    " [2026-01-31 09:16:19] iteration {step:8d}/{total:8d} | consumed samples: {samples:12d} |"
    " elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {ms:.1f} |"
    " learning rate: {rate:.6E} | global batch size:     4 |{loss} loss scale: 1.0 | grad norm: {norm:.3f} |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)
PREFIXES = ("", "[rank3]: ", "17: ", "\x1b[32m[default0]:\x1b[0m", "2026-01-31T09:16:19 node-7 ")


def printed(step: int, loss: float = 6.25, norm: float = 1.25, rate: float = 3e-4, ms: float = 100.5, **more) -> str:
    values = dict(step=step, total=5, samples=4 * step, rate=rate, norm=norm, ms=ms)
    shown = f" lm loss: {loss:.6E} |" if loss >= 0 else ""
    return LINE.format(**values | {"loss": shown} | more)


def text(steps=range(1, 6), at: int = 3, **changes) -> str:
    """A log; `changes` are those of the line of step `at`."""
    lines = ["setting random seeds", "training ..."]
    lines += [printed(step, **(changes if step == at else {})) for step in steps]
    return "\n".join([*lines, "[Rank 0] (after 1 iterations) memory (GB)", ""])


def log(name: str, *args, **changes) -> Log:
    return parse_log(Path(name), text(*args, **changes))


A = log("a.log")


def test_a_line_is_read_whatever_stands_before_it():
    for prefix in PREFIXES:
        found = parse_log(Path("x"), prefix + printed(3) + ("\x1b[0m" if "\x1b" in prefix else ""))
        assert found.iterations == {
            3: {
                "consumed samples": "12",
                "learning rate": "3.000000E-04",
                "global batch size": "4",
                "lm loss": "6.250000E+00",
                "loss scale": "1.0",
                "grad norm": "1.250",
                "number of skipped iterations": "0",
                "number of nan iterations": "0",
            }
        }, prefix


def test_logs_that_print_the_same_say_how_little_it_proves():
    result = compare_logs(A, log("b.log", ms=200.0))
    assert (result.verdict, result.exit_status, result.steps_compared) == (SAME, 0, 5)
    assert line(result) == (
        "the same as printed: 5 steps, consumed samples, learning rate, global batch size, lm loss, loss scale, grad "
        "norm, number of skipped iterations, number of nan iterations; equal digits do not prove equal bits"
    )
    assert remarks(result) == (
        "A log says little of model, data and seed: whether these are runs of one experiment is not checked.",
    )
    assert remarks(compare_logs(A, A))[0] == "Both are the same file, so this proves nothing."


def test_digits_below_the_printed_ones_are_not_seen():
    assert compare_logs(A, log("b.log", norm=1.2501)).verdict == SAME


@pytest.mark.parametrize(
    "changes, name, values",
    (
        ({"loss": 6.250001}, "lm loss", ("6.250000E+00", "6.250001E+00")),
        ({"loss": float("nan")}, "lm loss", ("6.250000E+00", "")),
        ({"norm": 1.251}, "grad norm", ("1.250", "1.251")),
        ({"norm": float("nan")}, "grad norm", ("1.250", "nan")),
        ({"rate": 3.000001e-4}, "learning rate", ("3.000000E-04", "3.000001E-04")),
        ({"samples": 13}, "consumed samples", ("12", "13")),
        ({"samples": 13, "loss": 7.0}, "consumed samples", ("12", "13")),
        ({"norm": 1.5, "loss": 7.0}, "lm loss", ("6.250000E+00", "7.000000E+00")),
    ),
)
def test_a_difference_is_found_and_named(changes, name, values):
    result = compare_logs(A, log("b.log", **changes))
    assert (result.verdict, result.exit_status, result.steps_differing) == (DIFFERENT, 1, 1)
    assert (result.first.step, result.first.name, (result.first.a, result.first.b)) == (3, name, values)
    shown = " vs ".join(value or "not printed" for value in values)
    assert line(result) == f"different as printed at step 3: {name} {shown}; 1 of 5 steps differ"


def test_both_not_a_number():
    nan = dict(loss=float("nan"), norm=float("nan"))
    assert compare_logs(log("a", **nan), log("b", **nan)).verdict == SAME


def test_of_a_repeated_iteration_the_last_line_counts():
    again = parse_log(Path("b.log"), text(range(1, 5), loss=9.0) + text(range(3, 6)))
    assert compare_logs(A, again).verdict == SAME
    assert compare_logs(A, parse_log(Path("b.log"), text() + text((3,), loss=9.0))).verdict == DIFFERENT


def test_a_line_that_is_cut_is_left_out():
    for cut in (printed(5)[:-30], printed(5)[:150], printed(5) + "Exception in thread"):
        found = parse_log(Path("b.log"), text(range(1, 5)) + cut)
        assert list(found.iterations) == [1, 2, 3, 4]
    assert line(compare_logs(A, found)).startswith("the same as printed: 4 of 5 steps, ")


def test_no_common_iteration_is_not_comparable():
    result = compare_logs(log("a", (1, 2)), log("b", (3, 4)))
    assert (result.verdict, result.exit_status) == (NOT_COMPARABLE, 2)
    assert line(result) == "not comparable: no iteration that both print in a and b"
    assert remarks(result) == ()


def test_fields_of_one_log_alone_are_not_compared():
    more = parse_log(Path("b.log"), text().replace(" loss scale", " load_balancing_loss: 1.847725E+00 | loss scale"))
    result = compare_logs(A, more)
    assert (result.verdict, "load_balancing_loss" in result.fields) == (SAME, False)
    other = parse_log(Path("c.log"), text().replace(" loss scale", " load_balancing_loss: 1.847726E+00 | loss scale"))
    assert compare_logs(more, other).first.name == "load_balancing_loss"


# The command.


def tpi(*arguments: object):
    app = typer.Typer()
    app.command()(compare_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.log").write_text(text())
    Path("b.txt").write_text("\n".join(PREFIXES[n % 5] + one for n, one in enumerate(text(ms=7).splitlines())) + "\n")
    Path("c.log").write_text(text(loss=6.3))
    Path("d.log").write_text("nothing here\n")
    Path("run").mkdir()
    with LedgerWriter("run").create(HEADER) as writer:
        writer.append(record(1))


@pytest.mark.parametrize(
    "arguments, status",
    (
        ("a.log b.txt", 0),
        ("a.log c.log", 1),
        ("a.log b.txt c.log", 1),
        ("a.log d.log", 2),
        ("d.log d.log", 2),
        ("a.log missing.log", 2),
        ("run a.log", 2),
        ("a.log run", 2),
        ("run run a.log", 2),
    ),
)
@pytest.mark.parametrize("option", ((), ("--json",)), ids=("text", "json"))
def test_exit_status(files, arguments, status, option):
    result = tpi(*arguments.split(), *option)
    assert result.exit_code == status, result.output
    if option:
        assert json.loads(result.stdout)["exit_status"] == status


def test_what_is_neither_ledger_nor_log_is_named(files):
    assert tpi("a.log", "d.log").stderr == "not comparable: d.log line 1: not a ledger\n"


def test_a_log_is_not_compared_with_a_ledger(files):
    assert tpi("run", "a.log").stderr == (
        "not comparable: a.log is a text log, and run/ledger.jsonl a ledger: compare logs with logs; a run of tpi has "
        "its log in logs/bridge.log\n"
    )


def test_text_and_json(files):
    lines = tpi("a.log", "b.txt", "c.log").stdout.splitlines()
    assert lines[0].startswith("b.txt: the same as printed: 5 steps, ")
    assert lines[-1].startswith("c.log: different as printed at step 3: lm loss 6.250000E+00 vs 6.300000E+00; ")
    same, other = json.loads(tpi("--json", "a.log", "b.txt", "c.log").stdout)["comparisons"]
    assert (same["kind"], same["verdict"], same["first_difference"]) == ("printed", "the same as printed", None)
    assert other["b"] == {"path": "c.log", "steps": 5}
    assert other["first_difference"] == {"step": 3, "name": "lm loss", "a": "6.250000E+00", "b": "6.300000E+00"}
    assert "lm loss" in other["fields"]


def test_a_ledger_is_not_taken_for_a_log(files):
    assert read_log(Path("run")) is None
    assert read_log(Path("run/ledger.jsonl")) is None
    note = Header(identity={"rng.seed": 1}, notes={"n": "iteration 1/ 5 | lm loss: 1.0 |"})
    with LedgerWriter("note.jsonl").create(note):
        pass
    assert read_log(Path("note.jsonl")) is None
