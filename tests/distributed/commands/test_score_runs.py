"""`tpi score` of a run's checkpoint, beside transformers, after a stop, and against what an engine returned."""

import json
import os
import signal
from itertools import pairwise

import numpy as np
import pytest

from tests import hf_folders
from tests.distributed.commands.test_score import FOLDERS, by_id, rows, write
from tests.distributed.small_models import small
from tp_invariant_recipes.features.score import batches

pytestmark = pytest.mark.usefixtures("modelopt")


@pytest.fixture(scope="module")
def folder(shared):
    for name, (model, dtype, overrides) in FOLDERS.items():
        hf_folders.make(shared.folder / name, hf_folders.model_section(model, *overrides), dtype=dtype)
    write(shared.folder / "s.jsonl", rows())
    shared("score", "llama", "s.jsonl", "precision=fp32", "--entropy", "--out", "llama.scores", status=0)
    return shared.folder


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


def logprobs(file):
    return [np.array(row["logprobs"]) for row in map(json.loads, file.read_bytes().splitlines())]


def farthest(actual, expected):
    return max(np.abs(a - b).max() for a, b in zip(actual, expected, strict=True))


def test_transformers_agrees_to_rounding(folder):
    """The control: bf16 is 1,000 times as far away."""
    assert farthest(logprobs(folder / "llama.scores"), drawn(logits_of(folder / "llama", rows()))) < 2e-5


@pytest.mark.release
@pytest.mark.parametrize("model", ("qwen3", "moe"))
def test_transformers_agrees_with_other_models(shared, folder, model):
    shared("score", model, "s.jsonl", "precision=fp32", "--out", f"{model}.scores", status=0)
    expected = drawn(logits_of(folder / model, rows()))
    assert farthest(logprobs(folder / f"{model}.scores"), expected) < 2e-5
    shared("score", model, "s.jsonl", "precision=bf16", "--out", f"{model}.bf16", status=0)
    assert farthest(logprobs(folder / f"{model}.bf16"), expected) > 2e-3


@pytest.mark.release
def test_entropies_and_ranks_are_those_of_the_logits(shared, folder):
    shared("score", "llama", "s.jsonl", "precision=fp32", "--entropy", "--ranks", "--out", "ranked", status=0)
    lines = [json.loads(line) for line in (folder / "ranked").read_bytes().splitlines()]
    for line, (ids, logits) in zip(lines, logits_of(folder / "llama", rows()), strict=True):
        softmax = logits.softmax(-1)
        assert np.abs(np.array(line["entropies"]) + (softmax * softmax.log()).sum(-1).numpy()).max() < 2e-5
        assert line["ranks"] == ((logits > logits.gather(-1, ids[:, None])).sum(-1) + 1).tolist()
        assert np.array(line["logprobs"], np.float32).view(np.uint32).tolist() == [int(x, 16) for x in line["bits"]]


@pytest.mark.release
def test_a_run_has_the_scores_of_its_export(shared, folder):
    """Of trained weights; the control is the checkpoint of the step before."""
    words = ("seq=32", "gbs=2", "iters=2", "save=1", "tp=2", "model.num_layers=1")
    shared("train", "qwen3_toy", *words, "run.dir=run", status=0)
    shared("export", "run", "exported", status=0)
    for name, source in (("of-run", ("run",)), ("of-export", ("exported",)), ("before", ("run", "--step", "1"))):
        shared("score", source[0], "s.jsonl", *source[1:], "--out", name, status=0)
    assert (folder / "of-run").read_bytes() == (folder / "of-export").read_bytes()
    assert by_id((folder / "of-run").read_bytes()) != by_id((folder / "before").read_bytes())


def sequence_per_window():
    batches.MOST = 1


@pytest.mark.release
def test_a_stopped_scoring_goes_on(shared, folder):
    """Killed after some lines, and half a line."""
    started = shared.start(
        "score", "llama", "s.jsonl", "precision=fp32", "--entropy", "--out", "cut", before=sequence_per_window
    )
    lines = folder / "cut.partial" / "scores.jsonl"
    started.until(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 2)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    kept = lines.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 2 <= kept.count(b"\n") < len(rows())
    lines.write_bytes(kept + b'{"id": "s')
    other = shared("score", "llama", "s.jsonl", "precision=fp32", "--out", "cut", status=2)
    assert "holds a part of other scores" in other.stderr
    shared("score", "llama", "s.jsonl", "precision=fp32", "--entropy", "--out", "cut", status=0)
    assert (folder / "cut").read_bytes() == (folder / "llama.scores").read_bytes()
    assert not lines.parent.exists()


