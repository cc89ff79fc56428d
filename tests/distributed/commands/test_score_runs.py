# SPDX-License-Identifier: Apache-2.0
"""`tpi score` of a run's checkpoint, after a stop, and beside transformers: more families."""

import os
import signal

import pytest

from tests import hf_folders
from tests.distributed.commands.test_score import FOLDERS, by_id, drawn, farthest, logits_of, logprobs, rows, write
from tests.distributed.small_models import small
from tp_invariant_recipes.features.inference import rank

pytestmark = [pytest.mark.usefixtures("modelopt"), pytest.mark.release]


@pytest.fixture(scope="module")
def folder(shared):
    for name, (model, dtype, overrides) in FOLDERS.items():
        hf_folders.make(shared.folder / name, hf_folders.model_section(model, *overrides), dtype=dtype)
    write(shared.folder / "s.jsonl", rows())
    shared("score", "llama", "s.jsonl", "precision=fp32", "--entropy", "--out", "llama.scores", status=0)
    return shared.folder


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
    rank.MOST = 1


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


# --- Multi-latent attention ---


def exporting():
    """The ranks of a scoring write the weights as Hugging Face has them instead."""
    from pathlib import Path

    from safetensors.torch import save_file

    from tp_invariant_recipes.features.score.rank import Forward, Score
    from tp_invariant_recipes.sources import weights

    def score(self, forward, codec):
        weights.PACKAGES["deepseek_v3"] = "deepseek"  # tpi exports no such folder
        tensors = weights.from_config(Path("latent")).export_hf_weights([forward.model], cpu=True, show_progress=False)
        save_file({n: t.contiguous() for n, t in tensors}, "latent/model.safetensors", metadata={"format": "pt"})

    Score.score = score
    Forward.__init__ = lambda self, model, *args: setattr(self, "model", model)


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
    assert farthest(logprobs((folder / "latent.scores").read_bytes()), expected) < 2e-5


def test_transformers_agrees_with_gated_delta_nets(shared, folder):
    words = (
        *("model.hidden_size=64", "model.moe_ffn_hidden_size=64", "model.kv_channels=16", "model.vocab_size=512"),
        *("model.linear_key_head_dim=16", "model.linear_value_head_dim=16", "model.mtp_num_layers=null"),
    )
    hf_folders.make(folder / "delta", hf_folders.model_section("qwen3_next_toy", *words), dtype="F32")
    for name, layout in (("delta.scores", ()), ("delta.two", ("tp=2", "ep=2"))):
        shared("score", "delta", "s.jsonl", "precision=fp32", *layout, "--out", name, status=0)
    assert by_id((folder / "delta.scores").read_bytes()) == by_id((folder / "delta.two").read_bytes())
    assert farthest(logprobs((folder / "delta.scores").read_bytes()), drawn(logits_of(folder / "delta", rows()))) < 2e-5
