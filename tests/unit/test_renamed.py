"""Keys and options with another name now: the old one is understood for a release, in commands, files and old runs."""

import json
from dataclasses import replace

import pytest

from tp_invariant_recipes import renamed
from tp_invariant_recipes.compare.compare import Verdict, compare
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import texts
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.ledger.lines import Header, encode_header, encode_step
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.record import StepRecord, resume
from tp_invariant_recipes.runs.matrix_dir import Axis, Cell, Matrix, MatrixDir
from tp_invariant_recipes.runs.run_dir import RunDir

HINT = "slurm.meet is now slurm.rendezvous_timeout; the old name goes with the next release\n"


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch):
    monkeypatch.setattr(renamed, "_said", set())


def timeout(*overrides: str) -> int:
    return compose("qwen3_toy", overrides, device="cpu").tree["slurm"]["rendezvous_timeout"]


@pytest.mark.parametrize("signs", ("", "+", "++"))
def test_an_old_key_is_understood_with_one_hint(signs, capsys):
    assert timeout(f"{signs}slurm.meet=7") == 7
    assert timeout(f"{signs}slurm.meet=8") == 8
    assert capsys.readouterr().err == HINT


def test_a_present_key_gives_no_hint(capsys):
    assert timeout("slurm.rendezvous_timeout=7") == 7
    assert capsys.readouterr().err == ""


def test_what_is_written_down_has_the_present_name():
    composed = compose("qwen3_toy", ["tp=2", "++numerics.shards=4"], device="cpu")
    assert texts(composed.overrides) == ("tp=2", "++numerics.virtual_shards=4")
    assert composed.tree["numerics"]["virtual_shards"] == 4


def test_old_and_present_name_together_are_one_error():
    with pytest.raises(ConfigError) as error:
        compose("qwen3_toy", ["slurm.meet=7", "slurm.rendezvous_timeout=8"], device="cpu")
    wrong = "slurm.meet and slurm.rendezvous_timeout are the old and the new name of one key"
    assert str(error.value) == f"{wrong}; keep slurm.rendezvous_timeout"


def site(folder, *lines: str) -> str:
    file = folder / "site.yaml"
    file.write_text("\n".join(["# @package _global_", "cluster:", "  gpus_per_node: 0", "slurm:", *lines]) + "\n")
    return f"cluster={file}"


def test_an_old_key_in_the_file_of_a_cluster_is_understood_and_the_command_line_wins(tmp_path, capsys):
    cluster = site(tmp_path, "  meet: 33")
    assert timeout(cluster) == 33
    assert capsys.readouterr().err == HINT
    assert timeout(cluster, "slurm.rendezvous_timeout=44") == 44
    assert timeout(cluster, "slurm.meet=55") == 55


def test_a_file_with_both_names_is_refused(tmp_path):
    cluster = site(tmp_path, "  meet: 33", "  rendezvous_timeout: 33")
    with pytest.raises(ConfigError, match=r"site\.yaml: slurm\.meet and slurm\.rendezvous_timeout are the old"):
        timeout(cluster)


def test_the_old_option_of_verify_is_understood(cli, here):
    ended = cli("verify", "--judge", "taken")
    hint, error = ended.err.splitlines()
    assert hint == "--judge is now --recheck; the old name goes with the next release"
    assert error == cli("verify", "--recheck", "taken").err.splitlines()[0]
    assert "keep --recheck" in cli("verify", "--judge", "taken", "--recheck", "taken").err
    assert "--judge" not in cli("verify", "--help").out


OLD = {"mode": "tree", "shards": 8, "grad_norm": "exact", "clip_rounding": "none", "initial_weights": "invariant"}
STEP = StepRecord(
    step=1, samples=1, tokens=64, loss="f32:3f800000", grad_norm="f32:3f800000", learning_rate="f32:3f800000"
)


