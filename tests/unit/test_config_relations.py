"""Numbers out of their range, sizes that do not fit each other, keys that a run would replace: each is one problem.

Every row trained, or ended in a traceback or an error of a library, before there was a rule.
"""

from pathlib import Path

import pytest

from tp_invariant_recipes.config import bounds, relations
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse, parse_all
from tp_invariant_recipes.errors import ConfigError, TpiError
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.settings import layout

PRECISION_AWARE = "optimizer.use_precision_aware_optimizer"

# Model, override, what is said. The first rows are those that were reported, then others of their kind.
REFUSED = (
    ("qwen3_toy", "tokenizer.vocab_size=-1", "tokenizer.vocab_size=-1: must be at least 1"),
    ("qwen3_toy", "optimizer.clip_grad=-1", "optimizer.clip_grad=-1: must be at least 0"),
    ("qwen3_toy", "optimizer.clip_grad=nan", "optimizer.clip_grad=nan: must be a finite number"),
    ("qwen3_toy", "model.hidden_size=7", "model.hidden_size=7: must be a multiple of 8; the next that is: 8"),
    ("qwen3_toy", "seq=0", "seq=0: must be at least 1"),
    ("qwen3_toy", "lr=inf", "lr=inf: must be a finite number"),
    ("qwen3_toy", "lr=1e400", "lr=inf: must be a finite number"),
    ("qwen3_toy", "model.num_layers=0", "model.num_layers=0: must be at least 1"),
    ("qwen3_toy", "model.num_query_groups=0", "model.num_query_groups=0: must be at least 1"),
    ("qwen3_toy", "model.num_attention_heads=3", "model.num_attention_heads=3 is not a multiple of model.num_query_gr"),
    ("qwen3_toy", "rng.seed=-5", "seed=-5: must be from 1 to 4278190080"),
    ("qwen3_toy", "checkpoint.load=nope", "checkpoint.load=nope: tpi train --resume RUN continues a run"),
    ("qwen3_toy", "seed=0", "seed=0: must be from 1 to 4278190080"),
    ("qwen3_toy", "save=-1", "save=-1: must be at least 0"),
    ("qwen3_toy", "model.attention_dropout=2", "model.attention_dropout=2: must be at least 0 and below 1"),
    ("qwen3_toy", "optimizer.adam_beta2=1.0", "optimizer.adam_beta2=1.0: must be at least 0 and below 1"),
    ("qwen3_toy", "optimizer.adam_eps=0", "optimizer.adam_eps=0: must be above 0"),
    ("qwen3_toy", "optimizer.weight_decay=-0.1", "optimizer.weight_decay=-0.1: must be at least 0"),
    ("qwen3_toy", "scheduler.lr_warmup_iters=50", "scheduler.lr_warmup_iters=50 is not below iters=50"),
    ("qwen3_toy", "scheduler.lr_warmup_iters=-1", "scheduler.lr_warmup_iters=-1: must be at least 0"),
    ("qwen3_toy", "mbs=8", "gbs=4 is not a multiple of mbs * dp = 8 * 1"),
    ("qwen3_toy", "validation.eval_interval=5", "validation.eval_interval without validation.eval_iters"),
    ("qwen3_toy", "validation.eval_iters=-1", "validation.eval_iters=-1: must be at least 0"),
    ("qwen3_toy", "tokenizer.vocab_size=513", "tokenizer.vocab_size=513 is more than model.vocab_size=512"),
    ("qwen3_toy", "logger.log_interval=0", "logger.log_interval=0: must be at least 1"),
    ("qwen3_toy", "train.exit_interval=0", "train.exit_interval=0: must be at least 1"),
    ("qwen3_toy", "dist.distributed_timeout_minutes=0", "dist.distributed_timeout_minutes=0: must be at least 1"),
    ("qwen3_toy", "checkpoint.save=x", "checkpoint.save=x: checkpoints go to run.dir/checkpoints"),
    ("qwen3_toy", "dataset.path_to_cache=x", "dataset.path_to_cache=x: the index of the data goes to run.dir"),
    ("qwen3_toy", "slurm.tries=0", "slurm.tries=0: must be at least 1"),
    ("qwen3_toy", "dataset.reset_attention_mask=true", "dataset.reset_attention_mask=true: Megatron-Bridge trains wit"),
    ("qwen3_moe_toy", "model.moe_router_topk=9", "model.moe_router_topk=9 is more than model.num_moe_experts=8"),
    ("qwen3_moe_toy", "model.num_moe_experts=0", "model.num_moe_experts=0: must be at least 1"),
    ("qwen3_toy", f"{PRECISION_AWARE}=true", f"{PRECISION_AWARE}=true: it is Transformer Engine's Adam; "),
)


