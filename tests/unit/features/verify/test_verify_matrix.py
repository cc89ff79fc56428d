# SPDX-License-Identifier: Apache-2.0
"""`tpi verify` without a training: which cells a command line means, what is refused, what finished runs say."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ledgers import record, write
from tp_invariant_recipes.config.overrides import parse_all, texts
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.features.verify import configurations
from tp_invariant_recipes.features.verify import workflow as verify
from tp_invariant_recipes.features.verify.verdict import judge
from tp_invariant_recipes.ledger.digests import Parameter
from tp_invariant_recipes.ledger.record import Header, StepRecord
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.runs.sweep_dir import Axis, Configuration, Sweep, SweepDir

pytestmark = pytest.mark.usefixtures("here", "no_gpus")


def spread_cells(*overrides: str) -> tuple[list[tuple[str, str, tuple[str, ...]]], list[str]]:
    problems: list[str] = []
    _, choices = configurations.spread(parse_all(overrides), problems)
    return [(choice.name, choice.label, texts(choice.overrides)) for choice in choices], problems


def test_several_values_are_a_cell_each_in_the_order_given():
    assert spread_cells("seq=64", "tp=1,4,2", "iters=3") == (
        [(f"tp{tp}", f"tp={tp}", ("seq=64", f"tp={tp}", "iters=3")) for tp in (1, 4, 2)],
        [],
    )


def test_several_keys_are_every_combination_and_the_last_changes_fastest():
    cells, problems = spread_cells("tp=2,4", "sp=true,false")
    assert problems == []
    assert [(name, label) for name, label, _ in cells] == [
        ("tp2-sp-true", "tp=2 sp=true"),
        ("tp2-sp-false", "tp=2 sp=false"),
        ("tp4-sp-true", "tp=4 sp=true"),
        ("tp4-sp-false", "tp=4 sp=false"),
    ]


# An override, the values that it stands for, and the directories of its cells.
SWEEPS = (
    ("tp=range(1,4)", ["1", "2", "3"], ["tp1", "tp2", "tp3"]),
    ("tp=choice(1,8)", ["1", "8"], ["tp1", "tp8"]),
    ("++model.tensor_model_parallel_size=1,2", ["1", "2"], None),
    (
        "numerics=glob(*,exclude=[stock,deterministic])",
        ["gather", "portable", "tree"],
        ["numerics-gather", "numerics-portable", "numerics-tree"],
    ),
    ("model.attention_backend=unfused,local", ["unfused", "local"], None),
    ("numerics.virtual_shards=8,null", ["8", "null"], ["virtual_shards8", "virtual_shards-null"]),
    ("model.x='a,b','a/b'", ["'a,b'", "'a/b'"], ["x-_a_b_", "x-_a_b_-2"]),
    ("model.x=[1,2],[3]", ["[1,2]", "[3]"], ["x-_1_2_", "x-_3_"]),
)


@pytest.mark.parametrize("text, values, names", SWEEPS, ids=[text for text, _, _ in SWEEPS])
def test_hydras_ways_to_give_several_values(text, values, names):
    cells, problems = spread_cells(text)
    key = text.partition("=")[0]
    assert problems == []
    assert [overrides for _, _, overrides in cells] == [(f"{key}={value}",) for value in values]
    assert names is None or [name for name, _, _ in cells] == names


@pytest.mark.parametrize("text", ("data.path=a,b", "iters=3", "model.x=[1,2]", "model.x='1,2'", "no override", "~tp"))
def test_one_value_is_no_axis(text):
    assert spread_cells(text) == ([("", "", (text,))], [])


def planned_matrix(*overrides: str, against: Path | None = None) -> verify.Verification:
    return verify.new("qwen3_toy", overrides, against=against, directory=None)


def test_each_cell_is_a_run_of_its_own_and_nothing_is_written_yet(here):
    before = sorted(here.rglob("*"))
    result = planned_matrix("tp=1,2", "dp=1,2", "iters=3", "numerics=tree")
    assert result.directory.path.parent == Path("runs")
    assert result.directory.path.name.startswith("verify-qwen3_toy-")
    assert str(result.matrix) == "tp=1, 2 × dp=1, 2"
    assert [(cell.name, cell.ranks, cell.steps) for cell in result.matrix.cells] == [
        ("tp1-dp1", 1, 3), ("tp1-dp2", 2, 3), ("tp2-dp1", 2, 3), ("tp2-dp2", 4, 3),
    ]  # fmt: skip
    for cell in result.matrix.cells:
        assert result.plans[cell.name].run_dir.path == result.directory.path / cell.name
        assert cell.layout == result.plans[cell.name].layout.as_dict()
        assert cell.numerics["mode"] == "tree"
    assert len({cell.identity_hash for cell in result.matrix.cells}) == 1
    assert sorted(here.rglob("*")) == before


def test_an_impossible_combination_is_omitted_and_named(here):
    result = planned_matrix("tp=1,2", "sp=true,false", "iters=3")
    assert [cell.label for cell in result.matrix.cells] == ["tp=1 sp=false", "tp=2 sp=true", "tp=2 sp=false"]
    assert [(item.label, item.why) for item in result.matrix.omitted] == [
        ("tp=1 sp=true", "sp=true needs tp > 1; leave sp out or set tp")
    ]
    assert str(result.matrix) == "tp=1, 2 × sp=true, false (without tp=1 sp=true)"
    result.directory.path.mkdir(parents=True)
    result.directory.write_matrix(result.matrix)
    assert result.directory.read_matrix() == result.matrix
    judged = judge(result.directory.path)
    assert judged.remarks[0] == "Left out: tp=1 sp=true: sp=true needs tp > 1; leave sp out or set tp."
    assert judged.as_json()["left_out"][0]["label"] == "tp=1 sp=true"


def test_a_value_that_fits_no_combination_is_a_mistake(cli):
    for values in (("tp=1,2", "sp=true"), ("tp=1", "sp=true,false")):
        refused = cli("verify", "qwen3_toy", *values)
        assert (refused.status, refused.out) == (2, "")
        assert "sp=true needs tp > 1" in refused.err


def test_a_ledger_of_another_seed_or_without_steps_is_refused_before_anything_starts(cli, here):
    identity = planned_matrix("tp=1,2", "iters=3").plans["tp1"].identity
    write_ledger(here / "seed.jsonl", Header(identity=identity | {"rng.seed": 7}), 3)
    write_ledger(here / "empty.jsonl", Header(identity=identity), 0)
    refused = cli("verify", "qwen3_toy", "tp=2", "iters=3", "--against", "seed.jsonl")
    assert refused.status == 2
    assert "--against seed.jsonl is of another experiment: rng.seed is 7 there and 1234 here" in refused.err
    refused = cli("verify", "qwen3_toy", "tp=2", "iters=3", "--against", "empty.jsonl")
    assert refused.status == 2
    assert "--against empty.jsonl: there is no step in this ledger" in refused.err
    assert not (here / "runs").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Judging finished runs, written as their ranks would write them.

PARAMETERS = (
    Parameter("embedding.word_embeddings.weight", (8, 4), "float32", "bfloat16"),
    Parameter("output_layer.weight", (8, 4), "float32", "bfloat16"),
)
HEADER = Header(identity={"model.num_layers": 2, "rng.seed": 1234}, numerics={"mode": "tree"}, parameters=PARAMETERS)


def cell_step(step: int, *, digests: bool = True, **changes) -> StepRecord:
    kinds = ("gradients", "weights") if digests else ()
    return record(step, **{kind: {p.name: f"{step:032x}" for p in PARAMETERS} for kind in kinds} | changes)


def write_ledger(file: Path, header: Header, steps: int, **changes) -> None:
    """`changes` are those of step 2, or of step `at`."""
    at = changes.pop("at", 2)
    digests = changes.pop("digests", True) and bool(header.parameters)
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, header, (cell_step(n, digests=digests, **(changes if n == at else {})) for n in range(1, steps + 1)))


def cell_layout(tp: int) -> dict:
    return {"tp": tp, "pp": 1, "dp": 1, "sp": tp > 1}


def cell_header(tp: int, mode: str = "tree", **changes) -> Header:
    return replace(HEADER, layout=cell_layout(tp), numerics={"mode": mode}, **changes)


RUN_FILE = RunFile(
    model="qwen3_toy",
    overrides=(),
    device="cpu",
    layout={},
    identity=HEADER.identity,
    identity_hash=HEADER.identity_hash,
    attempts=(),
).as_json()


def a_matrix(folder: Path, *degrees: int, mode: str = "tree", against: str | None = None) -> SweepDir:
    """A directory whose cells have not run."""
    cells = tuple(
        Configuration(
            f"tp{tp}", f"tp={tp}", (f"tp={tp}",), tp, 3, HEADER.identity_hash, cell_layout(tp), {"mode": mode}
        )
        for tp in degrees
    )
    where = SweepDir(folder)
    axes = (Axis("tp", tuple(map(str, degrees))),)
    where.write_matrix(Sweep("qwen3_toy", (f"tp={','.join(map(str, degrees))}",), axes, cells, against))
    for cell in cells:  # as `tpi submit --verify` does
        run = where.cell(cell.name)
        run.write(run.run, RUN_FILE | {"overrides": [*cell.overrides, f"run.dir={run.path}", "launcher=slurm"]})
    return where


def run_cell(where: SweepDir, tp: int, steps: int = 3, mode: str = "tree", **changes) -> None:
    write_ledger(where.cell(f"tp{tp}").ledger, cell_header(tp, mode), steps, **changes)


def trained(folder: Path, *degrees: int, mode: str = "tree", against: str | None = None, **changes: dict) -> SweepDir:
    """A directory whose cells have run. changes: of cells' second steps, as in `tp2={"loss": OTHER}`; None: not run."""
    where = a_matrix(folder, *degrees, mode=mode, against=against)
    for tp in degrees:
        if (own := changes.get(f"tp{tp}", {})) is not None:
            run_cell(where, tp, mode=mode, **own)
    return where


