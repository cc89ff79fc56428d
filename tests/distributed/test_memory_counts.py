"""The estimate of memory against real models on a CPU: bytes of parameters, gradients, optimizer and activations."""

import json
import os

import pytest

from tests.distributed.ranks import megatron, on_ranks
from tests.distributed.small_models import DENSE, small
from tests.unit.test_memory import WITHIN, estimate
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.sizing import memory, size
from tp_invariant_recipes.sizing.memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS

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
@pytest.mark.parametrize("degree", (1, pytest.param(2, marks=pytest.mark.release)))
def test_the_estimate_has_every_parameter(families, monkeypatch, degree):
    found, *_ = on_ranks(degree, 2, _built, MODELS)
    counted = lambda words: memory.estimate(_config(words, degree)).parts[WEIGHTS] // 2  # noqa: E731
    assert dict(zip(MODELS, found, strict=True)) == {words: counted(words) for words in MODELS}
    if degree == 1:
        assert found == [size.parameters(_config(words, 1).model) for words in MODELS]
    monkeypatch.setattr(size, "positions", lambda model: size.Weights())  # the control
    assert counted(LEARNED) < found[MODELS.index(LEARNED)]


def _counting() -> None:
    """Write what the second micro-batch of a training keeps, and what its optimizers have after a step.

    The first one also keeps what trials of products and of attention compute.
    """
    import torch
    from megatron.core.pipeline_parallel import schedules
    from torch.optim.optimizer import register_optimizer_step_post_hook

    calls, forward_step, found, states = [], schedules.forward_step, {}, {}

    def counted(step, data, model, *args, **kwargs):
        calls.append(model)
        weights, kept = [*model.parameters()], {}
        own = {weight.untyped_storage().data_ptr() for weight in weights}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = forward_step(step, data, model, *args, **kwargs)
        found[WEIGHTS] = sum(weight.nbytes for weight in weights)
        found[GRADIENTS] = sum(weight.main_grad.nbytes for weight in weights)
        logits = model.config.seq_length * model.config.vocab_size  # of the loss
        kept = [tensor for at, tensor in kept.items() if at not in own and tensor.numel() != logits]
        found[ACTIVATIONS] = sum(tensor.untyped_storage().nbytes() for tensor in kept)
        return result

    schedules.forward_step = counted

    @register_optimizer_step_post_hook
    def _(optimizer, *_):
        tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        masters = [weight for group in optimizer.param_groups for weight in group["params"]]
        states[id(optimizer)] = sum(t.nbytes for t in (*masters, *tensors))
        if len(calls) > 1:
            with open(f"counts-{os.environ.get('RANK', '0')}.json", "w") as file:
                json.dump(found | {OPTIMIZER: sum(states.values())}, file)


def _both(tpi, words):
    """Bytes by part: of the first rank of a training, and by the estimate."""
    tpi("train", *words.split(), "iters=2", "ledger.digests=0", before=_counting, status=0)
    model, *more = words.split()
    parts = estimate(model, " ".join(more), device="cpu").parts
    found = json.loads((tpi.folder / "counts-0.json").read_text())
    return found, {part: parts[part] for part in found}


MUON = "optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated"
LONGER = "seq=256 model.num_layers=2 model.kv_channels=32"
# Trainings whose states are counted; of the last two activations as well, without experts, Mamba and gated delta nets.
DENSE_ROWS = (
    f"{BIASED} {LONGER} numerics.virtual_shards=2",
    f"{DENSE} {LONGER} numerics.virtual_shards=2 precision=mxfp8",
)
ROWS = (
    f"{DENSE} {LONGER} tp=2 {MUON}",
    *(
        pytest.param(row, marks=pytest.mark.release)
        for row in (f"{NET} {MUON}", f"{small('nemotron3_nano_toy')} {MUON}")
    ),
    DENSE_ROWS[0],
    pytest.param(DENSE_ROWS[1], marks=pytest.mark.release),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", ROWS)
def test_states_are_exact_and_activations_near(tpi, words):
    found, expected = _both(tpi, words)
    near, kept = expected.pop(ACTIVATIONS), found.pop(ACTIVATIONS)
    assert found == expected
    if words in DENSE_ROWS:
        assert near == pytest.approx(kept, rel=WITHIN)
    if MUON in words:  # the control
        model, *more = words.replace(MUON, "").split()
        assert estimate(model, " ".join(more), device="cpu").parts[OPTIMIZER] > 1.1 * expected[OPTIMIZER]
