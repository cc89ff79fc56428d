"""Text logs: what they print is compared digit by digit, and never passes for a proof."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tp_invariant_recipes.cli.compare import compare as compare_command
from tp_invariant_recipes.compare.log_compare import LogVerdict, alike, compare_printed, line, remarks
from tp_invariant_recipes.compare.log_parser import Log, digits, parse_log, read_log
from tp_invariant_recipes.ledger.bits import float_bits
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord

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


def ledger(steps=5, at=3, header=None, **changes) -> Ledger:
    """The ledger of the run whose log `text()` is: the rate that is printed at step k is that of step k + 1."""
    base = dict(tokens=256, loss=float_bits(6.25, 32), grad_norm=float_bits(1.25, 32))
    records = [
        StepRecord(
            **{"step": s, "samples": 4 * s, "learning_rate": float_bits(3e-4, 64), **base}
            | (changes if s == at else {})
        )
        for s in range(1, steps + 1)
    ]
    return Ledger(header or Header(identity={"rng.seed": 1}), tuple(records), Path("run/ledger.jsonl"), torn=False)


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
    result = compare_printed(A, log("b.log", ms=200.0))
    assert (result.verdict, result.exit_status, result.steps_compared) == (LogVerdict.SAME, 0, 5)
    said = line(result)
    assert said.startswith("the same as printed: 5 steps, consumed samples, global batch size, lm loss to 7 digits, ")
    assert "grad norm to 4 digits" in said
    assert said.endswith("; equal digits do not prove equal bits")
    assert "identical" not in said


def test_digits_below_the_printed_ones_are_not_seen():
    assert compare_printed(A, log("b.log", norm=1.2501)).verdict is LogVerdict.SAME


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
        ({"norm": 1.5, "loss": 7.0, "rate": 1.0}, "lm loss", ("6.250000E+00", "7.000000E+00")),
    ),
)
def test_a_difference_is_found_and_named(changes, name, values):
    result = compare_printed(A, log("b.log", **changes))
    assert (result.verdict, result.exit_status, result.steps_differing) == (LogVerdict.DIFFERENT, 1, 1)
    assert (result.first.step, result.first.name, (result.first.a, result.first.b)) == (3, name, values)
    shown = " vs ".join(value or "not printed" for value in values)
    assert line(result) == f"different as printed at step 3: {name} {shown}; 1 of 5 steps differ"


def test_both_not_a_number():
    nan = dict(loss=float("nan"), norm=float("nan"))
    assert compare_printed(log("a", **nan), log("b", **nan)).verdict is LogVerdict.SAME


def test_a_restart_in_one_log_counts_from_its_later_lines():
    before = text(range(1, 5), loss=9.0)
    again = parse_log(Path("b.log"), before + text(range(3, 6)))
    result = compare_printed(A, again)
    assert result.verdict is LogVerdict.SAME
    assert "b.log: starts again at iteration 3 after iteration 4; the later lines count." in remarks(result)
    dropped = parse_log(Path("b.log"), text() + text((3,)))
    assert list(dropped.iterations) == [1, 2, 3]
    assert line(compare_printed(A, dropped)).startswith("the same as printed: 3 of 5 steps, ")


def test_a_line_that_is_cut_is_left_out_and_said():
    for cut in (printed(5)[:-30], printed(5)[:150], printed(5) + "Exception in thread"):
        found = parse_log(Path("b.log"), text(range(1, 5)) + cut)
        assert (list(found.iterations), found.broken) == ([1, 2, 3, 4], 1)
    result = compare_printed(A, found)
    assert "b.log: lines of an iteration that are cut or mixed up, left out: 1." in remarks(result)
    assert "4 of 5 steps" in line(result)


def test_no_common_iteration_or_number_is_not_comparable():
    result = compare_printed(log("a", (1, 2)), log("b", (3, 4)))
    assert (result.verdict, result.exit_status) == (LogVerdict.NOT_COMPARABLE, 2)
    assert line(result) == "not comparable: no iteration that both print in a and b"
    counts = parse_log(Path("c"), " iteration 1/ 5 | consumed samples: 4 |\n")
    assert line(compare_printed(A, counts)) == "not comparable: no number that both print in a.log and c"


def test_fields_of_one_log_alone_are_said():
    more = parse_log(Path("b.log"), text().replace(" loss scale", " load_balancing_loss: 1.847725E+00 | loss scale"))
    result = compare_printed(A, more)
    assert (result.verdict, result.only_b) == (LogVerdict.SAME, ("load_balancing_loss",))
    assert "Only b.log has load_balancing_loss: not compared." in remarks(result)
    other = parse_log(Path("c.log"), text().replace(" loss scale", " load_balancing_loss: 1.847726E+00 | loss scale"))
    assert compare_printed(more, other).first.name == "load_balancing_loss"


@pytest.mark.parametrize(
    "a, b, same",
    (
        ("1.254514E+01", "1.25E+01", True),
        ("1.254514E+01", "1.26E+01", False),
        ("1.254514E+01", "12.545", True),
        ("1.254514E+01", "12.546", False),
        ("1.250", "1.250E+00", True),
        ("9.999", "10.000", False),
        ("0.999", "1.000", False),
        ("0.001", "0.0012", True),
        ("12", "12.0", False),
        ("12", "13", False),
        ("NAN", "NAN", True),
        ("NAN", "1.0", False),
        ("INF", "1.0", False),
        ("INF", "-INF", False),
        ("", "1.0", False),
    ),
)
def test_numbers_of_two_formats_agree_to_the_digits_of_the_shorter(a, b, same):
    assert alike(a, b) is alike(b, a) is same


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_in_one_format_only_equal_texts_agree(x, y):
    for form in (".6E", ".3f", ".1f"):
        a, b = format(x, form), format(y, form)
        assert alike(a, b) == (a == b)


@pytest.mark.parametrize(
    "number, count", (("1.254514E+01", 7), ("32.962", 5), ("0.012", 2), ("0.000E+00", 4), ("0.0", 1))
)
def test_digits(number, count):
    assert digits(number) == count


# A log against a ledger.


@pytest.mark.parametrize("turned", (False, True))
def test_a_ledger_is_printed_as_the_log_prints(turned):
    pair = (ledger(), A)[:: -1 if turned else 1]
    result = compare_printed(*pair)
    assert (result.verdict, result.steps_compared) == (LogVerdict.SAME, 5)
    assert result.digits == {"consumed samples": None, "lm loss": 7, "grad norm": 4, "learning rate": 7}
    assert any("Only a.log has global batch size, " in sentence for sentence in remarks(result))


@pytest.mark.parametrize(
    "changes, name",
    (
        ({"loss": float_bits(6.5, 32)}, "lm loss"),
        ({"grad_norm": float_bits(1.5, 32)}, "grad norm"),
        ({"samples": 13}, "consumed samples"),
        ({"loss": "f32:7fc00000"}, "lm loss"),
    ),
)
def test_a_difference_from_a_ledger(changes, name):
    result = compare_printed(ledger(**changes), A)
    assert (result.first.step, result.first.name) == (3, name)


def test_the_printed_learning_rate_is_the_next_steps():
    result = compare_printed(ledger(at=4, learning_rate=float_bits(1e-4, 64)), A)
    assert (result.first.step, result.first.name, result.first.a) == (3, "learning rate", "1.000000E-04")
    assert compare_printed(ledger(at=1, learning_rate=float_bits(1e-4, 64)), A).verdict is LogVerdict.SAME


# An f64 that is 1.268728E-03, and 1.268729E-03 once it is rounded to fp32, as Bridge does before it prints it.
RATE = 0.0012687284882248024
AS_BRIDGE = float(np.float32(RATE))


@pytest.mark.parametrize("turned", (False, True))
def test_a_runs_own_log_prints_the_learning_rate_rounded_to_fp32(turned):
    own = log("a.log", rate=AS_BRIDGE)
    assert own.iterations[3]["learning rate"] == "1.268729E-03" != f"{RATE:.6E}"
    result = compare_printed(*(ledger(at=4, learning_rate=float_bits(RATE, 64)), own)[:: -1 if turned else 1])
    assert (result.verdict, result.rounded) == (LogVerdict.SAME, {})


# What a log prints where the ledger's numbers are 6.25, 1.25 and RATE; whether rounding may cause it.
NEAR = (
    ({"rate": 0.001268728}, "learning rate", True),  # Megatron-LM prints the f64
    ({"rate": 0.001268730}, "learning rate", True),
    ({"rate": 0.001268727}, "learning rate", False),
    ({"rate": 0.001268731}, "learning rate", False),
    ({"rate": AS_BRIDGE, "loss": 6.250001}, "lm loss", True),
    ({"rate": AS_BRIDGE, "loss": 6.250002}, "lm loss", False),
    ({"rate": AS_BRIDGE, "norm": 1.249}, "grad norm", True),
    ({"rate": AS_BRIDGE, "norm": 1.252}, "grad norm", False),
    ({"rate": AS_BRIDGE, "norm": -1.25}, "grad norm", False),
)


@pytest.mark.parametrize("changes, name, may", NEAR)
def test_one_unit_in_the_last_digit_may_be_rounding_and_two_are_a_difference(changes, name, may):
    result = compare_printed(ledger(at=4, learning_rate=float_bits(RATE, 64)), log("a.log", **changes))
    said = f"The last printed digit of {name} differs by one unit at 1 step, as rounding may cause: not counted as a "
    if may:
        assert (result.verdict, result.rounded) == (LogVerdict.SAME, {name: 1})
        assert said + "difference." in remarks(result)
    else:
        assert (result.verdict, result.first.name, result.first.step) == (LogVerdict.DIFFERENT, name, 3)
        assert said + "difference." not in remarks(result)


@pytest.mark.parametrize(
    "a, b, units",
    (
        ("9.999999E-04", "1.000000E-03", 1),
        ("9.999998E-04", "1.000000E-03", 2),
        ("1.000001E-03", "9.999999E-04", 11),
        ("0.999", "1.000", 1),
        ("0.998", "1.000", 2),
        ("0.000", "0.001", 1),
        ("-0.001", "0.001", 2),
        ("1.438814E-03", "1.438813E-03", 1),
    ),
)
def test_units_of_the_last_digit(a, b, units):
    for one, other in ((a, b), (b, a)):
        assert alike(one, other, units)
        assert not alike(one, other, units - 1)


def test_a_loss_that_is_no_number_is_not_printed():
    assert compare_printed(ledger(loss="f32:7fc00000"), log("a.log", loss=float("nan"))).verdict is LogVerdict.SAME


@pytest.mark.parametrize("recorded", ({}, {"loss": None, "grad_norm": None}))
def test_a_skipped_step_prints_no_loss_of_its_own(recorded):
    gone = ledger(skipped=True, **recorded)
    assert compare_printed(gone, log("a.log", loss=0.0)).verdict is LogVerdict.SAME


def test_a_mean_over_several_steps_is_not_compared_with_a_ledger():
    every_second = log("a.log", (2, 4), loss=9.0, at=4)
    result = compare_printed(ledger(), every_second)
    assert result.verdict is LogVerdict.SAME
    assert "lm loss" not in result.digits
    assert "The lm loss of the log is a mean over several steps: not compared." in remarks(result)
    assert compare_printed(log("b.log", (2, 4)), every_second).first.name == "lm loss"


def test_two_ledgers_are_not_compared_as_text():
    with pytest.raises(TypeError):
        compare_printed(ledger(), ledger())


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
    run = ledger()
    with LedgerWriter("run").create(run.header) as writer:
        for record in run.steps:
            writer.append(record)


@pytest.mark.parametrize(
    "arguments, status",
    (
        ("a.log b.txt", 0),
        ("a.log c.log", 1),
        ("a.log b.txt c.log", 1),
        ("a.log d.log", 2),
        ("d.log d.log", 2),
        ("a.log missing.log", 2),
        ("run a.log", 0),
        ("a.log run", 0),
        ("run c.log", 1),
        ("run run a.log", 0),
        ("run a.log c.log", 1),
        ("run/ledger.jsonl a.log", 0),
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


def test_text_and_json(files):
    lines = tpi("run", "run", "a.log").stdout.splitlines()
    assert lines[0].startswith("run: identical: 5 steps, ")
    assert any(line.startswith("a.log: the same as printed: 5 steps, ") for line in lines)
    assert lines[-1] == (
        "A log says little of model, data and seed: whether these are runs of one experiment is not checked."
    )
    bits, logs = json.loads(tpi("--json", "run", "run", "c.log").stdout)["comparisons"]
    assert (bits["kind"], logs["kind"]) == ("bits", "printed")
    assert logs["b"] == {"path": "c.log", "log": True, "steps": 5}
    assert logs["first_difference"] == {"step": 3, "name": "lm loss", "a": "6.250000E+00", "b": "6.300000E+00"}
    assert logs["digits"]["lm loss"] == 7
    assert logs["only_b"][0] == "global batch size"


def test_a_ledger_is_not_taken_for_a_log(files):
    assert read_log(Path("run")) is None
    assert read_log(Path("run/ledger.jsonl")) is None
    note = replace(ledger().header, notes={"n": "iteration 1/ 5 | lm loss: 1.0 |"})
    with LedgerWriter("note.jsonl").create(note):
        pass
    assert read_log(Path("note.jsonl")) is None
