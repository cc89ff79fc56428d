"""The invariant router: what it counts, and the auxiliary losses that it logs and attaches."""

import pytest
import torch

from tests.distributed.ranks import megatron, on_ranks, terms
from tests.operands import same_bits

TOKENS, HIDDEN, EXPERTS = 1032, 32, 4
SHARDS, SEQUENCE, BATCH = 4, 64, 2


def _router(invariant=True, shards=1, **fields):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    from tp_invariant_recipes.numerics.megatron.router import InvariantTopKRouter

    contexts = fields.pop("context_shards", 1)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=2,
        add_bias_linear=False, **fields,
    )  # fmt: skip
    config.virtual_shards, config.context_shards = shards, contexts
    return (InvariantTopKRouter if invariant else TopKRouter)(config, pg_collection=get_default_pg_collection())


def _counts(mesh, invariant):
    """Tokens of each expert as the router counts them in two micro-batches, and as they are."""
    with megatron(mesh, expert_model_parallel_size=1, expert_tensor_parallel_size=1):
        router = _router(
            invariant, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
            moe_router_load_balancing_type="none", params_dtype=torch.bfloat16, bf16=True,
        )  # fmt: skip
        router.bfloat16()  # as Megatron's Float16Module does, counts and all
        seen = torch.zeros(EXPERTS, dtype=torch.int64)
        for _ in range(2):
            seen += router(torch.randn(TOKENS, 1, HIDDEN).bfloat16())[1].sum(0)
        return router.local_tokens_per_expert.tolist(), seen.tolist()


@pytest.mark.parametrize("invariant", (True, False), ids=("invariant", "stock"))
def test_counts_are_exact(bridge, invariant):
    """They decide which way an expert's bias goes; rounded, they would depend on how many a rank has."""
    ((counted, seen),) = on_ranks(1, 1, _counts, invariant)
    assert (counted == seen) is invariant


def _losses(mesh, cp):
    """What this rank adds to each logged loss, and to the gradient of its tokens from the losses alone; and stock's."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    degrees = {"context_parallel_size": cp, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    tp = mesh.size // cp
    with megatron(mesh, tensor_model_parallel_size=tp, **degrees):
        rank = parallel_state.get_context_parallel_rank() * tp + parallel_state.get_tensor_model_parallel_rank()
        results = []
        for invariant in (True, False):
            router = _router(
                invariant, SHARDS, context_shards=2, context_parallel_size=cp, tensor_model_parallel_size=tp,
                sequence_parallel=tp > 1, moe_z_loss_coeff=0.1, moe_aux_loss_coeff=0.1,
                moe_router_load_balancing_type="aux_loss",
            )  # fmt: skip
            router.set_layer_number(1)
            router.weight.data = terms(EXPERTS, HIDDEN, seed=1) / 64
            x = terms(SEQUENCE, BATCH, HIDDEN).chunk(mesh.size)[rank].clone().requires_grad_()
            probs, _ = router(x)
            probs.backward(torch.zeros_like(probs))
            tracker = get_moe_metrics_tracker()
            results.append(({name: metric.values.clone() for name, metric in tracker.metrics.items()}, x.grad))
            tracker.clear()
        return rank, results


def _whole(size, cp):
    """The sum of what ranks log, as Megatron adds it, and the gradients of all tokens; and stock's."""
    ranks = sorted(on_ranks(size, SHARDS, _losses, cp), key=lambda result: result[0])
    for of_ranks in zip(*(results for _, results in ranks), strict=True):
        logged = {name: sum(logged[name] for logged, _ in of_ranks) for name in ("z_loss", "load_balancing_loss")}
        yield logged | {"gradient": torch.cat([gradient for _, gradient in of_ranks])}


def test_losses_are_the_same_for_every_tp_and_cp(bridge):
    """Stock's have the same but for rounding, and not in one layout's bits."""
    (single, stock), *others = (tuple(_whole(size, cp)) for size, cp in ((1, 1), (2, 1), (4, 2)))
    for name in single:
        torch.testing.assert_close(single[name], stock[name], rtol=1e-4, atol=1e-7)
    for other, _ in others:
        assert [name for name in single if not same_bits(single[name], other[name])] == []
    assert not same_bits(stock["z_loss"], others[-1][1]["z_loss"])


def _global_losses(mesh):
    """(sequence, loss, tokens of each expert) of the four micro-batches of three steps; each token's shares; and the
    loss of two shards beside each other.
    """
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator as forget
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from tp_invariant_recipes.numerics.sums import expert_groups

    with megatron(mesh, expert_model_parallel_size=1, expert_tensor_parallel_size=1):
        init_num_microbatches_calculator(0, None, 4, 1, 1)
        router = _router(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="global_aux_loss")
        router.config.data_shards = 2
        router.set_layer_number(1)
        xs, tracker, found = terms(4, SEQUENCE, HIDDEN).unsqueeze(2), get_moe_metrics_tracker(), []
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2, 3)):  # of a step, sequences 2n and 2n + 1 of a shard
            expert_groups.enter(order)
            for sequence in order:
                map_ = router(xs[sequence])[1]
                (metric,) = tracker.metrics.values()
                found.append((sequence, metric.values.sum().item(), map_.sum(0)))
                tracker.clear()
            router.reset_global_aux_loss_tracker()
        router(xs[0])
        vars(router).update(router.of_other_shards(2))
        tracker.clear()
        router(torch.cat((xs[0], xs[2]), 1))  # the first sequences of both shards
        (metric,) = tracker.metrics.values()
        beside = metric.values.sum().item()
        forget()
        logits = [torch.softmax(router.gating(x).float().view(-1, EXPERTS), 1).double() for x in xs]
        return [found[n : n + 4] for n in (0, 4, 8)], logits, beside


def test_the_loss_of_a_global_batch_counts_the_data_shard_so_far(bridge):
    """From nothing in each step, in any order of the shards: the mean of its sequences' tokens by an expert's share."""
    ((steps, shares, beside),) = on_ranks(1, 1, _global_losses)
    for step in steps:
        tokens = {sequence: counts for sequence, _, counts in step}
        for sequence, loss, _ in step:
            seen = [tokens[n] for n in (sequence // 2 * 2, sequence) if n <= sequence]
            mean = torch.stack(seen).double().mean(0)
            factor = EXPERTS / (2 * SEQUENCE**2)  # Megatron logs it without its coefficient
            assert loss == pytest.approx((shares[sequence].sum(0) * mean).sum().item() * factor, rel=1e-5), sequence
    assert [loss for _, loss, _ in steps[0]] == [loss for _, loss, _ in steps[2]]
    alone = {sequence: loss for sequence, loss, _ in steps[0]}
    assert beside == pytest.approx((alone[0] + alone[2]) / 2, rel=1e-6)  # a guard's pass counts from nothing
