# SPDX-License-Identifier: Apache-2.0
"""`tpi generate`: one file for every layout, batch, order and chunk, and after a stop; with the bits of `tpi score`."""

import json
import os
import random
import signal

import pytest

from tests import hf_folders
from tests.distributed.commands.test_score import FOLDERS, write

pytestmark = pytest.mark.usefixtures("modelopt")

DRAWS = "max_tokens=3 do_sample=true top_k=0 n=2 seed=3"
DRAWN = {"do_sample": True, "top_k": 0, "n": 2, "seed": 3, "max_tokens": 3}
BOTH = "qwen3 both.jsonl max_tokens=6 --digest"  # drawn tokens, and greedy ones
LENGTHS = (3, 17, 70, 5)


def prompts():
    draw = random.Random(7)
    return [{"id": f"p{n}", "tokens": [draw.randrange(512) for _ in range(k)]} for n, k in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def folder(shared):
    for name, (model, dtype, overrides) in (FOLDERS | {"qwen25": ("qwen25_toy", "BF16", ())}).items():
        hf_folders.make(shared.folder / name, hf_folders.model_section(model, *overrides), dtype=dtype)
    write(shared.folder / "p.jsonl", prompts())
    greedy = [row | {"id": row["id"].replace("p", "g")} for row in prompts()]
    write(shared.folder / "both.jsonl", [*(row | DRAWN for row in prompts()), *greedy])
    return shared.folder


@pytest.fixture(scope="module")
def generated(shared, folder):
    """The bytes that a command's words write; each is run once."""
    result: dict[str, bytes] = {}

    def generate(words: str) -> bytes:
        if words not in result:
            out = f"{len(result)}.rollouts"
            shared("generate", *words.split(), "--out", out, status=0)
            result[words] = (folder / out).read_bytes()
        return result[words]

    return generate


def test_layouts_batches_and_chunks_have_one_file(generated):
    """And preemption: of a cache for two sequences. The control is greedy tokens."""
    whole = generated(BOTH)
    assert generated(f"{BOTH} tp=2 --batch 2 --chunk 30 --cache 192") == whole
    drawn, greedy = rows_of(whole)
    assert (len(drawn), len(greedy)) == (2 * len(LENGTHS), len(LENGTHS))
    tokens = {row["request"].replace("g", "p"): row["token_ids"][:3] for row in greedy}
    assert all(row["token_ids"] != tokens[row["request"]] for row in drawn)


def rows_of(both: bytes):
    rows = [json.loads(line) for line in both.splitlines()]
    return [[row for row in rows if row["request"].startswith(letter)] for letter in "pg"]


MORE = (
    ("qwen3", "--batch 8 --chunk 1"), ("qwen3", "tp=4 sp=false"), ("qwen3", "--no-graphs dp=2 tp=2"),
    ("moe", "ep=2 dp=2"), ("moe", "tp=2 ep=2 --batch 3 --chunk 20"),
)  # fmt: skip


@pytest.mark.release
@pytest.mark.parametrize("model, words", MORE)
def test_more_layouts_have_one_file(generated, model, words):
    assert generated(f"{model} p.jsonl {DRAWS} --digest {words}") == generated(f"{model} p.jsonl {DRAWS} --digest")


# Tied embeddings and scaled rotary positions; biases of queries, keys and values.
@pytest.mark.release  # in `make test`: test_rollout_engine.py, which compares with the forward pass of `tpi score`
@pytest.mark.parametrize("model", ("qwen3", "moe", "llama", "qwen25"))
def test_scores_at_another_layout_have_the_same_bits(shared, folder, generated, model):
    """Of every token, and of the whole vocabulary. Controls: other numerics, and one other token before."""
    generated(f"{model} p.jsonl {DRAWS} --digest")
    out = f"{model}-scored.rollouts"
    shared("generate", model, "p.jsonl", *DRAWS.split(), "--digest", "--out", out, status=0)
    result = shared("score", model, "tp=2", "--against", out, "--json", status=0)
    report = json.loads(result.stdout)
    count = sum(len(json.loads(line)["token_ids"]) for line in (folder / out).read_bytes().splitlines())
    assert report["summary"]["tokens"] == report["scored"] == report["digests"]["compared"] == count
    assert report["summary"]["largest"] == report["differing"] == report["digests"]["differing"] == 0
    tree = shared("score", model, "numerics=tree", "--against", out, "--out", f"{model}-tree", "--json", status=1)
    assert json.loads(tree.stdout)["differing"] > count // 2
    rows = [json.loads(line) for line in (folder / out).read_bytes().splitlines()]
    for row in rows:
        row["prompt_token_ids"][0] ^= 1
    write(folder / f"{model}-changed", rows)
    changed = shared("score", model, f"{model}-changed", "numerics=portable", "--against", out, "--json", status=1)
    assert json.loads(changed.stdout)["differing"] > count // 2


def test_greedy_tokens_are_those_of_transformers(folder, generated):
    """In fp32, where its two greatest logits do not tie but for bf16's rounding; drawn tokens are others."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32, attn_implementation="eager")

    def agreeing(rows) -> list[bool]:
        agree = []
        for row in rows:
            ids = torch.tensor([row["prompt_token_ids"] + row["token_ids"]])
            with torch.no_grad():
                top = model(ids).logits[0, len(row["prompt_token_ids"]) - 1 : -1].topk(2)
            untied = top.values[:, 0] - top.values[:, 1] > 0.02
            agree += (top.indices[:, 0] == torch.tensor(row["token_ids"]))[untied].tolist()
        return agree

    drawn, greedy = map(agreeing, rows_of(generated(BOTH)))
    assert all(greedy)
    assert len(greedy) > 6 * len(LENGTHS) * 3 // 4
    assert not all(drawn)


STOPPED = ((signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL))


@pytest.mark.release
@pytest.mark.parametrize("number, status", STOPPED)
def test_a_stopped_generation_resumes(shared, folder, generated, number, status):
    """After some completions and half a line, then in another layout."""
    words = ("qwen3", "p.jsonl", *DRAWS.split(), "--digest", "--batch", "1", "--out", f"cut-{number}")
    started = shared.start("generate", *words)
    part = folder / f"cut-{number}.partial" / "part-0.jsonl"
    started.until(lambda: part.exists() and part.read_bytes().count(b"\n") >= 2)
    os.kill(started.pid, number)
    assert started.wait() == status
    if number != signal.SIGKILL:
        assert "completions are written; --resume continues" in started.stderr
    kept = part.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 2 <= kept.count(b"\n") < 2 * len(LENGTHS)
    part.write_bytes(kept + b'{"id": "p')
    refused = shared("generate", *words, status=2).stderr
    assert f"has {kept.count(b'\n')} of {2 * len(LENGTHS)} completions: --resume, or remove it" in refused
    changed = [word.replace("seed=3", "seed=4") for word in words]
    assert "holds a part of other rollouts" in shared("generate", *changed, "--resume", status=2).stderr
    assert part.read_bytes().startswith(kept)
    shared("generate", *words, "--resume", "tp=2", status=0)
    assert (folder / f"cut-{number}").read_bytes() == generated(f"qwen3 p.jsonl {DRAWS} --digest")
    assert not part.parent.exists()


# Lines, values and configurations: tests/unit/features/rollouts.
REFUSED = (
    ("qwen3 p.jsonl numerics=tree pp=2", ("numerics=portable", "pp=1")),
    (
        "nowhere none.jsonl iters=3 max_token=3 n=1,2",
        (
            "nowhere: no such folder", "none.jsonl: no such file",
            "iters=3: tpi generate trains nothing and does not read it",
            "max_token=3: no such key; did you mean 'max_tokens'?", "n=1,2: one value, not a sweep",
        ),
    ),
    ("nowhere p.jsonl temperature=0.5", ("nowhere: no such folder", "has no effect without draws; do_sample=true")),
    ("qwen3 p.jsonl max_tokens=100000000", ("are more than the",)),
    ("qwen3 p.jsonl --cache 64", ("request p2: 70 tokens and max_new_tokens=20 are more than the 64",)),
    (
        "qwen3 unknown.jsonl stop=x",
        ("request b: token 512 is outside the model's vocabulary of 512", "stop_strings need a tokenizer"),
    ),
    ("qwen3 p.jsonl --out nowhere/x", ("is no folder",)),
)  # fmt: skip


@pytest.mark.parametrize("words, why", REFUSED)
def test_mistakes_are_one_message(shared, folder, words, why):
    write(folder / "unknown.jsonl", [{"id": "a", "tokens": [5]}, {"id": "b", "tokens": [512]}])
    out = () if "--out" in words else ("--out", "never")
    done = shared("generate", *words.split(), *out, status=2)
    assert [part for part in why if part not in done.stderr.replace("\n", " ")] == []
    assert "Traceback" not in done.stderr
    assert not (folder / "never.partial").exists()


@pytest.mark.release
def test_a_run_of_adapters_is_refused(shared, folder):
    """Its base alone would be completed. The control: a run without adapters."""
    words = ("qwen3_toy", "numerics=tree", "seq=32", "gbs=2", "iters=1", "save=1", "model.num_layers=1")
    shared("train", *words, "run.dir=whole", status=0)
    adapted = ("peft=lora", "checkpoint.pretrained_checkpoint=whole/checkpoints", "run.dir=lora")
    shared("train", *words, *adapted, status=0)
    for command, file in (("generate", "p.jsonl"), ("score", "p.jsonl")):
        refused = shared(command, "lora", file, "numerics=portable", "--out", "adapted", status=2).stderr
        assert "has adapters: tpi export lora FOLDER --merge, then name FOLDER" in refused
    shared("generate", "whole", "p.jsonl", "numerics=portable", "max_tokens=1", "--out", "whole.out", status=0)


# Layers without positions, positions of half a head and scaled, biases, embeddings that are the output's weights.
PARTS = (
    *("model.no_rope_freq=2", "model.rotary_percent=0.5", "model.rope_scaling=true", "model.add_qkv_bias=true"),
    *("model.qk_layernorm=false", "model.share_embeddings_and_output_weights=true", "model.softmax_scale=0.2"),
)


@pytest.mark.release
def test_parts_of_models_have_the_bits_of_their_scores(shared, folder):
    """Of a run's checkpoint, of another layout. The controls: other positions, and stock numerics."""
    words = ("qwen3_toy", "numerics=portable", "seq=32", "gbs=2", "iters=1", "save=1", "model.kv_channels=32")
    shared("train", *words, *PARTS, "tp=2", "run.dir=parts", status=0)
    shared("generate", "parts", "p.jsonl", *DRAWS.split(), "--digest", "--out", "parts.out", status=0)
    result = json.loads(shared("score", "parts", "tp=2", "--against", "parts.out", "--json", status=0).stdout)
    assert result["differing"] == result["digests"]["differing"] == 0
    assert result["scored"] == 2 * 3 * len(LENGTHS)
    for n, other in enumerate(("model.rotary_percent=1.0", "numerics=stock")):
        out = ("--against", "parts.out", "--out", f"parts.{n}", "--json")
        changed = shared("score", "parts", other, *out, status=1)
        assert json.loads(changed.stdout)["differing"] > 0


def test_a_dry_run_writes_nothing(shared, folder):
    done = shared("generate", "qwen3", "p.jsonl", "--out", "dry", "--dry-run", status=0)
    assert f"{len(LENGTHS)} completions of {len(LENGTHS)} prompts would be written" in done.stderr
    assert not [*folder.glob("dry*")]
