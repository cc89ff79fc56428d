"""Multi-latent attention under `numerics=tree`: small DeepSeek-V3 and Moonlight have one ledger for all layouts."""

import pytest

from tests.distributed.one_ledger import agree, train

SIZES = {
    "num_layers": 2,
    "moe_layer_freq": "[0,1]",
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 512,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 128,
}
MODELS = {
    # Latents of queries, scaled positions, groups of experts.
    "deepseek_v3_toy": SIZES | {"q_lora_rank": 32},
    "moonlight_toy": SIZES,
}
FIXED = ("seq=32", "gbs=1", "iters=2", "numerics.virtual_shards=4")

# Model, what is held fixed, the layouts that must agree, with digests of all gradients and weights at every step.
ROWS = (
    ("deepseek_v3_toy", "", ("tp=1", "tp=2 ep=2")),
    pytest.param("moonlight_toy", "", ("tp=1", "tp=2", "tp=4 ep=4"), marks=pytest.mark.release),
    pytest.param("moonlight_toy", "gbs=2", ("tp=1", "tp=2 pp=2", "pp=2"), marks=pytest.mark.release),
    pytest.param(
        "deepseek_v3_toy",
        "gbs=4 numerics.data_shards=2 optimizer.use_distributed_optimizer=true",
        ("dp=1", "dp=2 tp=2", "dp=2 ep=2 mbs=2"),
        marks=pytest.mark.release,
    ),
    pytest.param("deepseek_v3_toy", "precision=fp32", ("tp=1", "tp=2"), marks=pytest.mark.release),
)


def small(model):
    return (model, *FIXED, *(f"model.{name}={value}" for name, value in MODELS[model].items()))


def _train(tpi, model, fixed, layout, run, **before):
    return train(tpi, (*small(model), fixed, layout), run, **before)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(tpi, model, fixed, layouts):
    agree(tpi, (*small(model), "numerics=tree", fixed), layouts)


def test_stock_does_not(tpi):
    fixed = "numerics=stock numerics.initial_weights=invariant iters=1"
    shards = "numerics.virtual_shards=null"
    first, other = (_train(tpi, "deepseek_v3_toy", f"{fixed} {shards}", at, at) for at in ("tp=1", "tp=2"))
    assert first != other
    compared = tpi("compare", "tp=1", "tp=2")
    assert compared.status == 1
    assert "different at step 1" in compared.stdout


def _products_of_a_rank() -> None:
    from tp_invariant_recipes.numerics.layers import partial_linear

    def one(grad, rows, mesh):
        node = partial_linear._subtree((grad,), (rows,), 0, 1)
        return partial_linear.start_reduce_scatter(node.view(1, mesh.size, -1), mesh)

    partial_linear._start_weight_gradient = one


def _heads_of_a_rank() -> None:
    import torch

    from tp_invariant_recipes.numerics.megatron import latent_attention

    def backward(ctx, *gradients):
        total = gradients[0].sum(2, keepdim=True)
        if ctx.mesh.size > 1:
            torch.distributed.all_reduce(total, group=ctx.mesh.group)
        return total, None, None

    latent_attention._Spread.backward = staticmethod(backward)


# What is left out -> the parameters whose gradients then depend on tp first.
INGREDIENTS = {
    "products of chunks": _products_of_a_rank,
    "the tree of the shared key's gradient": _heads_of_a_rank,
}


@pytest.mark.release
@pytest.mark.parametrize("left_out", INGREDIENTS)
def test_each_ingredient_is_needed(tpi, left_out):
    fixed = "numerics=tree"
    one, two = (_train(tpi, "deepseek_v3_toy", fixed, at, at, before=INGREDIENTS[left_out]) for at in ("tp=1", "tp=2"))
    assert one[0].loss == two[0].loss  # the first forward pass is as it was
    assert one != two