@pytest.mark.parametrize("model, override, says", REFUSED, ids=[row[1] for row in REFUSED])
def test_a_rule_names_the_key(model, override, says):
    tree = compose(model, device="cpu", numerics="stock").tree
    one = parse(override)
    section, _, name = one.path.partition(".")
    tree[section][name] = one.parsed.value()
    (problem,) = bounds.wrong(tree).values() or relations.problems(tree) or layout.problems(tree)
    assert problem.startswith(says)


ROWS = [row if n % 6 == 0 else pytest.param(*row, marks=pytest.mark.release) for n, row in enumerate(REFUSED)]


@pytest.mark.parametrize("model, override, says", ROWS, ids=[row[1] for row in REFUSED])
def test_the_run_has_this_problem_alone(model, override, says):
    with pytest.raises(ConfigError) as refused:
        compose(model, [override], device="cpu", numerics="stock")
    (problem,) = refused.value.problems
    assert problem.startswith(says)


# The nearest that is right, of each kind.
TAKEN = ("optimizer.clip_grad=0", "model.hidden_size=136", "seed=1", "lr=0.001", "model.attention_dropout=0.99")
TAKEN += ("optimizer.adam_beta2=0.0", "scheduler.lr_warmup_iters=49", "model.num_query_groups=4", "save=0")
TAKEN += ("optimizer.grad_norm_skip_threshold=inf", "checkpoint.most_recent_k=-1", "tokenizer.null_tokenizer_pad_id=-1")
TAKEN += ("tokenizer.vocab_size=512", "validation.eval_iters=1", "model.num_attention_heads=16")


def test_what_is_just_right_is_taken():
    compose("qwen3_toy", TAKEN, device="cpu", numerics="stock")


def test_a_head_size_frees_the_heads_from_the_hidden_size():
    heads = ["model.num_attention_heads=6", "model.num_query_groups=6"]
    compose("qwen3_toy", [*heads, "model.kv_channels=16"], device="cpu", numerics="stock")
    with pytest.raises(ConfigError, match=r"hidden_size=128 is not .*num_attention_heads=6.*kv_channels"):
        compose("qwen3_toy", [*heads, "model.kv_channels=null"], device="cpu", numerics="stock")


def test_a_precision_aware_optimizer_is_a_distributed_one():
    tree = compose("qwen3_toy", device="gpu", numerics="stock").tree
    tree["optimizer"]["use_precision_aware_optimizer"] = True
    assert relations.problems(tree) == []
    tree["optimizer"]["use_distributed_optimizer"] = False
    (problem,) = relations.problems(tree)
    assert problem.endswith("or optimizer.use_distributed_optimizer=true")


def test_all_are_listed_at_once():
    with pytest.raises(ConfigError) as refused:
        compose("qwen3_toy", ["lr=nan", "model.num_layer=3", "model.num_attention_heads=3", "seq=0"], device="cpu")
    assert len(refused.value.problems) >= 4


