# SPDX-License-Identifier: Apache-2.0
"""`recipe=…`: a recipe of a user's file and recipes of Bridge, composed and trained on the CPU. Recipes of Bridge with
multi-latent attention, sinks or gated delta nets compose for `tree` and train.
"""

import json
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from tests.distributed.recipes.families import DENSE, FAMILIES, SHORT, folder
from tests.recipe_files import MODEL
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.fingerprint import fingerprint
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.settings import run_config, schema
from tp_invariant_recipes.sources import recipe_fields, recipe_source

pytestmark = pytest.mark.usefixtures("families")

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"

MINE = (
    MODEL
    + """
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.mixed_precision import bf16_mixed


def small():
    cfg = _pretrain_common()
    cfg.model = model(vocab_size=512, seq_length=64)
    cfg.dataset.seq_length, cfg.dataset.num_workers = 64, 0
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 2, 2, 1
    cfg.scheduler.lr_warmup_iters = 0
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = "NullTokenizer", 512
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, None
    return cfg


def layers():
    cfg = small()
    cfg.model.transformer_layer_spec = lambda config: None
    del cfg.model.__dict__["hidden_dropout"]  # the default of the class, 0.1
    return cfg


def of_its_tokenizer():
    cfg = small()
    assert cfg.tokenizer.use_tokenizer_vocab_size  # Bridge's recipes have it
    cfg.model.vocab_size, cfg.tokenizer.vocab_size = 1024, 500
    return cfg


def rows():
    from megatron.bridge.training.config import DatasetProvider

    class Rows(DatasetProvider):
        def build_datasets(self, context):
            rows = [(torch.arange(65) + n) % 500 for n in range(context.train_samples)]
            there = dict(loss_mask=torch.ones(64), position_ids=torch.arange(64))
            return [dict(tokens=row[:-1], labels=row[1:], **there) for row in rows], None, None

    cfg = small()
    cfg.dataset = Rows(dataloader_type="single", num_workers=0)
    return cfg


def habits():
    cfg = small()
    cfg.scheduler.max_lr = 1e-6  # no field
    cfg.validation.eval_interval = 0
    cfg.model.attention_backend = "fused"  # the field takes an enumeration
    cfg.logger.mlflow_description = "mine"
    return cfg


def peft():
    from megatron.bridge.peft.dora import DoRA

    cfg = small()
    cfg.peft = DoRA()
    return cfg


def unknown():
    cfg = small()
    cfg.model.hidden_sise = 64
    cfg.modle = cfg.model
    cfg.optimizer.lr_ = 1e-4
    return cfg


def in_bf16():
    cfg = small()
    cfg.ddp.grad_reduce_in_fp32 = False
    cfg.mixed_precision = bf16_mixed()
    cfg.mixed_precision.grad_reduce_in_fp32 = False
    cfg.env_vars = {"NVTE_FWD_LAYERNORM_SM_MARGIN": 16}
    return cfg


def raises():
    raise ValueError("no such thing")


def other():
    return {}


def needs(size):
    return small()


constant = 3
"""
)

# What is said of each function that is no recipe for tpi.
WRONG = {
    "other": "a recipe returns a ConfigContainer, and this one returns builtins.dict",
    "needs": "a recipe is called without arguments, and this function needs size",
    "constant": "constant is no function but int",
    "peft": "its peft is a DoRA, and tpi trains with LoRA only",
}
OBJECT = "numerics=tree: the recipe sets model.transformer_layer_spec to an object"
DEFAULT = "numerics=tree: model.hidden_dropout=0.1: dropout draws other numbers in every layout"


@pytest.fixture(scope="module")
def mine(shared):
    (shared.folder / "mine.py").write_text(MINE)
    return shared.folder / "mine.py"


@pytest.fixture(scope="module")
def of_family(shared):
    """A family's recipe with its config.json, and what a short run of it is given."""

    def words(family):
        recipe, _, more = FAMILIES[family]
        place = folder(shared.folder / "hf", family)
        return [f"recipe={recipe}", f"recipe.hf_folder={place}", *SHORT.split(), *more.split()]

    return words


def test_the_table_names_the_recipes_of_bridge(bridge):
    assert recipe_source.names() == recipe_source.installed_names(), "write sources/bridge_recipes.json anew"


