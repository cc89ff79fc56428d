"""Our models as functions for users of Megatron-Bridge, and known by name to its own recipe runner."""

import os
import runpy
import sys

import pytest

from tests.distributed.ranks import on_ranks
from tests.models import degree
from tp_invariant_recipes import recipes
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.cpu_host import cpu
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.patches import bridge, registry
from tp_invariant_recipes.recipes import named, recipe
from tp_invariant_recipes.recipes.__main__ import main, publish
from tp_invariant_recipes.settings import conf_files

pytestmark = pytest.mark.usefixtures("families")

MODELS = conf_files.groups()["model"]
RECIPES = named()


def test_every_model_has_a_function_and_every_function_a_model():
    assert sorted(RECIPES) == sorted(f"tpi_{model}_pretrain_config" for model in MODELS)
    for name, function in RECIPES.items():
        assert getattr(recipes, name) is function
        assert function.__name__ == name
        assert function.__doc__
        assert name in dir(recipes)


def test_a_name_that_no_model_has_is_no_attribute():
    with pytest.raises(AttributeError, match="tpi_qwen9_pretrain_config"):
        _ = recipes.tpi_qwen9_pretrain_config


def test_a_function_asks_for_its_own_model(monkeypatch):
    """That Bridge accepts every model, test_config_container.py shows."""
    monkeypatch.setattr(recipes, "recipe", lambda *asked, **keys: (asked, keys))
    for model in MODELS:
        assert RECIPES[f"tpi_{model}_pretrain_config"]("iters=7", tp=2) == ((model, "iters=7"), {"tp": 2})


@pytest.mark.parametrize("model", ("qwen3_toy", "nemotron3_nano_toy", "gemma3_1b"))
def test_a_function_gives_its_own_model_with_the_overrides(model):
    from megatron.bridge.training.config import ConfigContainer

    made = RECIPES[f"tpi_{model}_pretrain_config"](f"tp={degree(model)}", "optimizer.adam_eps=1e-7", "iters=7")
    tree = compose(model, device="gpu").config.model
    assert isinstance(made, ConfigContainer)
    assert made.model.hidden_size == tree["hidden_size"]
    assert made.model.num_layers == tree.get("num_layers")
    assert made.model.num_moe_experts == tree.get("num_moe_experts")
    assert made.model.tensor_model_parallel_size == degree(model)
    assert made.optimizer.adam_eps == 1e-7
    assert made.train.train_iters == 7
    assert made.model.transformer_impl == "transformer_engine"
    assert made.checkpoint.save is None
    assert not hasattr(made.model, "invariant_mode")  # its numerics are stock


def test_keywords_are_overrides():
    made = recipes.tpi_qwen3_toy_pretrain_config("iters=7", tp=2, sp=False, lr=1e-3, **{"optimizer.adam_eps": 1e-7})
    texts = recipes.tpi_qwen3_toy_pretrain_config("iters=7", "tp=2", "sp=false", "lr=1e-3", "optimizer.adam_eps=1e-7")
    assert made.model.tensor_model_parallel_size == 2
    assert made.optimizer.adam_eps == 1e-7
    assert made.to_dict() == texts.to_dict()
    assert recipes.tpi_qwen3_toy_pretrain_config(device="cpu").dist.distributed_backend == "gloo"
    assert recipe("qwen3_toy", "device=cpu").model.transformer_impl == "local"


def test_keywords_that_are_wrong_are_reported_with_everything_else():
    wrong = ("tp=4", "pp=5", "optimizer.lrr=1")
    with pytest.raises(ConfigError) as error:
        recipes.tpi_qwen3_8b_pretrain_config(*wrong, tp=2, itres=5, seq=object(), numerics="tree")
    for part in (
        "pp=5 does not divide",
        "did you mean 'optimizer.lr'?",
        "tp=4 and the keyword tp=2 contradict each other",
        "did you mean 'iters'?",
        "seq: <object object at",
        "numerics=tree: a ConfigContainer holds",
    ):
        assert part in str(error.value)


def test_two_calls_share_nothing():
    first, second = (recipes.tpi_qwen3_toy_pretrain_config() for _ in range(2))
    first.model.num_layers = 99
    assert second.model.num_layers == 2