def test_a_number_of_a_file_is_refused_beside_one_that_is_typed(tmp_path):
    (tmp_path / "config" / "tpi" / "model").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - qwen3_toy\nmodel:\n  num_layers: 0\n"
    (tmp_path / "config" / "tpi" / "model" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose("mine", ["lr=nan"], device="cpu")
    assert list(refused.value.problems) == ["lr=nan: must be a finite number", "model.num_layers=0: must be at least 1"]


def test_each_field_has_one_range():
    rows = [path for sections in bounds.RANGES.values() for s, names in sections.items() for path in _paths(s, names)]
    assert len(rows) == len({*rows})


def _paths(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


# --- folders and runs ---------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "latest_train_state.pt").touch()
    return tmp_path


FOLDERS = (
    ("a.txt", "is a file; name the folder of the checkpoint"),
    ("none", "there is no such folder"),
    ("empty", "holds no checkpoint of Megatron-Bridge"),
    ("some", None),
)


@pytest.mark.parametrize("path, why", FOLDERS)
def test_weights_to_begin_with_must_be_there(here, path, why):
    asked = plan.Request("qwen3_toy", tuple(parse_all([f"checkpoint.pretrained_checkpoint={path}"])))
    if why is None:
        asked.plan(asked.composed("cpu"))
        return
    with pytest.raises(ConfigError) as refused:
        asked.plan(asked.composed("cpu"))
    assert str(refused.value).startswith(f"checkpoint.pretrained_checkpoint={path}: {why}")
    assert not (here / "runs").exists()


def test_weights_in_the_home_folder_are_found(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    asked = plan.Request("qwen3_toy", tuple(parse_all(["checkpoint.pretrained_checkpoint=~/some"])))
    planned = asked.plan(asked.composed("cpu"))
    assert planned.tree["checkpoint"]["pretrained_checkpoint"] == str(here / "some")


@pytest.mark.parametrize("where, refused", (("other", True), ("./a/../run", False), ("run", False), ("null", True)))
def test_a_resumed_run_stays_where_it_is(here, where, refused):
    asked = plan.Request(None, tuple(parse_all([f"run.dir={where}"])), resume=Path("run"))
    with pytest.raises(TpiError) as error:  # there is no run in either case
        asked.composed("cpu")
    assert ("--resume run goes on in run: leave out run.dir=" in str(error.value)) == refused


def test_a_step_to_begin_at_needs_a_run(here):
    asked = plan.Request("qwen3_toy", tuple(parse_all(["checkpoint.ckpt_step=5"])))
    with pytest.raises(ConfigError, match=r"checkpoint\.ckpt_step=5: a new run begins at step 0"):
        asked.plan(asked.composed("cpu"))


# --- options and overrides ----------------------------------------------------------------------------------

CONTRADICTING = (
    ("--trace 1:2 ledger.trace=2:3", "--trace 1:2 and ledger.trace=2:3"),
    ("ledger.trace=null --trace 1:2", "--trace 1:2 and ledger.trace=null"),
    ("--launcher local launcher.kind=slurm", "--launcher local and launcher.kind=slurm"),
    ("--resume run ledger.trace=2:3 --trace 1:2", "--trace 1:2 and ledger.trace=2:3"),
    ("--cluster-file site.yaml cluster=h100", "--cluster-file"),
)


@pytest.mark.parametrize("words, says", CONTRADICTING)
def test_an_option_and_an_override_that_contradict(cli, here, words, says):
    ended = cli("train", *([] if "--resume" in words else ["qwen3_toy"]), *words.split())
    assert ended.status == 2
    assert ended.err.startswith(f"error: {says}")
    assert ended.err.endswith("contradict each other; give one of them\n")


def test_an_option_and_an_override_that_agree(cli, here):
    ended = cli("train", "qwen3_toy", "--trace", "1:2", "ledger.trace=1:2", "iters=1")
    assert ended.err == "error: ledger.trace=1:2: the run ends at step 1; raise iters or trace less\n"


OF_SOME_RUNS = (
    (("dataset.blend=[[a],null]", "data=text", "data.path=a.txt"), "dataset.blend="),
    (("logger.tensorboard_dir=x", "logging=tensorboard"), "logger.tensorboard_dir=x"),
    (("logger.wandb_exp_name=x", "logging=wandb"), "logger.wandb_exp_name=x"),
    (("logger.tensorboard_dir=x",), None),
)


@pytest.mark.parametrize("overrides, says", OF_SOME_RUNS, ids=str)
def test_what_only_some_runs_replace(overrides, says):
    tree = compose("qwen3_toy", device="cpu").tree
    for one in map(parse, overrides):
        section, _, name = one.field.partition(".")
        tree[section][name] = one.parsed.value()
    assert [problem.startswith(says) for problem in relations.problems(tree)] == ([True] if says else [])
