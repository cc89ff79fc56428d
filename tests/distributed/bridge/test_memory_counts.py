# SPDX-License-Identifier: Apache-2.0
"""The estimate of memory against real models on a CPU: bytes of parameters, gradients and optimizer."""

import json
import os

import pytest

from tests.distributed.ranks import megatron, on_ranks
from tests.distributed.small_models import DENSE, MUON, small
from tests.unit.sizing.test_memory import estimate
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.sizing import memory, size
from tp_invariant_recipes.sizing.memory import GRADIENTS, OPTIMIZER, WEIGHTS

pytestmark = pytest.mark.release  # in `make test`: tests/unit/sizing/

LEARNED = f"{DENSE} model.position_embedding_type=learned_absolute"
BIASED = f"{LEARNED} model.normalization=LayerNorm model.add_bias_linear=true model.qk_layernorm=false"
NET = (
    "qwen3_next_toy seq=64 gbs=1 model.hidden_size=64 model.num_attention_heads=8 model.kv_channels=16 "
    "model.vocab_size=512 model.moe_ffn_hidden_size=64 model.moe_shared_expert_intermediate_size=256 "
    "model.linear_key_head_dim=16"
)
MODELS = (
    *(f"{name}_toy" for name in ("qwen3", "qwen25", "llama32", "gemma3", "olmoe", "gpt_oss")),
    *map(small, ("qwen3_moe_toy", "nemotron3_nano_toy", "deepseek_v3_toy", "moonlight_toy")),
    NET,
    LEARNED,
    BIASED,
    f"{DENSE} model.mtp_num_layers=2",
    f"{DENSE} model.attention_output_gate=true",
)


def _built(mesh, models):
    """How many parameters a rank of the whole mesh has of each model."""
    from tp_invariant_recipes.config import container
    from tp_invariant_recipes.numerics.megatron import replacements
    from tp_invariant_recipes.patches import registry
    from tp_invariant_recipes.replacement import applied

    def count(words):
        config = _config(words, mesh.size)
        with registry.applied(config), applied(replacements.replacements(config.numerics)):
            built = container.build(config.with_fields("numerics", initial_weights="megatron"))
            built.model.finalize()
            (chunk,) = built.model.provide_distributed_model(wrap_with_ddp=False)
        return sum(weight.numel() for weight in chunk.parameters())

    with megatron(mesh, expert_tensor_parallel_size=1):
        return [count(words) for words in models]


def _config(words, degree):
    model, *more = words.split()
    return compose(model, [*more, f"tp={degree}", "numerics.virtual_shards=2"], device="cpu").config


@pytest.mark.timeout(900)
@pytest.mark.parametrize("degree", (1, 2))
def test_the_estimate_has_every_parameter(families, monkeypatch, degree):
    result, *_ = on_ranks(degree, 2, _built, MODELS)
    counted = lambda words: memory.estimate(_config(words, degree)).parts[WEIGHTS] // 2  # noqa: E731
    assert dict(zip(MODELS, result, strict=True)) == {words: counted(words) for words in MODELS}
    if degree == 1:
        assert result == [size.parameters(_config(words, 1).shape) for words in MODELS]
    monkeypatch.setattr(size, "positions", lambda model: size.Weights())  # the control
    assert counted(LEARNED) < result[MODELS.index(LEARNED)]


def _counting() -> None:
    """Write how many bytes a training's weights and gradients have, and its optimizers after the second step."""
    import torch
    from megatron.bridge.training import train
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tp_invariant_recipes.numerics.layers import embedding

    train_step, states = train.train_step, {}

    def measured(step, data, chunks, *args, **kwargs):
        result = train_step(step, data, chunks, *args, **kwargs)
        weights = [*chunks[0].parameters()]
        sums = [tensor for weight in weights for tensor in (weight.main_grad, *embedding.sums_of_their_own(weight))]
        counts = (sum(tensor.nbytes for tensor in tensors) for tensors in (weights, sums))
        with open(f"counts-{os.environ.get('RANK', '0')}.json", "w") as file:
            bytes_ = *counts, sum(states.values())
            json.dump(dict(zip((WEIGHTS, GRADIENTS, OPTIMIZER), bytes_, strict=True)), file)
        return result

    train.train_step = measured

    @register_optimizer_step_post_hook
    def _(optimizer, *_):
        tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        masters = [weight for group in optimizer.param_groups for weight in group["params"]]
        states[id(optimizer)] = sum(t.nbytes for t in (*masters, *tensors))


def _both(tpi, words):
    """Bytes by part: of the first rank of a training, and by the estimate."""
    tpi("train", *words.split(), "iters=2", "ledger.digests=0", before=_counting, status=0)
    model, *more = words.split()
    parts = estimate(model, " ".join(more), device="cpu").parts
    results = json.loads((tpi.folder / "counts-0.json").read_text())
    return results, {part: parts[part] for part in results}


LONGER = "seq=256 model.num_layers=2 model.kv_channels=32"
SCAN = f"{small('nemotron3_nano_toy').replace('seq=32', 'seq=256')} model.hybrid_layer_pattern=ME*M"
RULE = f"{NET.replace('seq=64', 'seq=256')} numerics.virtual_shards=2"
ROWS = (
    f"{DENSE} {LONGER} tp=2 {MUON}",
    f"{BIASED} {LONGER} numerics.virtual_shards=2",
    f"{SCAN} {MUON}",
    f"{RULE} {MUON}",
    f"{DENSE} {LONGER} model.mtp_num_layers=2",
    f"{DENSE} {LONGER} cp=2",
    f"{DENSE} {LONGER} numerics=stock tp=2",
    f"{RULE} numerics=stock numerics.virtual_shards=null",
    "llama32_toy gbs=1 seq=256 model.vocab_size=1024 tp=2 numerics=gather",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", ROWS)
def test_states_are_exact(tpi, words):
    result, expected = _both(tpi, words)
    assert result == expected
    if MUON in words:  # the control
        model, *more = words.replace(MUON, "").split()
        assert estimate(model, " ".join(more), device="cpu").parts[OPTIMIZER] > 1.1 * expected[OPTIMIZER]