def engine(folder, name, values):
    """A file of vLLM's prompt_logprobs with these values."""
    results = []
    for row, value in zip(rows(), values, strict=True):
        entries = [None, *({str(t): {"logprob": float(x)}} for t, x in zip(row["tokens"][1:], value, strict=True))]
        results.append({"id": row["id"], "prompt_token_ids": row["tokens"], "prompt_logprobs": entries, "outputs": []})
    write(folder / name, results)
    return name


def against(shared, folder, *files, status=1, tolerance="1e-4"):
    words = ("llama", "s.jsonl", "precision=fp32", "--out", "llama.scores", "--tolerance", tolerance, "--json")
    words += tuple(word for file in files for word in ("--against", file))
    return json.loads(shared("score", *words, status=status).stdout)


def test_a_correct_engine_is_within_and_faults_are_named(shared, folder):
    logits = logits_of(folder / "llama", rows())
    scores = drawn(logits)
    engine(folder, "right", scores)
    engine(folder, "warm", drawn(logits, temperature=0.8))
    engine(folder, "shifted", [np.append(item[1:], item[-1]) for item in scores])
    assert against(shared, folder, "right", status=0)["files"][0]["suspects"] == []
    own = against(shared, folder, "llama.scores", status=0, tolerance="0")
    assert own["text"].startswith("equal: llama.scores: all 444 log-probabilities")
    result = against(shared, folder, "warm", "shifted")
    warm, shifted = (file["suspects"] for file in result["files"])
    assert shifted == ["off by one: at a token's place stands the log-probability of the next token"]
    assert result["nearer"] == 0
    assert len(warm) == 1
    assert "a temperature of about 0.80 is applied" in warm[0]
    page = (folder / "llama.html").read_text()
    assert "<svg" in page
    assert "off by one" in page
    assert [item["from"] for item in result["files"][0]["by_position"]] == [1 << n for n in range(8)]
    assert all(a["to"] + 1 == b["from"] for a, b in pairwise(result["files"][0]["by_position"]))


# --- Hidden states ---

DEEP = {
    "bias": ("qwen25_toy", ("model.num_layers=3",)),
    "experts": ("qwen3_moe_toy", (*FOLDERS["moe"][2][1:], "model.num_layers=3")),
}


def rope(model):
    model.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq * 1.5)


def without_bias(model):
    model.model.layers[1].self_attn.v_proj.bias.zero_()


def exchanged_experts(model):
    experts = model.model.layers[1].mlp.experts
    weights = [p for p in experts.parameters()]
    if weights[0].ndim == 3:  # all experts in one tensor
        for weight in weights:
            weight[[0, 1]] = weight[[1, 0]]
    else:
        for a, b in zip(experts[0].parameters(), experts[1].parameters(), strict=True):
            held = a.clone()
            a.copy_(b)
            b.copy_(held)


def wrong_router(model):
    model.model.layers[2].mlp.gate.weight.mul_(-1)


