# SPDX-License-Identifier: Apache-2.0
"""Mistakes in commands that train: each is one message before Bridge would be imported, and leaves nothing."""

import json

import pytest

LORA = ("qwen3_moe_toy", "tp=2", "peft=lora", "checkpoint.pretrained_checkpoint=nowhere")

# Arguments of a command on a machine without a GPU, and what must stand in the message, each once.
TRAIN = (
    (["qwen3_toi"], ["unknown model 'qwen3_toi'; did you mean 'qwen3_toy'?"]),
    (["qwen3_toy", "tp=3", "gbs=3", "mbs=2", "lr=x"], ["4 problems", "can be 1, 2, 4, 8\n", "seq=128", "gbs=3", "lr="]),
    (["qwen3_toy", "device=gpu"], ["device=gpu, but this machine shows no GPU", "Transformer Engine"]),
    (["qwen3_toy", "data=text", "data.path=no/such"], ["error: data.path=no/such: "]),
    (["qwen3_toy", "run.dir=taken"], ["run.dir=taken is not empty: choose another run.dir"]),
    ([], ["name a model to train (tpi models lists them), or a run to continue: --resume RUN"]),
    (["tp=2", "qwen3_toy"], ["the model comes first: MODEL tp=2", "'qwen3_toy' is not KEY=VALUE\n"]),
    (["--resume", "nowhere"], ["nowhere is not a run directory: run.json: No such file"]),
)  # fmt: skip
BENCH = (
    (["qwen3_toy", "--modes", "stock,tre"], ["--modes stock,tre: name modes once each, of stock, deterministic"]),
    (["qwen3_toy", "--modes", "tree,tree+digest"], ["--modes tree,tree+digest: name", "each with +digests, +guard"]),
    (["qwen3_toy", "--dir", "taken"], ["--dir taken is there and is not an empty directory"]),
    (
        ["qwen3_toy", "gbs=3", "mbs=2", "numerics.virtual_shards=3", "iters=3", "save=2"],
        [
            "4 problems in this configuration",
            "iters=3: a benchmark counts",
            "save=2: a benchmark saves no checkpoints",
            "gbs=3 is not a multiple",
            "numerics.virtual_shards=3: must be",
        ],
    ),
)  # fmt: skip
AUDIT = (
    (["qwen3_toy"], ["qwen3_toy is its own reference", "--against KEY=VALUE"]),
    (
        ["qwen3_moe_toy", "dp=2", "ep=2", "gbs=2", "model.overlap_moe_expert_parallel_comm=true"],
        ["error: overlap_moe_expert_parallel_comm=true: an audit reads whole layers; "
            "model.overlap_moe_expert_parallel_comm=false\n"],
    ),
    (
        ["qwen3_moe_toy", "dp=2", "ep=2", "gbs=2", "comm_overlap.tp_comm_overlap=false",
            "comm_overlap.overlap_moe_expert_parallel_comm=true"],
        ["error: overlap_moe_expert_parallel_comm=true: an audit reads whole layers; "
            "comm_overlap.overlap_moe_expert_parallel_comm=null\n"],
    ),
    (["qwen3_toy", "tp=2", "model.hidden_dropout=0.1"], ["dropout draws other numbers in every layout"]),
    (["qwen3_toy", "tp=2", "--reference", "dp=2", "--against", "pp=2"], ["--reference and --against"]),
    (["qwen3_toy", "tp=2", "--reference", "iters=2"], ["--reference iters=2: both train for as long"]),
    (["qwen3_moe_toy", "tp=2", "etp=2"], ["etp=2: every layout would begin with other experts; etp=1"]),
    (
        [*LORA, "numerics.initial_weights=megatron"],
        [
            "adapters of experts begin with other weights",
            "peft.target_modules=[linear_qkv,linear_proj], or numerics=tree",
        ],
    ),
    ([*LORA, "numerics=tree"], ["error: checkpoint.pretrained_checkpoint=nowhere: "]),
    (["--recorded", "a", "b", "tp=2"], ["trains nothing; leave out tp=2"]),
    (["--recorded", "a", "b"], ["a and b have no step in common"]),
    (["qwen3_toy", "--resume-at", "0"], ["--resume-at 0: the first step that a training can save is 1"]),
    (["qwen3_toy", "--resume-at", "3", "iters=3"], ["--resume-at 3: no step of iters=3 follows; iters=5"]),
    (["qwen3_toy", "--resume-at", "2", "save=2"], ["save=2: the audit saves at step K of --resume-at"]),
    (["qwen3_toy", "--resume-at", "2", "checkpoint.ckpt_format=fsdp_dtensor"], ["checkpoint.ckpt_format=torch_dist"]),
    (["qwen3_toy", "--resume-at", "2", "checkpoint.save_rng=false"], ["a run could not be resumed"]),
    (["qwen3_toy", "--resume-at", "2", "--against", "tp=2"], ["in one layout; leave out tp=2"]),
    (["qwen3_toy", "--resume-at", "0", "--all"], ["--resume-at 0: the first step that a training can save is 1"]),
    (["qwen3_toy", "--card"], ["--card describes a resume of one configuration"]),
    ([], ["missing MODEL"]),
    (["qwen3_toy", "--dir", "taken", "--against", "tp=2"], ["--dir taken is there and is not an empty directory"]),
    (
        ["qwen3_toy", "save=2", "gbs=3", "mbs=2", "ledger.trace=1:1"],
        [
            "3 problems",
            "save=2: an audit saves no checkpoints",
            "an audit records every module itself",
            "gbs=3 is not a multiple",
        ],
    ),
)  # fmt: skip
VERIFY = (
    ([], ["name a model to verify"]),
    (["qwen3_toy", "tp=2"], ["a sweep of one configuration compares nothing", "as in tp=1,2,4", "--against FILE"]),
    (["qwen3_toy", "tp=1,2", "--dir", "taken"], ["--dir taken is there and is not an empty directory"]),
    (["qwen3_toy", "tp=1,2,1"], ["tp=1,2,1: 1 is given twice"]),
    (
        ["qwen3_toy", "tp=1,2", "model.tensor_model_parallel_size=4"],
        ["tp has several values and is given twice"],
    ),
    (["qwen3_toy", "tp=range(1,9,0)"], ["tp=range(1,9,0): ", "list the values, as in tp=1,2,4"]),
    (["qwen3_toy", "tp=range(1,100000000)"], ["more than 100 configurations"]),
    (["qwen3_toy", "tp=range(1,13)", "pp=range(1,13)"], ["tp=range(1,13) pp=range(1,13): more than 100 "
        "configurations"]),
    (["qwen3_toy", "tp=1,2", "seed=1,2"], ["seed=1,2 makes different runs: ", "rng.seed", "not comparable"]),
    (["qwen3_toy", "iters=3,4"], ["iters=3,4 makes different runs: scheduler.lr_decay_iters differs"]),
    (["qwen3_toy", "device=cpu,gpu"], ["device=gpu: device=gpu, but this machine shows no GPU"]),
    (["qwen3_toy", "tp=1", "--against", "none"], ["--against: none does not exist"]),
    (["qwen3_toy", "tp=1", "--against", "taken/file"], ["--against: taken/file line 1: empty file"]),
    (["--recheck", "taken"], ["taken is not a directory of tpi verify: matrix.json"]),
    (["--recheck", "taken", "--dir", "x"], ["leave MODEL, overrides, --dir and --exitfirst out"]),
    (
        ["qwen3_toy", "tp=1,3,5", "seed=1,2", "gbs=3", "mbs=2", "foo=3", "run.dir=x", "pp=2,2"],
        [
            "run.dir=x: every configuration has its own run directory",
            "--dir PATH",
            "pp=2,2: 2 is given twice",
            "foo=3: unknown key 'foo'",
            "  - gbs=3 is not a multiple",
            "tp=3 seed=1; tp=3 seed=2: tp=3 does not divide",
            "tp=5 seed=1; tp=5 seed=2: tp=5 does not divide",
        ],
    ),
)  # fmt: skip
SCORE = (
    (["taken", "none.jsonl"], ["2 problems", "taken: neither a run directory nor a H", "none.jsonl: No such file"]),
)
COMMANDS = {"train": TRAIN, "bench": BENCH, "audit": AUDIT, "verify": VERIFY, "score": SCORE}
ROWS = [(command, *row) for command, rows in COMMANDS.items() for row in rows]


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("command, arguments, says", ROWS, ids=[" ".join((c, *words)) for c, words, _ in ROWS])
def test_a_mistake_is_one_screen_and_leaves_nothing(cli, here, command, arguments, says):
    ended = cli(command, *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) < 24
    assert {part: ended.err.count(part) for part in says} == dict.fromkeys(says, 1)
    assert sorted(p.name for p in here.rglob("*")) == ["file", "taken"]
    assert not (here.parent / "cache" / "tpi" / "data").exists()