OTHER = "f32:40c80001"
LOSS = {"loss": OTHER}


def attempted(run, *outcomes):
    """Have `run.json` list attempts: each an outcome and why."""
    attempts = [{"outcome": outcome, "why": why} for outcome, why in outcomes]
    run.write(run.run, json.loads(run.run.read_text()) | {"attempts": attempts})


def overridden(run, *overrides):
    run.write(run.run, RUN_FILE | {"overrides": overrides})


# How the cell of tp=4 fails beside two that do not.
def _torn(where):
    with where.cell("tp4").ledger.open("ab") as stream:
        stream.write(b'{"step": 3')


def _altered(where):
    file = where.cell("tp4").ledger
    file.write_text(file.read_text().replace("6.25", "6.26"))


def _written(where, **header):
    where.cell("tp4").ledger.unlink()
    write_ledger(where.cell("tp4").ledger, replace(cell_header(4), **header), 3)


def _true_for_first(where):
    raw = json.loads(where.matrix.read_text())
    raw["cells"][2]["layout"] |= {"pp": True}
    where.write(where.matrix, raw)


# Failure -> the steps that the cell has, and what is done to it.
RESUMED = {"resumed": [{"after_step": 1, "changed": {"layout.tp": 2}}]}
FAULTS = {
    "other overrides": (3, lambda where: overridden(where.cell("tp4"), "tp=2")),
    "more overrides": (
        3,
        lambda where: overridden(where.cell("tp4"), "tp=4", "+model.attention_backend=flash", "mbs=2"),
    ),
    "no run.json": (3, lambda where: where.cell("tp4").run.unlink()),
    "true for 1": (3, _true_for_first),
    "not run": (3, lambda where: where.cell("tp4").ledger.unlink()),
    "short": (2, lambda where: None),
    "torn": (2, _torn),
    "altered": (3, _altered),
    "copied": (3, lambda where: shutil.copy(where.cell("tp1").ledger, where.cell("tp4").ledger)),
    "resumed": (3, lambda where: _written(where, notes=RESUMED)),
    "seed": (3, lambda where: _written(where, identity={"rng.seed": 7})),
    "failed": (3, lambda where: attempted(where.cell("tp4"), ("failed", "rank 1 was killed"))),
    "stopped": (1, lambda where: attempted(where.cell("tp4"), ("stopped", None))),
}