@pytest.fixture
def bridges():
    """`megatron.bridge.recipes`, which is afterwards what it was."""
    import megatron.bridge.recipes as module

    before = dict(vars(module))
    yield module
    for name in vars(module).keys() - before.keys():
        delattr(module, name)
    vars(module).update(before)


def test_publishing_makes_them_attributes_of_bridges_recipes(bridges):
    assert not any(hasattr(bridges, name) for name in RECIPES)
    for _ in range(2):
        publish()
        assert {name: getattr(bridges, name) for name in RECIPES} == RECIPES


def test_publishing_shadows_nothing_of_bridges(bridges):
    taken = ("tpi_qwen3_8b_pretrain_config", "tpi_qwen3_toy_pretrain_config")
    for name in taken:
        setattr(bridges, name, object())
    with pytest.raises(ConfigError, match=f"^megatron.bridge.recipes already has {', '.join(taken)}$"):
        publish()
    assert not hasattr(bridges, "tpi_qwen3_0p6b_pretrain_config")


# As Bridge's scripts/training/run_recipe.py looks recipes up.
RUNNER = """
import sys
import megatron.bridge.recipes
from megatron.bridge.training import initialize

config = getattr(megatron.bridge.recipes, sys.argv[2])()
print("##", __name__, sys.argv[1:], config.model.num_layers, initialize.compile_helpers.__module__)
"""


def test_bridges_runner_finds_them(bridges, tmp_path, monkeypatch, capsys):
    """As `python -m tp_invariant_recipes.recipes runner.py --recipe NAME`, without waiting for Bridge once more."""
    name = "tpi_qwen3_8b_pretrain_config"
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    monkeypatch.setattr(sys, "argv", ["recipes", str(runner), "--recipe", name])
    monkeypatch.delitem(sys.modules, recipes.__main__.__name__)
    runpy.run_module(recipes.__name__, run_name="__main__")
    output = capsys.readouterr().out
    assert output.startswith(f"## __main__ ['--recipe', '{name}'] 36 ")
    if bridge.HELPERS.verdict().state == "applies":
        assert output.endswith(f" {bridge.__name__}\n")


def test_without_a_runner_the_usage_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipes"])
    with pytest.raises(SystemExit, match=r"usage: python -m tp_invariant_recipes\.recipes RUNNER\.py"):
        main()


@pytest.mark.parametrize("override", ("numerics=gather", "numerics.mode=tree"))
def test_a_recipe_with_invariant_numerics_is_refused_beside_other_mistakes(override):
    """Its layers would be invariant, and the gradient norm, the cross entropy and the checks stock."""
    with pytest.raises(ConfigError) as error:
        recipe("qwen3_toy", override, "tp=3")
    refused, *others = error.value.problems
    assert refused.startswith(f"{override}: a ConfigContainer holds the invariant layers, and not the rest")
    assert "use `tpi train`, or leave it out and import" in refused
    assert others[0].startswith("tp=3 does not divide")
    assert "numerics" not in "".join(others)


def _pretrained(mesh, switch, folder):
    """What Bridge's pretrain() makes of a recipe, as a program of its own would call it: losses and gradient norms."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    class Seen(Callback):
        def __init__(self):
            self.steps = []

        def on_train_step_end(self, context):
            loss = (context.loss_dict or {}).get("lm loss")
            self.steps.append((None if loss is None else loss.item(), float(context.grad_norm)))

    os.environ |= {"NVTE_TP_INVARIANT_MODE": switch, "RANK": str(mesh.rank), "WORLD_SIZE": str(mesh.size)}
    sys.modules.pop("tp_invariant_recipes.patch_mode", None)
    os.chdir(folder)
    with cpu.installed(), registry.applied():
        import tp_invariant_recipes.patch_mode  # noqa: F401

        seen = Seen()
        model = (f"tp={mesh.size}", "seq=64", "iters=2", "numerics.initial_weights=invariant")
        pretrain(recipe("qwen3_toy", *model, device="cpu"), forward_step, callbacks=[seen])
    return seen.steps


@pytest.mark.release
@pytest.mark.parametrize("switch", ("1", "0"))
def test_the_switch_makes_bridges_pretrain_of_a_recipe_invariant(tmp_path, switch):
    first, second = (on_ranks(t, 8, _pretrained, switch, tmp_path) for t in (1, 2))
    assert len(first[0]) == 2
    assert (first[0] == second[-1]) == (switch == "1")