def dumped(folder, name, file, fault=None):
    """Hidden states of transformers for the first sequence, and the experts of its routers."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32, attn_implementation="eager")
    results = {}
    with torch.no_grad():
        if fault:
            fault(model)
        for n, layer in enumerate(model.model.layers):
            layer.register_forward_hook(
                lambda _, args, out, n=n: results.update({f"layers.{n}": (out[0] if isinstance(out, tuple) else out)})
            )
            if name == "experts":
                layer.mlp.gate.register_forward_hook(
                    lambda _, args, out, n=n: results.update(
                        {f"router.{n}": (out[0] if isinstance(out, tuple) else out).view(-1, 8).topk(2).indices}
                    )
                )
        model(torch.tensor([rows()[3]["tokens"]]))
    whole = {k: v.reshape(-1, v.shape[-1]).contiguous().clone() for k, v in results.items()}
    save_file(whole, folder / file, metadata={"id": "s3"})
    return file


@pytest.fixture(scope="module")
def deep(folder):
    for name, (model, overrides) in DEEP.items():
        hf_folders.make(folder / name, hf_folders.model_section(model, *overrides), dtype="F32")
    return folder


def hidden(shared, name, file, status, *words):
    done = shared(
        "score", name, "s.jsonl", "precision=fp32", "--out", f"{name}.deep", "--hidden", file, *words, status=status
    )
    return done.stdout


# Folder, fault -> what is said of it.
FAULTS = (
    ("bias", rope, "layer 0 is the first beyond rounding"),
    ("bias", without_bias, "layer 1 is the first beyond rounding"),
    ("experts", exchanged_experts, "layer 1 is the first beyond rounding"),
    ("experts", wrong_router, "go to other experts from layer 2 on"),
)


@pytest.mark.release
@pytest.mark.parametrize("name, fault, words", FAULTS, ids=lambda item: getattr(item, "__name__", str(item)[:12]))
def test_faults_are_detected_in_hidden_states(shared, deep, name, fault, words):
    assert words in hidden(shared, name, dumped(deep, name, f"{fault.__name__}.safetensors", fault), 1)


@pytest.mark.release
@pytest.mark.parametrize("layout", ("tp=1", "tp=2 pp=3"))
@pytest.mark.parametrize("name", DEEP)
def test_correct_hidden_states_are_within_rounding(shared, deep, name, layout):
    message = hidden(shared, name, dumped(deep, name, "right.safetensors"), 0, *layout.split())
    assert "within rounding, all 3 layers" in message
    assert "experts" not in message


# --- Multi-latent attention ---


def exporting():
    """The ranks of a scoring write the weights as Hugging Face has them instead."""
    from pathlib import Path

    from safetensors.torch import save_file

    from tp_invariant_recipes.features.score.rank import Forward, Score
    from tp_invariant_recipes.sources import auto_bridge
    from tp_invariant_recipes.training.imported_weights import _our_layers_known

    def score(self, model, forward, encode):
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        AutoMapping.register_module_type("InvariantDuplicatedLinear", "replicated")
        auto_bridge.PACKAGES["deepseek_v3"] = "deepseek"  # tpi exports no such folder
        with _our_layers_known():
            tensors = auto_bridge.from_config(Path("latent")).export_hf_weights([model], cpu=True, show_progress=False)
            save_file({n: t.contiguous() for n, t in tensors}, "latent/model.safetensors", metadata={"format": "pt"})

    Score.score = score
    Forward.__init__ = lambda self, *args: None


@pytest.mark.release
def test_transformers_agrees_with_latent_attention(shared, folder):
    """transformers norms latents with an epsilon of 1e-6 whatever rms_norm_eps says, so the model has it everywhere."""
    from transformers import DeepseekV3Config

    DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"], hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=32, vocab_size=512, n_routed_experts=8, num_experts_per_tok=2, n_group=1,
        topk_group=1, n_shared_experts=4, moe_intermediate_size=64, first_k_dense_replace=1, rms_norm_eps=1e-6,
        routed_scaling_factor=2.446, norm_topk_prob=True, rope_theta=50000.0, max_position_embeddings=4096,
        tie_word_embeddings=False, num_nextn_predict_layers=0, attention_bias=False, dtype="float32",
    ).save_pretrained(folder / "latent")  # fmt: skip
    words = [
        *small("moonlight_toy").split(),
        "model.layernorm_epsilon=1e-6",
        "model.ffn_hidden_size=256",
        "model.moe_shared_expert_intermediate_size=256",
    ]
    shared("train", *words, "seq=64", "gbs=2", "iters=1", "save=1", "precision=fp32", "run.dir=latent-run", status=0)
    done = shared("score", "latent-run", "s.jsonl", "--out", "no.scores", before=exporting)
    assert (folder / "latent" / "model.safetensors").exists(), done.stderr
    shared("score", "latent-run", "s.jsonl", "--out", "latent.scores", status=0)
    expected = drawn(logits_of(folder / "latent", rows()))
    assert farthest(logprobs(folder / "latent.scores"), expected) < 2e-5


@pytest.mark.release
def test_transformers_agrees_with_gated_delta_nets(shared, folder):
    words = (
        *("model.hidden_size=64", "model.moe_ffn_hidden_size=64", "model.kv_channels=16", "model.vocab_size=512"),
        *("model.linear_key_head_dim=16", "model.linear_value_head_dim=16", "model.mtp_num_layers=null"),
    )
    hf_folders.make(folder / "delta", hf_folders.model_section("qwen3_next_toy", *words), dtype="F32")
    for name, layout in (("delta.scores", ()), ("delta.two", ("tp=2", "ep=2"))):
        shared("score", "delta", "s.jsonl", "precision=fp32", *layout, "--out", name, status=0)
    assert by_id((folder / "delta.scores").read_bytes()) == by_id((folder / "delta.two").read_bytes())
    assert farthest(logprobs(folder / "delta.scores"), drawn(logits_of(folder / "delta", rows()))) < 2e-5
