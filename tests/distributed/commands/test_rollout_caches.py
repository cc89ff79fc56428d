# SPDX-License-Identifier: Apache-2.0
"""`tpi generate` of models whose caches are not plain keys: MLA, and gated delta nets; with the bits of `tpi score`."""

import json
import random

import pytest

from tests.distributed.layouts.rows import PORTABLE_LATENT, PORTABLE_NEXT, PORTABLE_YARN

pytestmark = pytest.mark.usefixtures("modelopt", "portable_loops")

MODELS = {"latent": PORTABLE_LATENT, "yarn": PORTABLE_YARN, "delta": PORTABLE_NEXT}
DRAWS = "p.jsonl device=cpu max_tokens=3 do_sample=true top_k=0 n=2 seed=3 --digest"
LENGTHS = (3, 70, 17)
# Of one file: a layout; parts of prompts; a cache for two sequences, from which others are preempted.
SAME = ("tp=2 --batch 3 --chunk 20", "--batch 2 --cache 128 --chunk 1")


@pytest.fixture(
    scope="module", params=["delta", *(pytest.param(name, marks=pytest.mark.release) for name in ("latent", "yarn"))]
)
def trained(request, shared):
    draw, name = random.Random(7), request.param
    rows = [{"id": f"p{n}", "tokens": [draw.randrange(512) for _ in range(k)]} for n, k in enumerate(LENGTHS)]
    (shared.folder / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (shared.folder / "turned.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[::-1]))
    shared("train", *MODELS[name].split(), "iters=1", "save=1", f"run.dir={name}", status=0)
    shared("generate", name, *DRAWS.split(), "--out", f"{name}.jsonl", status=0)
    return name


def test_layouts_batches_chunks_and_orders_have_one_file(shared, trained):
    whole = (shared.folder / f"{trained}.jsonl").read_bytes()
    for n, words in enumerate(SAME):
        shared("generate", trained, *DRAWS.split(), *words.split(), "--out", f"{trained}{n}.jsonl", status=0)
        assert (shared.folder / f"{trained}{n}.jsonl").read_bytes() == whole, words
    turned = DRAWS.replace("p.jsonl", "turned.jsonl").split()
    shared("generate", trained, *turned, "--out", f"{trained}.turned", status=0)
    assert sorted((shared.folder / f"{trained}.turned").read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("layout", (pytest.param("tp=1", marks=pytest.mark.release), "tp=2"))
def test_scores_have_the_same_bits(shared, trained, layout):
    words = (trained, "--against", f"{trained}.jsonl", "device=cpu", layout, "--out", f"{trained}.{layout}")
    assert "0 differences by bits; of the whole vocabulary, digests of 0 of" in shared("score", *words, status=0).stdout


def test_scores_of_tree_have_others(shared, trained):
    """The control: other arithmetic of the same weights."""
    words = (trained, "--against", f"{trained}.jsonl", "device=cpu", "numerics=tree", "--out", f"{trained}.tree")
    shared("score", *words, status=1)
