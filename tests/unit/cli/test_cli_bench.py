"""`tpi bench` up to the point where Bridge would be imported: mistakes cost nothing and leave nothing."""

import pytest

from tp_invariant_recipes.features.bench import workflow as bench

pytestmark = pytest.mark.usefixtures("here", "no_gpus")


# Arguments of `tpi bench`, and what must stand in the message.
MISTAKES = (
    (["qwen3_toi"], ["unknown model 'qwen3_toi'; did you mean 'qwen3_toy'?"]),
    (["qwen3_toy", "--modes", "stock,tre"], ["numerics=tre: unknown numerics 'tre'; did you mean 'tree'?"]),
    (["qwen3_toy", "--modes", "stock,tree,stock"], ["--modes: stock is named twice"]),
    (["qwen3_toy", "--modes", ","], ["--modes: name at least one, as in --modes stock,tree"]),
    (["qwen3_toy", "numerics=tree"], ["numerics=tree: a benchmark sets the mode itself; --modes stock,tree"]),
    (["qwen3_toy", "++train.train_iters=3"], ["++train.train_iters=3: a benchmark counts its own steps; --warmup N"]),
    (["qwen3_toy", "run.dir=x"], ["run.dir=x: a benchmark has its own directory; --dir PATH"]),
    (["qwen3_toy", "--modes", "tree,tree+digest"], ["numerics=tree+digest"]),
    (["qwen3_toy", f"--rounds={30 * '9'}"], [f"--rounds {30 * '9'}: must be at most 10000"]),
    (["qwen3_toy", "ledger.digests=0"], ["a mode says whether it records digests; --modes tree,tree+digests"]),
    (["qwen3_toy", "ledger.trace=1:1"], ["a benchmark traces no modules"]),
    (["qwen3_toy", "--dir", "taken"], ["--dir taken is there and is not an empty directory"]),
    (["qwen3_toy", "--dir", "taken/file"], ["--dir taken/file is a file"]),
    (["qwen3_toy", "device=gpu", "--modes", "stock"], ["device=gpu, but this machine shows no GPU"]),
    (["qwen3_toy", "numerics.virtual_shards=3"], ["numerics.virtual_shards=3: must be a power of two"]),
    (
        ["qwen3_toy", "gbs=3", "mbs=2", "numerics.virtual_shards=3", "iters=3", "save=2", "--rounds=0", "--steps=-1"],
        [
            "6 problems in this configuration",
            "--rounds 0: must be at least 1",
            "--steps -1: must be at least 1",
            "iters=3: a benchmark counts",
            "save=2: a benchmark saves no checkpoints",
            "gbs=3 is not a multiple",
            "numerics.virtual_shards=3: must be",
        ],
    ),
)  # fmt: skip


@pytest.mark.parametrize("arguments, says", MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_screen_and_leaves_nothing(cli, here, arguments, says):
    ended = cli("bench", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    for part in says:
        assert part in ended.err
        assert ended.err.count(part) == 1
    assert sorted(p.name for p in here.rglob("*")) == ["file", "taken"]


def planned_bench(**changes) -> bench.Bench:
    values = dict(rounds=2, warmup=1, steps=3, traced=False, directory=None)
    return bench.new("qwen3_toy", ["tp=2"], ["stock", "tree"], **values | changes)


def test_modes_take_turns():
    turns = [(pass_.mode, pass_.round, pass_.profile, pass_.steps) for pass_ in planned_bench().passes]
    assert turns == [("stock", 1, False, 4), ("tree", 1, False, 4), ("stock", 2, False, 4), ("tree", 2, False, 4)]


def test_traced_passes_come_after_all_rounds():
    passes = planned_bench(rounds=1, traced=True).passes
    assert [(pass_.mode, pass_.profile) for pass_ in passes] == [
        ("stock", False),
        ("tree", False),
        ("stock", True),
        ("tree", True),
    ]


def test_a_mode_records_digests_if_it_says_so():
    plans = bench.new(
        "qwen3_toy", [], ["tree", "tree+digests"], rounds=1, warmup=0, steps=1, traced=False, directory=None
    ).plans
    assert {mode: plan.config.numerics.mode for mode, plan in plans.items()} == {
        "tree": "tree",
        "tree+digests": "tree",
    }
    assert {mode: plan.config.ledger.digests for mode, plan in plans.items()} == {"tree": 0, "tree+digests": 1}


def test_each_mode_has_its_own_configuration_and_nothing_is_written(here):
    before = sorted(here.rglob("*"))
    plans = planned_bench().plans
    assert {mode: plan.config.numerics.mode for mode, plan in plans.items()} == {"stock": "stock", "tree": "tree"}
    for item in plans.values():
        assert item.config.section("checkpoint")["save_interval"] == 0
        assert item.config.train["train_iters"] == 4
        assert item.config.train["exit_signal_handler"] is False
    assert planned_bench().directory.path.parts[0] == "runs"
    assert planned_bench().directory.path.name.startswith("bench-qwen3_toy-tp2-")
    assert sorted(here.rglob("*")) == before