def test_the_page_counts_the_recipes_of_bridge(bridge):
    """In docs/recipes.md, as `scripts/recipe-table` writes it."""
    counts = PAGE.read_text().partition("<!-- scripts/recipe-table -->")[2].partition("<!-- end -->")[0]
    covered, recipes, with_keys, refused, absent = map(int, re.findall(r"\d+", counts))
    groups = runpy.run_path(str(PAGE.parents[1] / "scripts" / "recipe-table"))["groups"]()
    assert recipes == len(groups) == covered + with_keys + refused + absent, "scripts/recipe-table"


def test_a_model_of_images_or_sound_is_named():
    text, both = ("hidden_size", "is_vision_language", "hf_model_revision"), ("freeze_vision_model", "audio_config")
    models = [make_dataclass("Model", [(name, int, 0) for name in names])() for names in (text, both)]
    assert [*map(recipe_fields._extra_modalities, models)] == ["", "images and audio"]


@pytest.mark.release
def test_the_page_says_what_tree_says_of_them(tmp_path):
    script = PAGE.parents[1] / "scripts" / "recipe-table"
    done = subprocess.run([sys.executable, script, "--check"], cwd=tmp_path)
    assert done.returncode == 0, "scripts/recipe-table"


ADJUSTED = "ddp.average_in_collective: true -> false: each rank divides its gradient by dp before the sum"


def test_a_run_of_a_users_recipe_records_it(mine, shared):
    shared("train", "recipe=mine.py:small", "iters=1", "model.num_layers=1", "run.dir=recorded", status=0)
    run = json.loads((shared.folder / "recorded" / "run.json").read_text())
    assert run["model"] == f"recipe={mine}:small"
    assert ADJUSTED in read(shared.folder / "recorded").header.notes["adjusted"]
    assert run["identity"]["ddp.grad_reduce_in_fp32"] is True


@pytest.mark.release
def test_pp_need_not_divide_the_layers(mine, shared):
    done = shared(
        "verify", "recipe=mine.py:small", "pp=1,2", "model.num_layers=3", "numerics=tree", "--dir", "pp", status=0
    )
    assert "identical: pp=1, 2 are bitwise identical over 2 steps" in done.stdout
    message = read(shared.folder / "pp" / "pp2").header.notes["adjusted"]
    assert [line.partition(":")[0] for line in message if "pipeline_stage" in line] == [
        f"model.{name}" for name in run_config.UNEVEN
    ]
    with pytest.raises(ConfigError, match=r"pp=2 does not divide model\.num_layers=3"):
        compose(f"recipe={mine}:small", ["pp=2", "model.num_layers=3", "numerics=stock"], device="cpu")


@pytest.mark.parametrize("function", WRONG)
def test_what_is_no_recipe_is_reported_before_anything_starts(bridge, mine, function):
    with pytest.raises(ConfigError) as caught:
        compose(f"recipe={mine}:{function}", device="cpu")
    assert WRONG[function] in str(caught.value)


def test_what_a_recipe_sets_beside_fields_is_reported_too(bridge, mine):
    """An object, and the default of a class."""
    with pytest.raises(ConfigError) as caught:
        compose(f"recipe={mine}:layers", device="cpu")
    assert all(any(says in problem for problem in caught.value.problems) for says in (OBJECT, DEFAULT))
    tree = compose(f"recipe={mine}:layers", device="gpu", numerics="stock").config.sections
    assert tree["recipe"]["kept"] == ["model.transformer_layer_spec"]


@pytest.mark.parametrize("numerics", ("tree", pytest.param("stock", marks=pytest.mark.release)))
def test_a_field_that_is_none_is_named_with_the_nearest(bridge, mine, numerics):
    with pytest.raises(ConfigError) as caught:
        compose(f"recipe={mine}:unknown", device="cpu", numerics=numerics)
    assert [problem.partition(":unknown: ")[2] for problem in caught.value.problems] == [
        "model.hidden_sise: no such field of GPTModelProvider; did you mean 'hidden_size'?",
        "optimizer.lr_: no such field of OptimizerConfig; did you mean 'lr'?",
        "modle: no such field of ConfigContainer; did you mean 'model'?",
    ]