def old_ledger(folder, identity) -> bytes:
    """A ledger as it was written when V was called numerics.shards."""
    folder.mkdir(exist_ok=True)
    header = encode_header(Header(identity=identity, numerics=OLD)).replace(b'"virtual_shards"', b'"shards"')
    assert b'"shards": 8' in header
    data = header + encode_step(STEP, Header(identity=identity))
    (folder / "ledger.jsonl").write_bytes(data)
    return data


def test_an_old_ledger_and_a_present_one_compare(tmp_path):
    identity = {"rng.seed": 1}
    old_ledger(tmp_path / "old", identity)
    old = read(tmp_path / "old")
    new = replace(old, header=Header(identity=identity, numerics=renamed.section("numerics", OLD)))
    assert old.header.numerics["virtual_shards"] == 8
    assert old.header.identity_hash == new.header.identity_hash
    found = compare(old, new)
    assert found.verdict is Verdict.IDENTICAL
    assert found.informed == ()
    other = replace(new, header=replace(new.header, numerics=new.header.numerics | {"virtual_shards": 4}))
    assert [d.field for d in compare(old, other).informed] == ["numerics.virtual_shards"]


def test_an_old_ledger_goes_on_byte_for_byte(tmp_path):
    identity = {"rng.seed": 1}
    data = old_ledger(tmp_path / "old", identity)
    header = Header(identity=identity, numerics=renamed.section("numerics", OLD))
    with resume(tmp_path / "old" / "ledger.jsonl", header, 1) as writer:
        writer.append(replace(STEP, step=2, samples=2))
    assert (tmp_path / "old" / "ledger.jsonl").read_bytes().startswith(data)


def test_an_old_run_goes_on_as_it_began(tmp_path, capsys):
    """Its command named no numerics, when stock was the default, and slurm.meet by that name."""
    given = ["numerics=stock", "slurm.rendezvous_timeout=7", f"run.dir={tmp_path}/run"]
    planned = plan.new(compose("qwen3_toy", given, device="cpu"))
    plan.write(planned)
    file = RunDir(tmp_path / "run").run
    run = json.loads(file.read_text())
    run["overrides"] = ["slurm.meet=7", f"run.dir={tmp_path}/run"]
    file.write_text(json.dumps(run))
    resumed = plan.Request(None, (), resume=tmp_path / "run").composed().tree
    assert (resumed["numerics"], resumed["slurm"]) == (planned.tree["numerics"], planned.tree["slurm"])
    assert capsys.readouterr().err == ""
    again = plan.Request("qwen3_toy", planned.composed.overrides[2:], go_on=True)
    assert again.composed().tree["numerics"]["mode"] == "stock"
    fresh = compose("qwen3_toy", [f"run.dir={tmp_path}/run"], device="cpu").tree
    assert fresh["numerics"]["mode"] == "tree"
    assert plan.resume_or_start(again.composed()).start == 0


def test_an_old_run_under_tree_goes_on(tmp_path):
    planned = plan.new(compose("qwen3_toy", ["numerics.virtual_shards=4", f"run.dir={tmp_path}/run"], device="cpu"))
    plan.write(planned)
    file = RunDir(tmp_path / "run").run
    file.write_text(file.read_text().replace("virtual_shards", "shards"))
    assert '"shards": 4' in file.read_text()
    assert RunDir(tmp_path / "run").read_run()["numerics"] == planned.tree["numerics"]
    resumed = plan.Request(None, (), resume=tmp_path / "run")
    assert resumed.plan(resumed.composed()).tree["numerics"] == planned.tree["numerics"]


def test_an_old_matrix_is_read(tmp_path):
    where = MatrixDir(tmp_path / "m")
    numerics = renamed.section("numerics", OLD)
    cell = Cell("tp1", "tp=1", ("tp=1", "numerics.virtual_shards=8"), 1, 3, "0" * 64, {"tp": 1}, numerics)
    written = Matrix("qwen3_toy", ("tp=1,2", "numerics.virtual_shards=8"), (Axis("tp", ("1", "2")),), (cell,), None)
    where.write_matrix(written)
    where.matrix.write_text(where.matrix.read_text().replace("virtual_shards", "shards"))
    assert where.read_matrix() == written
