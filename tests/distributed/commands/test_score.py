# SPDX-License-Identifier: Apache-2.0
"""`tpi score`: one file of scores for every layout, batch, order, padding and packing."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests import hf_folders
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.features.inference import model as score_model
from tp_invariant_recipes.features.inference import rank

pytestmark = pytest.mark.usefixtures("modelopt")

LENGTHS = (5, 30, 64, 100, 30, 64, 150, 9)
MOE = (
    *("model.num_layers=1", "model.hidden_size=128", "model.moe_ffn_hidden_size=64", "model.num_attention_heads=8"),
    *("model.num_query_groups=8", "model.kv_channels=16", "model.vocab_size=512"),
)
FOLDERS = {
    "qwen3": ("qwen3_toy", "BF16", ("model.num_layers=2",)),
    "llama": ("llama32_toy", "F32", ("model.num_layers=1",)),
    "moe": ("qwen3_moe_toy", "F32", MOE),
}


@pytest.mark.release
def test_layers_of_multi_token_prediction_score_nothing(bridge):
    words = parse_all(["model.mtp_num_layers=1", "model.mtp_hybrid_override_pattern=*E", "device=cpu"])
    model = score_model._composed("nemotron3_nano_toy", words, "tree").config.model
    assert {name for name in model if name.startswith("mtp_") and model[name]} == set()


def rows(seed=0, lengths=LENGTHS):
    draw = random.Random(seed)
    return [{"id": f"s{n}", "tokens": [draw.randrange(512) for _ in range(k)]} for n, k in enumerate(lengths)]


def write(file: Path, results) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in results))
    return file


@pytest.fixture(scope="module")
def folder(shared):
    for name, (model, dtype, overrides) in FOLDERS.items():
        hf_folders.make(shared.folder / name, hf_folders.model_section(model, *overrides), dtype=dtype)
    write(shared.folder / "s.jsonl", rows())
    write(shared.folder / "few.jsonl", rows()[:3])
    return shared.folder


@pytest.fixture(scope="module")
def scored(shared, folder):
    """The bytes of the scores of a command's words; each is scored once."""

    def score(words: str) -> bytes:
        out = out_of(words)
        if not (folder / out).exists():
            shared("score", *words.split(), "--out", out, status=0)
        return (folder / out).read_bytes()

    return score


