# SPDX-License-Identifier: Apache-2.0
"""Comparing ledgers: the first differing bit is found and named, and nothing else passes for identical."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ledgers import record
from tests.unit.comparison.ledgers import tpi_compare
from tp_invariant_recipes.comparison.compare import Verdict, compare
from tp_invariant_recipes.comparison.text import header_rows, verdict_line
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, StepRecord

HEADER = Header(identity={"model.num_layers": 36, "rng.seed": 1234}, layout={"tp": 1}, versions={"torch": "2.11.0"})
FLOATS = {"loss": "loss", "grad_norm": "gradient norm (norm)", "learning_rate": "learning rate (update)"}


def wide_step(step: int, **changes) -> StepRecord:
    """A plausible step, with a width of each kind among its floats."""
    return record(step, **{"grad_norm": "f64:3ff4000000000000", **changes})


def plain_ledger(steps: int = 5, name: str = "a", header: Header = HEADER, torn: bool = False, **changes) -> Ledger:
    """A ledger in memory; `changes` are those of step 3."""
    records = tuple(wide_step(step, **(changes if step == 3 else {})) for step in range(1, steps + 1))
    return Ledger(header, records, Path(name) / "ledger.jsonl", torn)


def flipped(text: str, bit: int) -> str:
    width, digits = text.split(":")
    return f"{width}:{int(digits, 16) ^ 1 << bit:0{len(digits)}x}"


@given(st.sampled_from(sorted(FLOATS)), st.data())
def test_one_flipped_bit_is_detected_and_named(name, data):
    value = getattr(wide_step(3), name)
    other = flipped(value, data.draw(st.integers(0, int(value[1:3]) - 1)))
    result = compare(plain_ledger(), plain_ledger(name="b", **{name: other}))
    assert (result.verdict, result.exit_status, result.tally.differing) == (Verdict.DIFFERENT, 1, 1)
    assert (result.first.step, result.first.name) == (3, name)
    assert (result.first.a, result.first.b) == (value, other)
    line = verdict_line(result)
    assert line.startswith(f"different at step 3: {FLOATS[name]} {value} ")
    assert f" vs {other} " in line
    assert line.endswith("; 1 of 5 steps differ")


@pytest.mark.parametrize(
    "identity, words",
    (
        ({"rng.seed": 1235}, "rng.seed is 1234 and 1235"),
        ({"rng.seed": 1234.0}, "rng.seed is 1234 and 1234.0"),
        ({"rng.seed": "1234"}, 'rng.seed is 1234 and "1234"'),
        ({"data.digest": None}, "data.digest is not set and null"),
        ({"model.num_layers": 1, "rng.seed": 1}, "model.num_layers is 36 and 1, rng.seed is 1234 and 1"),
        (dict.fromkeys("abcde", 0), "c is not set and 0 and 2 more"),
    ),
)
def test_another_identity_is_refused_and_named(identity, words):
    other = replace(HEADER, identity=HEADER.identity | identity)
    result = compare(plain_ledger(), plain_ledger(header=other))
    assert (result.verdict, result.exit_status, result.tally.compared) == (Verdict.NOT_COMPARABLE, 2, 0)
    assert verdict_line(result).startswith("not comparable: ")
    assert verdict_line(result).endswith(words)
    assert {difference.field for difference in result.refused} == identity.keys()
    assert other.identity_hash != HEADER.identity_hash


def test_a_field_of_the_identity_and_the_numerics_is_one_row():
    one, two = (
        replace(HEADER, identity=HEADER.identity | {"numerics.data_shards": n}, numerics={"data_shards": n})
        for n in (1, 2)
    )
    assert header_rows(compare(plain_ledger(header=one), plain_ledger(header=two))) == (
        ("numerics.data_shards", "1", "2"),
    )


# The command.


@pytest.fixture
def five_runs(tmp_path, monkeypatch):
    """Five run directories: a and b agree, c differs at step 2, d has another seed, e is not a ledger."""
    monkeypatch.chdir(tmp_path)
    seed = replace(HEADER, identity=HEADER.identity | {"rng.seed": 1235})
    layout = replace(HEADER, layout={"tp": 4}, versions={"torch": "[red]2.12[/red]"})
    table = {"a": (HEADER, {}), "b": (layout, {}), "c": (layout, {"loss": "f32:40c80003"}), "d": (seed, {})}
    for name, (header, changes) in table.items():
        Path(name).mkdir()
        with LedgerWriter(name).create(header) as writer:
            for step in (1, 2, 3):
                writer.append(wide_step(step, **(changes if step > 1 else {})))
    Path("e").mkdir()
    Path("e/ledger.jsonl").write_text("no ledger\n")
    return tmp_path


STATUSES = (
    ("a b", 0), ("a/ledger.jsonl b", 0), ("a b b", 0), ("a c", 1), ("a b c", 1), ("a c b", 1), ("a d", 2),
    ("a c d", 2), ("a d c", 2), ("a e", 2), ("e a", 2), ("a none", 2), ("a", 2), ("", 2),
)  # fmt: skip


@pytest.mark.parametrize("arguments, status", STATUSES)
def test_exit_status(five_runs, arguments, status):
    text, as_json = (tpi_compare(*arguments.split(), *option) for option in ((), ("--json",)))
    assert (text.exit_code, as_json.exit_code) == (status, status), text.output
    assert not arguments or json.loads(as_json.stdout)["exit_status"] == status


def test_text(five_runs):
    lines = tpi_compare("a", "b").stdout.splitlines()
    assert lines[0] == "identical: 3 steps, loss, gradient norm and learning rate equal bit for bit"
    assert any("layout.tp" in line and "1" in line and "4" in line for line in lines)
    assert any('"[red]2.12[/red]"' in line for line in lines)
    assert lines[-1].startswith("Gradients and weights themselves are not compared: neither run has any digests")
    several = tpi_compare("a", "b", "c").stdout
    assert several.startswith("b: identical: ")
    assert "\nc: different at step 2: loss f32:40c80000 6.25 vs f32:40c80003 " in several
    assert ", 3 ULP; 2 of 3 steps differ\n" in several
    assert tpi_compare("a", "c").stdout.endswith("To find the module and the operation: tpi bisect a c\n")


def test_a_long_verdict_stays_on_one_line(five_runs):
    name = "long-" * 40
    Path("b").rename(name)
    with open(f"{name}/ledger.jsonl", "rb+") as stream:
        stream.truncate(stream.seek(0, 2) - 10)
    first, *rest = tpi_compare("a", name).stdout.splitlines()
    assert first.startswith("identical: 2 of 3 steps, ")
    assert first.endswith("ends at step 2")
    assert f"{name}: the last line is torn; the run was killed, or is writing it now." in rest


def test_an_unreadable_ledger_is_named(five_runs):
    result = tpi_compare("a", "e")
    assert result.stderr == "not comparable: e/ledger.jsonl line 1: not a ledger\n"
    assert result.stdout == ""


def test_json(five_runs, data_regression):
    """As sentences has it; `--regen-all` writes it anew."""
    output = json.loads(tpi_compare("--json", "a", "b", "c", "d").stdout)
    data_regression.check(output, fullpath=Path(__file__).parent / "sentences" / "json.yml")


def test_json_tells_a_field_that_is_not_set_from_null(five_runs):
    LedgerWriter("f.jsonl").create(replace(HEADER, layout={}, notes={"n": None})).close()
    (comparison,) = json.loads(tpi_compare("--json", "a", "f.jsonl").stdout)["comparisons"]
    assert comparison["informed"] == [{"field": "layout.tp", "a": 1}, {"field": "notes.n", "b": None}]


def test_json_of_an_unreadable_ledger(five_runs):
    output = json.loads(tpi_compare("--json", "a", "none").stdout)
    assert output["error"] == "none does not exist"
    assert (output["comparisons"], output["exit_status"]) == ([], 2)