@pytest.mark.release
def test_a_dataset_of_a_users_class_trains_with_stock_numerics(bridge, mine, shared):
    model = f"recipe={mine}:rows"
    with pytest.raises(ConfigError, match=r"sets dataset to an object, .*; a GPTDatasetConfig .*, or numerics=stock"):
        compose(model, [], device="cpu")
    assert compose(model, ["data=mock"], device="cpu").config.data.kind == "mock"  # the control
    with pytest.raises(ConfigError, match=r"dataset.split: the recipe's dataset is an object of its own"):
        compose(model, ["dataset.split=1", "numerics=stock"], device="cpu")
    shared("train", model, "numerics=stock", "run.dir=rows")
    assert len(read(shared.folder / "rows").steps) == 2


def test_what_costs_nothing_is_adjusted_and_reported(bridge, mine):
    config = compose(f"recipe={mine}:in_bf16", device="gpu").config
    usual = compose(f"recipe={mine}:small", device="gpu").config
    assert config.mixed_precision == "bf16_mixed"
    message = {line.partition(":")[0] for line in config.recipe.adjusted}
    assert message - {line.partition(":")[0] for line in usual.recipe.adjusted} == {
        "ddp.grad_reduce_in_fp32",
        "mixed_precision.grad_reduce_in_fp32",
        "cluster.environment.NVTE_FWD_LAYERNORM_SM_MARGIN",
    }
    assert fingerprint(config, None) == fingerprint(usual, None)
    typed = "ddp.grad_reduce_in_fp32=false"
    for words, message in ((["numerics.adjust=false"], 8), ([typed], 1)):
        with pytest.raises(ConfigError, match=r"ddp\.grad_reduce_in_fp32=false: gradients are accumulated") as caught:
            compose(f"recipe={mine}:in_bf16", words, device="gpu")
        assert (len(caught.value.problems) > 2) == (message > 1), caught.value.problems
    margin = "cluster.environment.NVTE_FWD_LAYERNORM_SM_MARGIN=0"  # under stock, too, another one is refused
    stock = compose(f"recipe={mine}:in_bf16", [margin], device="gpu", numerics="stock").config
    assert stock.recipe.adjusted == []
    assert stock.section("ddp")["grad_reduce_in_fp32"] is False


def test_what_bridges_recipes_set_beside_their_fields(bridge, mine):
    """An attribute that nothing reads, a zero for no validation, an object that an override or tpi replaces."""
    with pytest.raises(ConfigError, match=r"model\.attention_backend to an object, .*; model\.attention_backend=auto"):
        compose(f"recipe={mine}:habits", ["numerics.adjust=false"], device="cpu")
    tree = compose(f"recipe={mine}:habits", device="cpu").config.sections
    assert tree["recipe"]["kept"] == []
    assert tree["model"]["attention_backend"] == "auto"
    assert tree["validation"]["eval_interval"] is None
    assert "mlflow_description" not in tree["logger"]
    assert "max_lr" not in tree["scheduler"]
    fields = schema.fields(schema.bridge_class(schema.BRIDGE_SECTIONS["scheduler"]))
    assert not {path.partition(".")[2] for path in recipe_fields.UNREAD} & fields.keys()


@pytest.mark.release
def test_the_vocabulary_of_a_recipes_tokenizer_has_one_size_in_every_layout(bridge, mine):
    """500 ids, padded to a multiple of 128. Megatron would pad to one of 128 * tp: 1,024 at tp=8."""
    for tp in (1, 2, 4):
        overrides = [f"tp={tp}", "ddp.grad_reduce_in_fp32=true"]
        config = compose(f"recipe={mine}:of_its_tokenizer", overrides, device="cpu").config
        assert (config.model["vocab_size"], config.section("tokenizer")["vocab_size"]) == (512, 500)
        assert "use_tokenizer_vocab_size" not in config.section("tokenizer")
    with pytest.raises(ConfigError, match="pads the vocabulary to a multiple of tp"):
        compose(f"recipe={mine}:small", ["tokenizer.use_tokenizer_vocab_size=true"], device="cpu")


def test_a_command_ends_with_one_message(mine, shared):
    done = shared("train", "recipe=mine.py:raises")
    assert (done.status, done.stdout) == (2, "")
    assert "the recipe raises ValueError: no such thing" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 2  # before it the line that the recipe is called