def out_of(words: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', words)}.out"


def by_id(scores: bytes):
    return {row["id"]: row["bits"] for row in map(json.loads, scores.splitlines())}


def test_tp_has_no_effect(scored):
    assert scored("qwen3 few.jsonl tp=2 --ranks --entropy") == scored("qwen3 few.jsonl --ranks --entropy")


def test_stock_layouts_do_not(scored):
    stock = "qwen3 few.jsonl numerics=stock"
    assert by_id(scored(f"{stock} tp=2")) != by_id(scored(stock))


# By blocks no sum of this model can be cut, and a sequence's padded length of 192 was no multiple of 128.
IN_FP8 = (("mxfp8", "tp=2"), ("fp8_tensorwise", "tp=2"), ("fp8_blockwise", "pp=2"))


@pytest.mark.release
@pytest.mark.parametrize("precision, layout", IN_FP8)
def test_products_in_fp8_have_one_file(scored, precision, layout):
    """From a Hugging Face folder. The control: in bf16 every sequence has other bits."""
    fp8 = f"qwen3 s.jsonl precision={precision}"
    whole = scored(fp8)
    assert scored(f"{fp8} {layout}") == whole
    plain, result = by_id(scored("qwen3 s.jsonl --ranks --entropy")), by_id(whole)
    assert plain.keys() == result.keys()
    assert all(result[name] != bits for name, bits in plain.items())


ALL = "qwen3 s.jsonl --ranks --entropy"
# Layouts, experts, and context-parallel ranks.
LAYOUTS = (
    *((ALL, layout) for layout in ("pp=2", "dp=2", "tp=2 sp=false", "tp=8", "dp=2 tp=2")),
    *(("moe s.jsonl", layout) for layout in ("ep=2 dp=2", "tp=2 ep=2", "pp=1 dp=2")),
    ("qwen3 s.jsonl numerics.context_shards=2", "cp=2"),
)


@pytest.mark.release
@pytest.mark.parametrize("words, layout", LAYOUTS)
def test_layouts_have_one_file(scored, words, layout):
    assert scored(f"{words} {layout}") == scored(words)


# In fp32 nothing is rounded away.
PLAIN = "llama s.jsonl precision=fp32 --entropy"


def test_order_padding_packing_and_batch_have_no_effect(folder, scored):
    """The control is padding without a mask. Batches move no bit of a toy on a CPU; tests/gpu has their control."""
    plain = rows()
    padded = [
        {
            "id": row["id"],
            "tokens": [0] * 7 + row["tokens"] + [3] * 40,
            "attention_mask": [0] * 7 + [1] * len(row["tokens"]) + [0] * 40,
        }
        for row in plain
    ]
    unmasked = [{"id": f"unmasked {row['id']}", "tokens": [0] * 7 + row["tokens"]} for row in plain]
    ends = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    packed = {"id": "row", "tokens": [token for row in plain for token in row["tokens"]], "cu_seqlens": ends}
    write(folder / "moved.jsonl", [*reversed(padded), packed, *unmasked])
    moved = by_id(scored("llama moved.jsonl precision=fp32 --batch-tokens 100"))
    expected = by_id(scored(PLAIN))
    assert {name: moved[name] for name in expected} == expected
    assert {f"s{name[4:-1]}": bits for name, bits in moved.items() if name.startswith("row")} == expected
    assert all(moved[f"unmasked {name}"][7:] != bits for name, bits in expected.items())


def logits_of(folder, sequences):
    """Log-probabilities of transformers in fp32, one array a sequence, and the logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    results = []
    with torch.no_grad():
        for row in sequences:
            ids = torch.tensor([row["tokens"]])
            results.append((ids[0, 1:], model(ids).logits[0, :-1].double()))
    return results


def drawn(logits, temperature=1.0):
    return [(item / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0].numpy() for ids, item in logits]


def logprobs(scores: bytes):
    return [np.array(row["logprobs"]) for row in map(json.loads, scores.splitlines())]


def farthest(actual, expected):
    return max(np.abs(a - b).max() for a, b in zip(actual, expected, strict=True))


def test_transformers_agrees_to_rounding(folder, scored):
    """The control: bf16 is 1,000 times as far away."""
    assert farthest(logprobs(scored(PLAIN)), drawn(logits_of(folder / "llama", rows()))) < 2e-5


@pytest.mark.release
@pytest.mark.parametrize("model", ("qwen3", "moe"))
def test_transformers_agrees_with_other_models(folder, scored, model):
    expected = drawn(logits_of(folder / model, rows()))
    assert farthest(logprobs(scored(f"{model} s.jsonl precision=fp32")), expected) < 2e-5
    assert farthest(logprobs(scored(f"{model} s.jsonl precision=bf16")), expected) > 2e-3


@pytest.mark.release
def test_entropies_and_ranks_are_those_of_the_logits(folder, scored):
    lines = [json.loads(line) for line in scored(f"{PLAIN} --ranks").splitlines()]
    for line, (ids, logits) in zip(lines, logits_of(folder / "llama", rows()), strict=True):
        softmax = logits.softmax(-1)
        assert np.abs(np.array(line["entropies"]) + (softmax * softmax.log()).sum(-1).numpy()).max() < 2e-5
        assert line["ranks"] == ((logits > logits.gather(-1, ids[:, None])).sum(-1) + 1).tolist()
        assert np.array(line["logprobs"], np.float32).view(np.uint32).tolist() == [int(x, 16) for x in line["bits"]]


def engine(folder, name, values):
    """A file of vLLM's prompt_logprobs with these values."""
    results = []
    for row, value in zip(rows(), values, strict=True):
        entries = [None, *({str(t): {"logprob": float(x)}} for t, x in zip(row["tokens"][1:], value, strict=True))]
        results.append({"id": row["id"], "prompt_token_ids": row["tokens"], "prompt_logprobs": entries, "outputs": []})
    write(folder / name, results)
    return name


def against(shared, file, status):
    words = (*PLAIN.split(), "--out", out_of(PLAIN), "--tolerance", "1e-4", "--json", "--against", file)
    return json.loads(shared("score", *words, status=status).stdout)


def test_a_correct_engine_is_within_and_faults_are_named(shared, folder, scored):
    scored(PLAIN)
    logits = logits_of(folder / "llama", rows())
    scores = drawn(logits)
    engine(folder, "right", scores)
    engine(folder, "warm", drawn(logits, temperature=0.8))
    engine(folder, "shifted", [np.append(item[1:], item[-1]) for item in scores])
    assert against(shared, "right", status=0)["suspects"] == []
    result = against(shared, "warm", status=1)
    warm, shifted = result["suspects"], against(shared, "shifted", status=1)["suspects"]
    assert shifted == ["off by one: each token has the log-probability of the next token"]
    assert len(warm) == 1
    assert "a temperature of about 0.80 is applied" in warm[0]
    assert [item["from"] for item in result["by_position"]] == [1 << n for n in range(8)]
    assert all(a["to"] + 1 == b["from"] for a, b in pairwise(result["by_position"]))


@pytest.mark.release
def test_a_response_has_the_bits_of_its_tokens_in_the_whole(folder, scored):
    answers = [{"id": row["id"], "prompt": row["tokens"][:4], "response": row["tokens"][4:]} for row in rows()]
    write(folder / "responses.jsonl", answers)
    result = by_id(scored("llama responses.jsonl precision=fp32"))
    assert result == {name: bits[3:] for name, bits in by_id(scored(PLAIN)).items()}


def padded_as_the_longest():
    """All sequences of a pass have one length."""
    rank.padded = lambda length, multiple: 152


@pytest.mark.release
def test_portable_batches_sequences(shared, folder, scored, portable_loops):
    """In passes of any size, alone, and padded to another length: products that walk k in order have one result."""
    portable = "qwen3 s.jsonl numerics=portable --entropy"
    batched = scored(portable)
    assert scored(f"{portable} --batch-tokens 1") == batched
    assert scored(f"{portable} --batch-tokens 300 tp=2") == batched
    out = ("qwen3", "s.jsonl", "numerics=portable", "--entropy", "--out", "portable-longer")
    shared("score", *out, before=padded_as_the_longest, status=0)
    assert (folder / "portable-longer").read_bytes() == batched


REFUSED = (
    (
        "nowhere s.jsonl iters=5 seq=64 cuda_graph=te",
        (
            "no such folder", "iters=5: tpi score trains nothing and does not read it",
            "seq=64: every sequence has its own length", "run without CUDA graphs",
        ),
    ),
    ("qwen3 s.jsonl --step 3", ("--step 3: qwen3 is a Hugging Face folder",)),
    ("qwen3 s.jsonl tp=3", ("tp=3 does not divide",)),
    ("qwen3 s.jsonl model.num_layers=3", ("num_hidden_layers is 2",)),
    ("qwen3 nothing.jsonl", ("No such file",)),
    ("qwen3 tp=2", ("name a file of SEQUENCES, or one of tpi generate with --against FILE",)),
    ("qwen3 s.jsonl --tolerance 0.1", ("--tolerance and --partial go with --against",)),
)  # fmt: skip


@pytest.mark.parametrize("words, why", REFUSED)
def test_mistakes_are_one_message(shared, folder, words, why):
    output = shared("score", *words.split(), "--out", "never", status=2).stderr
    assert [part for part in why if part not in output] == []
    assert not (folder / "never.partial").exists()


@pytest.mark.release
@pytest.mark.parametrize("layout", ("tp=2", "pp=2", "numerics.context_shards=2 cp=2"))
def test_the_whole_vocabulary_is_one_file_and_stock_differs_in_entries(shared, folder, scored, layout):
    shards = "numerics.context_shards=2" if "cp" in layout else ""
    name = layout.replace("=", "").replace(" ", "-")
    shared("score", "qwen3", "s.jsonl", *shards.split(), "--vocab", "--out", f"v-{name}", status=0)
    score = ("score", "qwen3", "s.jsonl", "--vocab", "--against", f"v-{name}")
    equal = shared(*score, *layout.split(), "--out", f"w-{name}", status=0).stdout
    assert "0 of 227,328 entries differ in 0 of 444 tokens" in equal
    assert (folder / f"w-{name}.vocab.npy").read_bytes() == (folder / f"v-{name}.vocab.npy").read_bytes()
    if layout == "tp=2":
        stock = shared(*score, "numerics=stock", "tp=2", "--out", "stock-v", status=1).stdout
        assert " of 444 tokens, at most by " in stock
        assert "; of the whole vocabulary, 0 of" not in stock