@pytest.mark.parametrize("trace", ("3", "3:3"))
def test_one_traced_step_needs_no_quotes(cli, here, trace):
    shown = json.loads(cli("show", "qwen3_toy", f"ledger.trace={trace}", "--json").out)
    assert shown["configuration"]["ledger"]["trace"] == trace
    assert "ledger.trace=4:3" in cli("show", "qwen3_toy", "ledger.trace=4:3").err


# --- a key in the form of another program, or a model in other letters ---

# Arguments of `tpi train`, and what the message says.
FORMS = (
    ("qwen3_toy --tp 2", "A key has no dashes: write tp=2."),
    ("--tp 2 qwen3_toy", "A key has no dashes: write tp=2."),
    ("qwen3_toy --learning-rate 3e-4", "A key has no dashes: write lr=3e-4."),
    ("qwen3_toy --seed=\x1b]0;x", "A key has no dashes: write seed=\\x1b]0;x."),
    ("qwen3_toy --numerics stock", "A key has no dashes: write numerics=stock."),
    ("qwen3_toy tp 2", "tp 2: write tp=2"),
    ("qwen3_toy TP 2 seed=3", "TP 2: write tp=2"),
    ("qwen3_toy num_layers 3", "num_layers 3: write model.num_layers=3"),
    ("qwen3_toy global_batch_size=3", "unknown key 'global_batch_size'; did you mean 'gbs'?"),
    ("qwen3_toy batch_size=3", "unknown key 'batch_size'; did you mean 'mbs' or 'gbs'?"),
    ("qwen3_toy num_layers=3", "unknown key 'num_layers'; did you mean 'model.num_layers'?"),
    ("Qwen/Qwen3-8B", "unknown model 'Qwen/Qwen3-8B'; did you mean 'qwen3_8b'?"),
    ("tp=2", "unknown model 'tp=2'; the model comes first: MODEL tp=2"),
)


@pytest.mark.parametrize("arguments, says", FORMS)
def test_the_message_has_the_nearest_correct_form(cli, here, no_gpus, arguments, says):
    ended = cli("train", *arguments.split())
    assert (ended.status, ended.out) == (2, "")
    assert says in " ".join(ended.err.replace("\u2502", " ").split())
    assert "problems" not in ended.err


@pytest.mark.parametrize("arguments", ("qwen3_toy --foo 3", "qwen3_toy foo=3", "qwen3_toy foo bar", "qwen3_toy x=3"))
def test_a_word_that_means_nothing_gets_no_hint(cli, here, no_gpus, arguments):
    ended = cli("train", *arguments.split())
    assert ended.status == 2
    assert "did you mean" not in ended.err
    assert "write" not in ended.err