def faults(folder: Path) -> Iterator[tuple[str, SweepDir]]:
    for second, changes in (("", {}), (" beside a difference", LOSS)):
        for number, (fault, (steps, plant)) in enumerate(FAULTS.items()):
            if not second or number % 4 == 0:
                where = trained(folder / f"{fault}{second}", 1, 2, 4, tp2=changes, tp4={"steps": steps})
                plant(where)
                yield f"{fault}{second}", where


def matrices(folder: Path) -> Iterator[tuple[str, SweepDir]]:
    yield "equal runs", trained(folder / "equal", 1, 2, 4)
    digests = {"weights": {PARAMETERS[0].name: "0" * 32, PARAMETERS[1].name: f"{2:032x}"}}
    yield "two that differ", trained(folder / "two", 1, 2, 4, tp2=digests, tp4=digests)
    yield "the second differs earlier", trained(folder / "earlier", 1, 2, 4, tp2=LOSS | {"at": 3}, tp4=LOSS)
    yield "stock in two degrees", trained(folder / "stock", 1, 2, mode="stock", tp2=LOSS)
    yield "one without digests", trained(folder / "digests", 1, 2, tp2={"digests": False})
    yield "the first did not run", trained(folder / "first", 1, 2, 4, tp1=None)
    yield "none ran", a_matrix(folder / "none", 1, 2)
    # The control of other overrides: keys that say where a run is, what it keeps, and its numerics.
    where = trained(folder / "elsewhere", 1, 2)
    added = ["numerics.virtual_shards=8", "save=5", "checkpoint.ckpt_step=3", "slurm.time=1:00:00", "cluster=mine"]
    overridden(where.cell("tp2"), "tp=2", *added)
    yield "one went on elsewhere", where
    for title, last in (("stopped", ()), ("resumed", (("completed", None),))):
        where = trained(folder / title, 1, 2)
        attempted(where.cell("tp1"), ("completed", None))
        attempted(where.cell("tp2"), ("stopped", None), *last)
        yield f"one was {title} after its last step", where


