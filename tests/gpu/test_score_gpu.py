"""`tpi score` on one GPU and more: one file for all layouts and batches, and with numerics=portable that of a CPU."""

import json
import random

import pytest

from tests.gpu.side_by_side import EXPERTS, Run, Trained, gpus_for, marks

pytestmark = marks()

SMALL = "iters=2 gbs=2 save=2 seq=128 model.kv_channels=32 numerics.virtual_shards=2"
TRAINED = {
    "dense": f"qwen3_toy {SMALL}",
    "experts": f"{EXPERTS} {SMALL}",
}
LENGTHS = (40, 64, 64, 64, 130, 200, 200, 7, 64, 130)
# Name -> words after the run and the sequences.
SCORED = {
    "tree": "--ranks --entropy",
    "tree alone": "--ranks --entropy --batch-tokens 1",
    "tree of a few": "--ranks --entropy --batch-tokens 300",
    "tree tp=2": "--ranks --entropy tp=2",
    "tree tp=2 sp=false": "--ranks --entropy tp=2 sp=false",
    "tree dp=2": "--ranks --entropy dp=2",
    "tree pp=2": "--ranks --entropy pp=2",
    "portable": "--entropy numerics=portable",
    "portable tp=2": "--entropy numerics=portable tp=2",
    "portable on a CPU": "--entropy numerics=portable device=cpu",
    "stock": "numerics=deterministic",
    "stock tp=2": "numerics=deterministic tp=2",
}
ALONE = "tree tp=2 sp=false"  # of dense models: experts need sequence parallelism
PAIRS = [
    (model, name)
    for model in TRAINED
    for name in SCORED
    if name.split()[0] not in (name, "stock") and (model, name) != ("experts", ALONE)
]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """The file of each command."""
    folder = tmp_path_factory.mktemp("scores")
    draw = random.Random(0)
    rows = [{"id": n, "tokens": [draw.randrange(256) for _ in range(k)]} for n, k in enumerate(LENGTHS)]
    (folder / "s.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    runs = [Run(name, words, 1) for name, words in TRAINED.items()]
    for model in TRAINED:
        for name, words in SCORED.items():
            if (model, name) == ("experts", ALONE):
                continue
            out = f"{model} {name}".replace(" ", "-")
            command = f"score {model} s.jsonl {words} --out {out}"
            runs.append(Run(out, command, gpus_for(words), after=(model,)))
    return Trained.where_they_fit(folder, runs)


def scores(scored, model, name):
    return scored(f"{model} {name}".replace(" ", "-")).read_bytes()


@pytest.mark.parametrize("model, name", PAIRS)
def test_layouts_batches_and_machines_have_one_file(scored, model, name):
    assert scores(scored, model, name) == scores(scored, model, name.split()[0])


@pytest.mark.parametrize("model", TRAINED)
def test_numerics_have_several(scored, model):
    """The control: files are not equal whatever is computed."""
    bits = {
        name: [json.loads(line)["bits"] for line in scores(scored, model, name).splitlines()]
        for name in ("tree", "portable", "stock", "stock tp=2")
    }
    assert bits["tree"] != bits["stock"]
    assert bits["stock"] != bits["stock tp=2"]
