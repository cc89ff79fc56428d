"""The invariant router: what it counts."""

import pytest
import torch

from tests.distributed.ranks import megatron, on_ranks

TOKENS, HIDDEN, EXPERTS = 1032, 32, 4


def _counts(mesh, invariant):
    """Tokens of each expert as the router counts them in two micro-batches, and as they are."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    from tp_invariant_recipes.numerics.megatron.router import InvariantTopKRouter

    with megatron(mesh, expert_model_parallel_size=1, expert_tensor_parallel_size=1):
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=2,
            moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, add_bias_linear=False,
            moe_router_load_balancing_type="none", params_dtype=torch.bfloat16, bf16=True,
        )  # fmt: skip
        config.virtual_shards = 1
        router = (InvariantTopKRouter if invariant else TopKRouter)(config, pg_collection=get_default_pg_collection())
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
