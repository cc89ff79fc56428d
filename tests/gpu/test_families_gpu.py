"""Families with layers of their own, and Nemotron-3-Super's parts, on one GPU: Transformer Engine's layers, one ledger.

Two ranks share a GPU, by Gloo, where there is one (side_by_side.py).
"""

import pytest

from tests.distributed.scenario import STOCK, unequal
from tests.gpu.side_by_side import Run, Trained, gpus_for, marks
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import read

pytestmark = marks()

_SMALL = "gbs=2 iters=3 seq=128 numerics.virtual_shards=2 model.kv_channels=32"
MODELS = {
    "gemma3": f"gemma3_toy {_SMALL}",
    "gpt": f"qwen3_toy {_SMALL} model.normalization=LayerNorm model.layernorm_zero_centered_gamma=true "
    "model.qk_layernorm=false model.position_embedding_type=learned_absolute model.gated_linear_unit=false "
    "model.activation_func=torch.nn.functional.gelu model.add_bias_linear=true model.bias_activation_fusion=false",
    "olmoe": f"olmoe_toy {_SMALL}",
    "z-loss": f"qwen3_moe_toy {_SMALL} model.moe_z_loss_coeff=0.01",
    "qwen3_next": f"qwen3_next_toy {_SMALL} numerics.virtual_shards=4 numerics.data_shards=2",
    "super": "nemotron3_nano_0p1b gbs=2 iters=3 seq=128 numerics.virtual_shards=2 model.hybrid_layer_pattern=ME*E "
    "model.moe_latent_size=128 model.mtp_num_layers=2 model.mtp_use_repeated_layer=true "
    "model.mtp_hybrid_override_pattern=*E",
}
LAYOUTS = ("tp=1", "tp=2", "dp=2")
# kind of CUDA graphs -> a model with gated delta nets
_NEXT = f"qwen3_next_toy {_SMALL} iters=6 numerics.virtual_shards=4 model.mtp_num_layers=null"
GRAPHS = {
    "te": f"{_NEXT} model.moe_router_load_balancing_type=aux_loss",
    "full": f"{_NEXT} model.num_moe_experts=null model.moe_ffn_hidden_size=null "
    "model.moe_shared_expert_intermediate_size=null",
}


def _control(family):
    """Stock; of gated delta nets other shards, which are other sums: stock needs a package that tpi lacks."""
    return f"tp=1 {'numerics.virtual_shards=2' if family == 'qwen3_next' else STOCK}"


def _run(family, layout):
    words = f"{MODELS[family]} {layout}"
    return Run(f"{family}-{layout.partition('=')[2].replace(' ', '-')[:12]}-{layout[:2]}", words, gpus_for(words))


def _graphed(model, kind):
    return Run(f"graphs-{model}-{kind}", f"{GRAPHS[model]} tp=1 cuda_graph={kind}", 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The steps of a run."""
    families = [_run(family, layout) for family in MODELS for layout in (*LAYOUTS, _control(family))]
    graphed = [_graphed(model, kind) for model in GRAPHS for kind in ("off", model)]
    trained = Trained.where_they_fit(tmp_path_factory.mktemp("families"), [*families, *graphed])
    return lambda run: list(read(trained(run.name)).steps)


@pytest.fixture
def trained(runs):
    """The steps of a family's run in a layout."""
    return lambda family, layout: runs(_run(family, layout))


@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs_of_gated_delta_nets_are_the_eager_run(runs, kind):
    eager, graphed = runs(_graphed(kind, "off")), runs(_graphed(kind, kind))
    assert unequal(eager, graphed) == []
    assert eager[0].loss != eager[-1].loss


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("family", MODELS)
def test_one_ledger_for_all_layouts(trained, family, layout):
    assert unequal(trained(family, LAYOUTS[0]), trained(family, layout)) == []


@pytest.mark.parametrize("family", MODELS)
def test_the_model_is_bridges(trained, family):
    """Stock's layers compute the same to rounding, and other bits."""
    tree, stock = trained(family, LAYOUTS[0])[0], trained(family, _control(family))[0]
    assert bits_float(tree.loss) == pytest.approx(bits_float(stock.loss), rel=2e-3)
    assert tree.gradients != stock.gradients
