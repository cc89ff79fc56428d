"""`tpi generate` on one GPU and more: one file for layouts, batches, chunks, graphs, preemption, and for a CPU.

The order of requests decides the order of lines alone.
"""

import json
import random

import pytest

from tests.gpu.side_by_side import EXPERTS, Run, Trained, gpus_for, marks

pytestmark = marks()

SMALL = "numerics=portable iters=2 gbs=2 save=2 seq=128 model.kv_channels=32 numerics.virtual_shards=2"
TRAINED = {
    "dense": f"qwen3_toy {SMALL}",
    "experts": f"{EXPERTS} {SMALL}",
}
LENGTHS = (3, 40, 64, 130, 7, 200)
DRAWS = "max_tokens=30 do_sample=true top_k=50 top_p=0.95 temperature=0.9 n=2 seed=1 --digest"
# Name -> words after the run and the prompts.
WORDS = {
    "graphs": "",
    "no graphs": "--no-graphs",
    "alone": "--batch 1",
    "preempted": "--batch 8 --chunk 7 --cache 512",
    "tp": "tp=2",
    "dp": "dp=2 --batch 3",
    "CPU": "device=cpu",
    "seed": "seed=2",  # the control
}
ONLY_EXPERTS = {"ep": "dp=2 ep=2", "tp ep": "tp=2 ep=2"}
SCORED = {"score": "", "score tp": "tp=2", "stock": "numerics=deterministic", "tree": "numerics=tree"}
CONTROLS = ("stock", "tree")


def named(model, name):
    return f"{model} {name}".replace(" ", "-")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file of each command."""
    folder = tmp_path_factory.mktemp("rollouts")
    draw = random.Random(0)
    rows = [{"id": n, "tokens": [draw.randrange(256) for _ in range(k)]} for n, k in enumerate(LENGTHS)]
    for row in rows[::2]:  # a CUDA graph without filters, beside one with them
        row |= {"top_k": 0, "top_p": 1.0}
    for name, order in (("p.jsonl", 1), ("turned.jsonl", -1)):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows[::order]))
    runs = [Run(name, words, 1) for name, words in TRAINED.items()]
    for model in TRAINED:
        for name, words in (WORDS | (ONLY_EXPERTS if model == "experts" else {})).items():
            draws = DRAWS.replace("seed=1", words) if name == "seed" else f"{DRAWS} {words}"
            command = f"generate {model} p.jsonl {draws} --out {named(model, name)}"
            runs.append(Run(named(model, name), command, gpus_for(words), after=(model,)))
        command = f"generate {model} turned.jsonl {DRAWS} --out {named(model, 'turned')}"
        runs.append(Run(named(model, "turned"), command, 1, after=(model,)))
        for name, words in SCORED.items():
            rollouts, out = named(model, "graphs"), named(model, name)
            command = f"score {model} {words} --against {rollouts} --tolerance 100 --out {out} --digest"
            runs.append(Run(out, command, gpus_for(words), after=(rollouts,)))
    return Trained.where_they_fit(folder, runs)


PAIRS = [
    (model, name)
    for model in TRAINED
    for name in (*WORDS, *(ONLY_EXPERTS if model == "experts" else ()))
    if name not in ("graphs", "seed")
]


@pytest.mark.parametrize("model, name", PAIRS)
def test_layouts_batches_and_machines_have_one_file(written, model, name):
    assert written(named(model, name)).read_bytes() == written(named(model, "graphs")).read_bytes()


@pytest.mark.parametrize("model", TRAINED)
def test_the_order_of_requests_has_no_effect(written, model):
    turned, lines = (written(named(model, name)).read_bytes().splitlines() for name in ("turned", "graphs"))
    assert sorted(turned) == sorted(lines)
    assert turned != lines


def rows(written, model, name):
    return [json.loads(line) for line in written(named(model, name)).read_bytes().splitlines()]


@pytest.mark.parametrize("model", TRAINED)
def test_another_seed_draws_other_tokens(written, model):
    tokens, others = ([row["token_ids"] for row in rows(written, model, name)] for name in ("graphs", "seed"))
    assert all(mine != other for mine, other in zip(tokens, others, strict=True))


@pytest.mark.parametrize("name", ("score", "score tp"))
@pytest.mark.parametrize("model", TRAINED)
def test_scores_have_the_same_bits(written, model, name):
    """Of drawn tokens and of the whole vocabulary; other numerics have not."""
    generated = rows(written, model, "graphs")
    for column in ("bits", "digests"):
        columns = [row[column] for row in generated]
        assert [row[column] for row in rows(written, model, name)] == columns
        for control in CONTROLS:
            assert [row[column] for row in rows(written, model, control)] != columns