def ledgers(folder: Path) -> Iterator[tuple[str, SweepDir]]:
    """Cells that are compared with another ledger."""
    folder.mkdir()
    file = str(folder / "other.jsonl")

    def against(header: Header, steps: int = 3, *degrees: int, mode: str = "tree", **changes) -> SweepDir:
        Path(file).unlink(missing_ok=True)
        write_ledger(Path(file), header, steps, **changes)
        return trained(folder / f"{len([*folder.iterdir()])}", *(degrees or (1, 2)), mode=mode, against=file)

    yield "equal", against(replace(cell_header(8), device={"name": "another"}))
    yield "another", against(cell_header(8), 3, **LOSS)  # a file cannot be bisected
    yield "shorter", against(cell_header(8), 2)
    where = against(cell_header(8), 5)
    where.cell("tp1").ledger.unlink()
    run_cell(where, 1, steps=5)  # resumed beyond what was planned
    yield "longer than one of the cells", where
    yield "another experiment", against(replace(cell_header(8), identity={"rng.seed": 7}))
    yield "stock in one degree", against(cell_header(2, "stock"), 3, 2, mode="stock", **LOSS)


@pytest.mark.parametrize("group", (matrices, faults, ledgers), ids=lambda group: group.__name__)
def test_a_verdict_says_what_is_expected(here, group, data_regression):
    """As judging/ has it; `--regen-all` writes it anew. A cell that is not whole is never identical."""
    sentences = {}
    for title, where in group(here / "judged"):
        judged = judge(where.path)
        assert json.loads(where.result.read_text()) == judged.as_json()
        assert group is not faults or judged.exit_status == 2
        rows = [f"{row.label} on {row.ranks}: {row.words}" for row in judged.rows]
        verdict = {"line": judged.line, "exit_status": judged.exit_status, "rows": rows, "next": judged.advice}
        text = json.dumps(verdict | {"remarks": list(judged.remarks)})
        sentences[title] = json.loads(text.replace(str(where.path), "MATRIX"))
    data_regression.check(sentences, fullpath=Path(__file__).parent / "judging" / f"{group.__name__}.yml")


def test_a_ledger_that_moved_can_be_renamed(here):
    where = a_matrix(here / "m", 1, against=str(here / "gone.jsonl"))
    run_cell(where, 1)
    with pytest.raises(LedgerError, match=r"gone\.jsonl does not exist; name it again: --against FILE"):
        judge(where.path)
    write_ledger(here / "moved.jsonl", cell_header(8), 3)
    judged = judge(where.path, here / "moved.jsonl")
    assert judged.exit_status == 0
    assert "is bitwise identical to moved.jsonl over 3 steps" in judged.line
    assert judged.as_json()["against"] == str(here / "moved.jsonl")


def test_the_command_prints_a_table_a_line_and_json(cli, here):
    where = a_matrix(here / "m", 1, 2)
    run_cell(where, 1)
    run_cell(where, 2, loss="f32:40c80001")
    judged = cli("verify", "--recheck", "m")
    assert (judged.status, judged.err) == (1, "")
    head, *rows = judged.out.splitlines()[:3]  # in a pipe a table has no rules
    assert head.split() == ["configuration", "ranks", "steps", "last", "loss", "verdict"]
    assert [row.split() for row in rows] == [
        ["tp=1", "1", "3", "6.25", "reference"],
        ["tp=2", "2", "3", "6.25", "different", "at", "step", "2:", "loss"],
    ]
    assert "different: tp=2 is not bitwise identical to tp=1 at step 2: loss " in judged.out
    assert "continue with: tpi bisect m/tp1 m/tp2" in judged.out
    assert json.loads(cli("verify", "--recheck", "m", "--json").out) == json.loads(where.result.read_text())
