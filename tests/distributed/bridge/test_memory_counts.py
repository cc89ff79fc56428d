"""The estimate of memory against real models on a CPU: bytes of parameters, gradients, optimizer and activations."""

import json
import os

import pytest

from tests.distributed.ranks import megatron, on_ranks
from tests.distributed.small_models import DENSE, MUON, small
from tests.unit.sizing.test_memory import WITHIN, estimate
from tests.unit.sizing.test_memory_moments import Peak
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.sizing import memory, size
from tp_invariant_recipes.sizing.memory import ACTIVATIONS, GRADIENTS, LOSS, OPTIMIZER, WEIGHTS

pytestmark = pytest.mark.release  # in `make test`: tests/unit/sizing/

LEARNED = f"{DENSE} model.position_embedding_type=learned_absolute"
BIASED = f"{LEARNED} model.normalization=LayerNorm model.add_bias_linear=true model.qk_layernorm=false"
NET = (
    "qwen3_next_toy seq=64 gbs=1 model.hidden_size=64 model.num_attention_heads=8 model.kv_channels=16 "
    "model.vocab_size=512 model.moe_ffn_hidden_size=64 model.moe_shared_expert_intermediate_size=256 "
    "model.linear_key_head_dim=16"
)
MODELS = (
    *(f"{name}_toy" for name in ("qwen3", "qwen25", "llama32", "gemma2", "gemma3", "exaone4", "olmoe", "gpt_oss")),
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
    found, *_ = on_ranks(degree, 2, _built, MODELS)
    counted = lambda words: memory.estimate(_config(words, degree)).parts[WEIGHTS] // 2  # noqa: E731
    assert dict(zip(MODELS, found, strict=True)) == {words: counted(words) for words in MODELS}
    if degree == 1:
        assert found == [size.parameters(_config(words, 1).shape) for words in MODELS]
    monkeypatch.setattr(size, "positions", lambda model: size.Weights())  # the control
    assert counted(LEARNED) < found[MODELS.index(LEARNED)]


def _counting() -> None:
    """Write what the second step of a training keeps of a micro-batch, its peak, and what its optimizers have then.

    The first one also keeps what trials of products and of attention compute.
    """
    import torch
    from megatron.bridge.training import train
    from megatron.core.pipeline_parallel import schedules
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tp_invariant_recipes.numerics.layers import embedding

    forward_step, train_step, peaks, states = schedules.forward_step, train.train_step, [], {}

    def counted(step, data, model, *args, **kwargs):
        result = forward_step(step, data, model, *args, **kwargs)
        logits = model.config.seq_length * model.config.vocab_size // model.config.tensor_model_parallel_size
        peaks[-1].kept = sum(size for numbers, size in peaks[-1].living.values() if numbers != logits)
        return result

    def measured(step, data, chunks, *args, **kwargs):
        peaks.append(Peak())
        if len(peaks) == 1:
            return train_step(step, data, chunks, *args, **kwargs)
        with peaks[-1]:
            result = train_step(step, data, chunks, *args, **kwargs)
        weights = [*chunks[0].parameters()]
        sums = [one for weight in weights for one in (weight.main_grad, *embedding.sums_of_their_own(weight))]
        counts = (sum(one.nbytes for one in some) for some in (weights, sums))
        parts = WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, PEAK
        bytes_ = *counts, sum(states.values()), peaks[-1].kept, peaks[-1].most
        with open(f"counts-{os.environ.get('RANK', '0')}.json", "w") as file:
            json.dump(dict(zip(parts, bytes_, strict=True)), file)
        return result

    schedules.forward_step, train.train_step = counted, measured

    @register_optimizer_step_post_hook
    def _(optimizer, *_):
        tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        masters = [weight for group in optimizer.param_groups for weight in group["params"]]
        states[id(optimizer)] = sum(t.nbytes for t in (*masters, *tensors))


def _both(tpi, words):
    """Bytes by part: of the first rank of a training, and by the estimate."""
    tpi("train", *words.split(), "iters=2", "ledger.digests=0", before=_counting, status=0)
    model, *more = words.split()
    parts = dict(estimate(model, " ".join(more), device="cpu").parts)
    parts[PEAK] = parts[ACTIVATIONS] + parts[LOSS]
    found = json.loads((tpi.folder / "counts-0.json").read_text())
    return found, {part: parts[part] for part in found}


PEAK = "peak"  # of a step beside weights, gradients and optimizer
LONGER = "seq=256 model.num_layers=2 model.kv_channels=32"
SCAN = f"{small('nemotron3_nano_toy').replace('seq=32', 'seq=256')} model.hybrid_layer_pattern=ME*M"
RULE = f"{NET.replace('seq=64', 'seq=256')} numerics.virtual_shards=2"
AGAIN = "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=2"
ROWS = (
    f"{DENSE} {LONGER} tp=2 {MUON}",
    f"{BIASED} {LONGER} numerics.virtual_shards=2",
    f"{SCAN} {MUON}",
    f"{RULE} {MUON}",
    f"{DENSE} {LONGER} numerics.virtual_shards=2 precision=mxfp8",
    f"{DENSE} {LONGER} numerics.virtual_shards=2 {AGAIN}",
    f"{DENSE} {LONGER} model.mtp_num_layers=2",
    f"{DENSE} {LONGER} cp=2",
    f"{DENSE} {LONGER} numerics=stock tp=2",
    f"{SCAN} numerics=stock",
    f"{RULE} numerics=stock numerics.virtual_shards=null",
    "gemma2_toy gbs=1 seq=256 model.vocab_size=1024 numerics.virtual_shards=2",
    "llama32_toy gbs=1 seq=256 model.vocab_size=1024 tp=2 numerics=gather",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", ROWS)
def test_states_are_exact_and_the_rest_near(tpi, words):
    found, expected = _both(tpi, words)
    near, kept = ({part: parts.pop(part) for part in (ACTIVATIONS, PEAK)} for parts in (expected, found))
    assert found == expected
    assert near == pytest.approx(kept, rel=WITHIN)
    if MUON in words:  # the control
        model, *more = words.replace(MUON, "").split()
        assert estimate(model, " ".join(more), device="cpu").parts[OPTIMIZER] > 1.1 * expected[OPTIMIZER]