def test_what_the_run_changes_of_a_recipe(mine, shared):
    done = shared("show", "recipe=mine.py:small", "tp=2", "--diff", status=1)
    assert "  model.tensor_model_parallel_size: 1 -> 2\n" in done.stdout
    assert f"  {ADJUSTED}\n" in done.stdout
    assert "optimizer.lr" not in done.stdout


# What a run of a family's recipe is given; `tpi show --fix` finds the other keys.
GIVEN = "tp=2 seq=64 gbs=2 iters=2 dataset.num_workers=0"
MOST_KEYS = "qwen3_moe"  # stands for all in `make test`


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == MOST_KEYS else pytest.mark.release) for name in DENSE]
)
def test_the_command_with_every_key_is_accepted(of_family, shared, family):
    """It is refused without these keys. The pages count the recipes of these families as covered, mostly with keys."""
    recipe, folder, *_ = of_family(family)
    given = [recipe, folder, *GIVEN.split(), *(["ep=1"] if family == "qwen3_moe" else []), "numerics.adjust=false"]
    with pytest.raises(ConfigError):
        compose(given[0], given[1:], device="cpu")
    command = shlex.split(shared("show", *given, "--fix", status=0).stdout)
    assert command[: 2 + len(given)] == ["tpi", "train", *given]
    compose(command[2], command[3:], device="cpu")


def test_what_no_key_solves_is_reported(mine, shared):
    done = shared("show", "recipe=mine.py:peft", "--fix", status=2)
    assert "its peft is a DoRA" in done.stderr
    assert "--fix knows no key for this" in done.stderr


@pytest.mark.parametrize(
    "family", ("llama", *(pytest.param(family, marks=pytest.mark.release) for family in DENSE if family != "llama"))
)
def test_a_recipe_of_each_family_composes(bridge, of_family, family):
    recipe, *overrides = of_family(family)
    tree = compose(recipe, [*overrides, "tp=2"], device="cpu").config.sections
    assert tree["model"]["hidden_size"] == 128
    assert tree["dataset"]["seq_length"] == 64
    assert tree["optimizer"]["adam_eps"] == 1e-8  # the recipe's, and not that of conf/config.yaml
    assert tree["numerics"]["mode"] == "tree"
    assert tree["recipe"]["kept"] == []


def test_without_the_configuration_it_says_what_to_fetch(bridge, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="hf download Qwen/Qwen3-14B "):
        compose("recipe=qwen3_14b_pretrain_config", device="gpu")


@pytest.mark.release
@pytest.mark.parametrize("family", DENSE)
def test_a_recipe_of_each_family_has_one_result(of_family, shared, family):
    shared("verify", *of_family(family), "tp=1,2", "--dir", family, status=0)


LAYOUT = ("tp=2", "sp=true", "pp=1", "ep=2")
_COVERED = (
    "precision=bf16 cuda_graph=off model.moe_token_dispatcher_type=alltoall model.moe_router_fusion=false "
    "model.moe_shared_expert_overlap=false optimizer.main_grads_dtype=float32 "
    "optimizer.use_precision_aware_optimizer=false comm_overlap.tp_comm_overlap=false "
    "comm_overlap.overlap_grad_reduce=null comm_overlap.overlap_param_gather=null "
    "comm_overlap.align_param_gather=null comm_overlap.delay_wgrad_compute=false "
    "comm_overlap.overlap_moe_expert_parallel_comm=false"
)


# Family -> overrides beside its recipe, and some of the model that it composes.
COMPOSED = (
    ("moonlight", _COVERED, {"multi_latent_attention": True, "moe_layer_freq": [0, 1]}),
    ("deepseek", _COVERED, {"multi_latent_attention": True, "moe_layer_freq": [0, 1], "q_lora_rank": 32}),
    (
        "deepseek",
        f"{_COVERED} model.mtp_num_layers=null",
        {"multi_latent_attention": True, "moe_layer_freq": [0, 1], "q_lora_rank": 32},
    ),
    ("deepseek_v2", f"{_COVERED} etp=1", {"multi_latent_attention": True, "moe_layer_freq": [0, 1]}),
    ("gpt_oss", "", {"softmax_type": "learnable", "activation_func_clamp_value": 7.0}),
    ("qwen3_next", "", {"linear_attention_freq": [1, 0], "moe_router_load_balancing_type": "global_aux_loss"}),
)


