# SPDX-License-Identifier: Apache-2.0
"""The public functions, of ledgers made by hand and of runs that nobody trains."""

import json
import sys
from pathlib import Path

import pytest

import tp_invariant_recipes as tpi
from tests.ledgers import record, write
from tp_invariant_recipes.api import commands
from tp_invariant_recipes.config.overrides import requested, texts
from tp_invariant_recipes.errors import ConfigError, LedgerError
from tp_invariant_recipes.features.verify import workflow as verification
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.runs import restarts

DIGEST = "0123456789abcdef" * 2


@pytest.fixture
def ledgers(tmp_path):
    """Two equal ones, one with another loss, and one of another experiment."""
    for name, seed, loss in (("a", 1, "40c80000"), ("b", 1, "40c80000"), ("c", 1, "40c80001"), ("d", 2, "40c80000")):
        steps = [record(1), record(2, loss=f"f32:{loss}", evaluations={"validation/0:8": "f32:3f800000"})]
        write(tmp_path / name, Header(identity={"rng.seed": seed}, layout={"tp": 1}), steps)
    return [tmp_path / name for name in "abcd"]


def test_a_comparison_is_a_value(ledgers, cli):
    a, b, c, _ = ledgers
    same, different = tpi.compare(a, b), tpi.compare(a, str(c))
    assert (same.identical, same.exit_status, same.first_difference) == (True, 0, None)
    assert (different.identical, different.exit_status) == (False, 1)
    assert different.first_difference.step == 2
    assert different.text.startswith("different at step 2: loss")
    assert f"{different}\n" == cli("compare", a, c).out
    assert repr(different) == f"<CompareResult: {different}>"
    assert f"{different.to_json()}\n" == cli("compare", a, c, "--json").out
    assert json.loads(different.to_json()) == different.as_json()


def test_what_cannot_be_judged_is_an_error(ledgers, tmp_path):
    with pytest.raises(tpi.TpiError) as error:
        tpi.compare(ledgers[0], ledgers[3])
    assert error.value.problems == (str(error.value),)
    assert "not comparable" in str(error.value)
    for runs in ((ledgers[0],), (ledgers[0], tmp_path / "none")):
        with pytest.raises(LedgerError):
            tpi.compare(*runs)


def test_a_ledger_is_read_step_by_step(ledgers):
    ledger = tpi.Ledger.open(ledgers[2])
    assert [step.step for step in ledger] == [1, 2]
    assert len(ledger) == 2
    last = ledger[1]
    assert (last.loss.bits, last.loss.value) == ("f32:40c80001", 6.250000476837158)
    assert last.loss != ledger[0].loss
    assert last.gradients == {}
    assert last.evaluations["validation/0:8"].value == 1.0
    assert (ledger.layout["tp"], ledger.identity) == (1, {"rng.seed": 1})
    with pytest.raises(tpi.TpiError, match="cannot read"):
        tpi.Ledger.open(ledgers[0] / "none")


def test_a_table_needs_pandas(ledgers, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(tpi.TpiError, match="pip install pandas"):
        tpi.Ledger.open(ledgers[0]).to_pandas()


def test_a_table_has_values_and_bits(ledgers):
    pandas = pytest.importorskip("pandas")
    table = tpi.Ledger.open(ledgers[2]).to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table.loc[2, "loss_bits"] == "f32:40c80001"
    assert list(table.index) == [1, 2]


def test_overrides_are_texts_mappings_and_keywords():
    read = requested(("tp=2", {"optimizer.adam_eps": 1e-7, "run.dir": Path("a b")}), {"sp": True, "seq": None})
    assert texts(read) == ("tp=2", "optimizer.adam_eps=1e-07", 'run.dir="a b"', "sp=true", "seq=null")
    assert texts(requested((), {"tp": (1, 2, 4), "ledger.dump": ["a"]})) == ("tp=1,2,4", 'ledger.dump=["a"]')
    nested = {"optimizer": {"lr": 1e-3}, "cluster": {"environment": {"A": "b"}, "mounts": []}}
    words = ("optimizer.lr=0.001", "cluster.environment.A=b", "cluster.mounts=[]", "model.window_size=[1, 0]")
    assert texts(requested((nested,), {"model": {"window_size": [1, 0]}})) == words
    with pytest.raises(ConfigError, match=r"^tp=4 and tp=2 contradict each other"):
        requested(("tp=4",), {"tp": 2})


@pytest.mark.parametrize("call", (tpi.train, tpi.verify, tpi.audit))
def test_mistakes_are_listed_before_anything_starts(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tpi.TpiError) as error:
        call("qwen3_toy", "sequ=64", device="cpu", tpp=2, seq=object())
    assert len(error.value.problems) == 3 + (call is tpi.verify)  # which lacks a second value
    for part in ("did you mean 'seq'?", "did you mean 'tp'?", "is not KEY=VALUE: a value is a number, text, bool"):
        assert part in str(error.value)
    assert not any(tmp_path.glob("runs*"))


def test_python_trains_on_this_machine_only():
    with pytest.raises(tpi.TpiError, match=r"^launcher=slurm: .*tpi submit"):
        tpi.train("qwen3_toy", launcher="slurm")


def test_a_run_is_a_path_and_must_be_there(tmp_path):
    with pytest.raises(tpi.TpiError, match="is not a run directory"):
        tpi.Run(tmp_path)


def test_verify_asks_for_what_the_command_asks_for(monkeypatch, tmp_path):
    asked = {}

    def new(model, words, *, against, directory, how):
        asked.update(model=model, words=texts(words), against=against, directory=directory)
        raise ConfigError("enough")

    monkeypatch.setattr(verification, "new", new)
    with pytest.raises(tpi.TpiError, match="enough"):
        tpi.verify("qwen3_toy", tp=(1, 2), against="a.tpicert", directory=tmp_path)
    assert asked == {
        "model": "qwen3_toy", "words": ("tp=1,2",), "against": Path("a.tpicert"), "directory": tmp_path,
    }  # fmt: skip
    for wrong in ({"last_failed": True}, {"recheck": tmp_path}):
        with pytest.raises(tpi.TpiError, match="leave MODEL, overrides"):
            tpi.verify("qwen3_toy", **wrong)


@pytest.mark.parametrize("program", ("tpi", "__main__.py", "my script.py"))
def test_an_attempt_names_the_program(monkeypatch, program):
    monkeypatch.setattr("sys.argv", [f"/usr/bin/{program}", "train"])
    named = {"my script.py": "'my script.py'"}.get(program, "tpi")
    assert restarts.started(0, 1, None, {}).command == f"{named} train"


def test_certificates_are_made_or_checked():
    for wrong in ({}, {"run": "a", "check": "b"}, {"check": "a", "out": "b"}, {"run": "a", "expected": "b"}):
        with pytest.raises(LedgerError):
            commands.certify(**wrong)
