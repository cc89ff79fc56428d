# SPDX-License-Identifier: Apache-2.0
"""`tpi score` and `tpi generate` on one GPU and more: one file for layouts, batches, chunks, graphs, preemption, a CPU.

The order of requests decides the order of lines alone.
"""

import json
import random

import pytest

from tests.gpu.side_by_side import EXPERTS, Run, Trained, folder_of, gpus_for, marks

pytestmark = marks()

SMALL = "iters=2 gbs=2 save=2 seq=128 model.kv_channels=32 numerics.virtual_shards=2"
_SHORT = "iters=1 gbs=1 save=1 seq=32 numerics.virtual_shards=2"
PLAIN = {"dense": f"qwen3_toy {SMALL}", "experts": f"{EXPERTS} {SMALL}"}
# Of caches that are no plain keys.
CACHES = {"mla": f"moonlight_toy {_SHORT}", "delta": f"qwen3_next_toy {_SHORT} model.mtp_num_layers=null"}
MODELS = PLAIN | CACHES
SCORED, PROMPTS = (40, 64, 64, 64, 130, 200, 200, 7, 64, 130), (3, 40, 64, 130, 7, 200)  # lengths
DRAWS = "max_tokens=30 do_sample=true top_k=50 top_p=0.95 temperature=0.9 n=2 seed=1 --digest"
_TREE, _PORTABLE = "s.jsonl --ranks --entropy", "s.jsonl --entropy numerics=portable"
# The file of one command -> those that must have its bytes: name -> command, and words after the run.
SAME = {
    "tree": {
        "tree": f"score {_TREE}", "tree alone": f"score {_TREE} --batch-tokens 1",
        "tree of a few": f"score {_TREE} --batch-tokens 300",
        **{f"tree {layout}": f"score {_TREE} {layout}" for layout in ("tp=2", "tp=2 sp=false", "dp=2", "pp=2")},
    },
    "portable": {
        "portable": f"score {_PORTABLE}", "portable tp=2": f"score {_PORTABLE} tp=2",
        "portable on a CPU": f"score {_PORTABLE} device=cpu",
    },
    "graphs": {
        name: f"generate p.jsonl {DRAWS} {words}"
        for name, words in {
            "graphs": "", "no graphs": "--no-graphs", "alone": "--batch 1",
            "preempted": "--batch 8 --chunk 7 --cache 512", "tp": "tp=2", "dp": "dp=2 --batch 3", "CPU": "device=cpu",
            "ep": "dp=2 ep=2", "tp ep": "tp=2 ep=2",
            "ep without graphs": "dp=2 ep=2 --no-graphs", "tp ep without graphs": "tp=2 ep=2 --no-graphs",
        }.items()
    },
}  # fmt: skip
# Controls, and what is compared in part.
OTHERS = {
    "stock": "score s.jsonl numerics=deterministic", "stock tp=2": "score s.jsonl numerics=deterministic tp=2",
    "seed": f"generate p.jsonl {DRAWS.replace('seed=1', 'seed=2')}", "turned": f"generate turned.jsonl {DRAWS}",
    **{
        f"against {words}": f"score graphs {words} --tolerance 100 --digest"
        for words in ("numerics=portable", "numerics=portable tp=2", "numerics=deterministic", "numerics=tree")
    },
}  # fmt: skip
COMMANDS = {name: words for group in SAME.values() for name, words in group.items()} | OTHERS
EXPERTS_ONLY = ("ep", "tp ep", "ep without graphs", "tp ep without graphs")
DENSE_ONLY = ("tree tp=2 sp=false",)  # experts need sequence parallelism
AGAINST = ("numerics=portable", "numerics=portable tp=2", "numerics=tree")
OF_CACHES = (*SAME["graphs"], *(f"against {words}" for words in AGAINST))


def covers(model, name):
    if model in CACHES:
        return name in OF_CACHES
    return name not in (DENSE_ONLY if model == "experts" else EXPERTS_ONLY)


def named(model, name):
    return folder_of(f"{model} {name}")


def _run(model, name):
    kind, file, *words = COMMANDS[name].split()
    drawn = named(model, "graphs")
    saved = f"trained-{model}" if kind == "generate" or file == "graphs" else model
    source = f"--against {drawn}" if file == "graphs" else file
    command = " ".join((kind, saved, source, *words))
    after = (drawn if file == "graphs" else saved,)
    return Run(named(model, name), f"{command} --out {named(model, name)}", gpus_for(command), after=after)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of a command's file."""
    folder, draw = tmp_path_factory.mktemp("rollouts"), random.Random(0)
    scored, prompts = (
        [{"id": n, "tokens": [draw.randrange(256) for _ in range(k)]} for n, k in enumerate(lengths)]
        for lengths in (SCORED, PROMPTS)
    )
    for row in prompts[::2]:  # a CUDA graph without filters, beside one with them
        row |= {"top_k": 0, "top_p": 1.0}
    for name, rows in (("s", scored), ("p", prompts), ("turned", prompts[::-1])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    runs = [Run(name, words, 1) for name, words in PLAIN.items()]
    runs += [Run(f"trained-{name}", f"{words} numerics=portable", 1) for name, words in MODELS.items()]
    runs += [_run(model, name) for model in MODELS for name in COMMANDS if covers(model, name)]
    trained = Trained.where_they_fit(folder, runs)
    return lambda model, name: trained(named(model, name)).read_bytes()


@pytest.mark.parametrize(
    "model, first, name",
    [
        (m, first, name)
        for m in MODELS
        for first in SAME
        for name in SAME[first]
        if name != first and covers(m, first) and covers(m, name)
    ],
)
def test_layouts_batches_and_machines_have_one_file(written, model, first, name):
    assert written(model, name) == written(model, first)


def column(written, model, name, field):
    return [json.loads(line)[field] for line in written(model, name).splitlines()]


@pytest.mark.parametrize("model", PLAIN)
def test_numerics_seeds_and_layouts_of_stock_have_several(written, model):
    """The control: files are not equal whatever is computed."""
    bits = {name: column(written, model, name, "bits") for name in ("tree", "portable", "stock", "stock tp=2")}
    assert bits["tree"] != bits["stock"]
    assert bits["stock"] != bits["stock tp=2"]
    tokens, others = (column(written, model, name, "token_ids") for name in ("graphs", "seed"))
    assert all(mine != other for mine, other in zip(tokens, others, strict=True))


@pytest.mark.parametrize("model", PLAIN)
def test_the_order_of_requests_has_no_effect(written, model):
    turned, lines = (written(model, name).splitlines() for name in ("turned", "graphs"))
    assert sorted(turned) == sorted(lines)
    assert turned != lines


@pytest.mark.parametrize("layout", ("", " tp=2"))
@pytest.mark.parametrize("model", MODELS)
def test_scores_of_drawn_tokens_have_the_same_bits(written, model, layout):
    """And of the whole vocabulary; other numerics have not."""
    for field in ("bits", "digests"):
        drawn = column(written, model, "graphs", field)
        assert column(written, model, f"against numerics=portable{layout}", field) == drawn
        for numerics in ("deterministic", "tree")[model in CACHES :]:
            assert column(written, model, f"against numerics={numerics}", field) != drawn