@pytest.mark.parametrize(
    "family, more, fields",
    [pytest.param(*row, marks=[] if n in (1, 4, 5) else pytest.mark.release) for n, row in enumerate(COMPOSED)],
)
def test_a_recipe_composes_for_tree(bridge, tmp_path, family, more, fields):
    recipe = f"recipe={FAMILIES[family][0]}"
    words = [f"recipe.hf_folder={folder(tmp_path, family)}", *SHORT.split(), *LAYOUT, *more.split()]
    tree = compose(recipe, words, device="cpu").config.sections
    assert (tree["numerics"]["mode"], tree["recipe"]["kept"]) == ("tree", [])  # with layers of tpi's
    assert {name: tree["model"][name] for name in fields} == fields
    assert tree["model"].get("q_lora_rank") == FAMILIES[family][1].get("q_lora_rank")


# Families: their recipes are cut in size and in steps, and in nothing else.
CUT_SMALL = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "gpt_oss", "nemotron_super", "qwen3_next")
CUT = "seq=64 gbs=2 iters=3 scheduler.lr_warmup_iters=0 tp=1 pp=1 ep=1 device=cpu"


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", CUT_SMALL)
def test_a_recipe_trains_without_another_key_than_size(shared, family):
    words = (f"recipe={FAMILIES[family][0]}", f"recipe.hf_folder={folder(shared.folder / 'hf', family)}", *CUT.split())
    done = shared("train", *words, f"run.dir={family}-cut", status=0)
    assert "adjusted, numerics.adjust=false refuses it:" in done.stderr
    assert "3 steps, numerics=tree" in done.stderr
    assert len(shared.ledger(f"{family}-cut")) == 3


# A benchmark of Bridge's: room for an expert rank's tokens, the flex dispatcher; MXFP8, which stock lacks.
BENCHMARK = "megatron.bridge.perf_recipes.qwen:qwen3_30b_a3b_pretrain_8gpu_b200_fp8mx_config"
CUT_BENCHMARK = "seq=64 gbs=4 mbs=1 iters=2 scheduler.lr_warmup_iters=0 pp=1 ep=1 device=cpu dataset.num_workers=0"
# What stock numerics need of it on a CPU: the same, typed.
AS_STOCK = (
    "precision=bf16 numerics=stock numerics.initial_weights=invariant cuda_graph=off "
    "comm_overlap.overlap_moe_expert_parallel_comm=null comm_overlap.delay_wgrad_compute=null "
    "model.overlap_moe_expert_parallel_comm=false model.delay_wgrad_compute=false "
    "model.tp_comm_overlap=false comm_overlap.tp_comm_overlap=false "
    "model.moe_paged_stash=false model.moe_expert_rank_capacity_factor=null model.moe_token_dispatcher_type=alltoall "
    "model.use_transformer_engine_op_fuser=false model.moe_router_fusion=false model.use_te_rng_tracker=false "
    "rng.te_rng_tracker=false model.moe_mlp_glu_interleave_size=null model.moe_router_padding_for_quantization=false"
)
ADJUSTED_FAMILIES = (
    "model.moe_paged_stash: true -> false: ",
    "model.moe_expert_rank_capacity_factor: 1.5 -> null: ",
    "mixed_precision.fp8_dot_product_attention: true -> false: ",
)


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_benchmark_has_one_result_in_two_layouts_and_stock_has_not(shared):
    place = folder(shared.folder / "hf", "qwen3_moe")
    words = (f"recipe={BENCHMARK}", f"recipe.hf_folder={place}", *CUT_BENCHMARK.split(), "tp=1,2")
    done = shared("verify", *words, "--dir", "benchmark", status=0)
    assert "identical: tp=1, 2 are bitwise identical over 2 steps" in done.stdout
    adjusted = read(shared.folder / "benchmark" / "tp1").header.notes["adjusted"]
    for line in ADJUSTED_FAMILIES:
        assert any(message.startswith(line) for message in adjusted), adjusted
    done = shared("verify", *words, *AS_STOCK.split(), "--dir", "benchmark-stock", status=1)
    assert "different: tp=2 is not bitwise identical to tp=1" in done.stdout
