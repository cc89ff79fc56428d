# SPDX-License-Identifier: Apache-2.0
"""A recipe as the lowest layer of a run's tree: what it sets stands below our groups and the command line.

The layer has every field that differs from the default of its class, and every field that `conf/config.yaml` sets,
so that the recipe's value counts and not ours. Objects that a tree cannot hold, such as a function without a name,
are named in `recipe.kept`; a rank calls the recipe again for them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tp_invariant_recipes.errors import ConfigError, refuse
from tp_invariant_recipes.fields.model import KNOWN
from tp_invariant_recipes.settings import conf_files, cuda_graphs, environment, field_table, finetuning, schema
from tp_invariant_recipes.settings.sections import RecipeSettings
from tp_invariant_recipes.sources import recipe_fields, recipe_process, recipe_source

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

_OF_SERVICES = [name for service in field_table.SERVICES.values() for name in (service.run_name, *service.signs)]
# Fields that tpi decides, and why. What a recipe says there does not count.
TPI_FIELDS = {
    "checkpoint.save": "checkpoints go to run.dir",
    "checkpoint.load": "tpi train --resume RUN continues a run",
    "checkpoint.ckpt_step": "tpi train --resume RUN continues a run",
    "checkpoint.dist_ckpt_optim_fully_reshardable": "a checkpoint can be read in every layout",
    "dataset.path_to_cache": "the index of the data goes to run.dir",
    **{f"dataset.{name}": "tpi downloads no examples; dataset.dataset_root" for name in finetuning.DOWNLOADS},
    **{
        f"logger.{name}": "logging= selects the tracking service"
        for name in ("tensorboard_dir", "wandb_save_dir", "wandb_entity", *_OF_SERVICES)
    },
    "logger.comet_api_key": "logging= selects the tracking service, and a key is never written down",
    "rerun_state_machine.rerun_mode": "the ledger shows whether steps repeat",
    "scheduler.override_opt_param_scheduler": "a run that goes on takes its schedule from its checkpoint",
    "train.exit_signal_handler": "SIGTERM saves a checkpoint",
}
# Fields that repeat another one. They follow it where the recipe has them equal, so that one override changes both.
FOLLOWS = {
    "dataset.seq_length": "model.seq_length",
    "dataset.random_seed": "rng.seed",
    "dataset.seed": "rng.seed",
    "scheduler.start_weight_decay": "optimizer.weight_decay",
    "scheduler.end_weight_decay": "optimizer.weight_decay",
    "ddp.use_distributed_optimizer": "optimizer.use_distributed_optimizer",
}
# What follows by a rule.
_WITH_TP = "${tpi.more_than_one:${model.tensor_model_parallel_size}}"
_ETP = "${model.tensor_model_parallel_size}"
# Fields of a provider that say which layers a model has.
SPECS = ("transformer_layer_spec", "hybrid_stack_spec")
# Fields that rules read: each is specified, whatever its value.
READ_BY_RULES = KNOWN - {*SPECS}
# Fields whose value says nothing, and attributes that nothing reads.
INERT_VALUES = {
    "dataset.skip_getting_attention_mask_from_dataset": True,
    "model.attention_backend": None,
    "model.moe_flex_dispatcher_backend": None,
}
NOT_READ = recipe_fields.UNREAD | {"dataset.sequence_length"}  # Bridge's own copy of another field
# Earlier names of kinds of CUDA graphs, which Megatron-Core still reads: field -> its value, the kind.
EARLIER_GRAPHS = {
    "cuda_graph_scope": (cuda_graphs.FULL, cuda_graphs.FULL),
    "external_cuda_graph": (True, cuda_graphs.TE),
}
# A field of names that Bridge's recipes set to a dtype, which Megatron-Core reads as no name.
NAMED = "moe_router_dtype"


@dataclass(frozen=True)
class RecipeAnswer:
    """What composing needs to know of a recipe.

    text:     the layer as a YAML file of the group `model`.
    own:      what the recipe sets, section by section, before tpi changes anything.
    defaults: field -> default of the class of its model, as a file holds it.
    examples: the fields of its dataset, where that is one of examples; empty otherwise.
    variables: those of the environment that it sets.
    preset:   the name of its precision once gradients are added in fp32; None: it has none then.
    fields:   of the class of its model, where that is not one of Bridge's: as a row of `field_table`, since tpi imports
              no class of a recipe's own.
    """

    text: str
    own: dict[str, Any]
    defaults: dict[str, Any]
    examples: list[str]
    variables: dict[str, str]
    preset: str | None
    fields: dict[str, list[str] | None]


@functools.cache
def read_recipe(model: str, hf_folder: str | None, text_data: bool) -> RecipeAnswer:
    """Ask a recipe, or the cache.

    model: `recipe=…`. hf_folder: as for `recipe_source.call`. text_data: whether data=text decides the tokenizer.
    Raises ConfigError listing what no run could take from the recipe.
    """

    def asked() -> dict[str, Any]:
        return dataclasses.asdict(_read_recipe(model, hf_folder, text_data=text_data))

    return RecipeAnswer(**recipe_process.ask(model, asked, "read", text_data, hf_folder=hf_folder))


def _read_recipe(model: str, hf_folder: str | None, *, text_data: bool) -> RecipeAnswer:
    own: dict[str, Any] = {}
    layer = _layer(model, hf_folder, own, text_data=text_data)
    provider = layer["model"][schema.PROVIDER]
    return RecipeAnswer(
        "# @package _global_\n" + yaml.safe_dump(layer, sort_keys=False, allow_unicode=True),
        own,
        _defaults(provider),
        sorted(schema.fields(schema.bridge_class(schema.SFT_DATASET))) if finetuning.is_sft(layer["dataset"]) else [],
        layer.get("cluster", {}).get("environment", {}),
        recipe_fields.preset(layer["mixed_precision"]),
        {} if provider.startswith(schema.BRIDGES) else field_table.row(schema.fields(schema.bridge_class(provider))),
    )


def _defaults(provider: str) -> dict[str, Any]:
    fields = dataclasses.fields(schema.bridge_class(provider))
    plain = {field.name: recipe_fields.serialize(recipe_fields.default(field)) for field in fields}
    return {name: value for name, value in plain.items() if value is not recipe_fields.MISSING}


def _layer(model: str, hf_folder: str | None, untouched: dict[str, Any], *, text_data: bool) -> dict[str, Any]:
    """untouched: receives what the recipe sets, before tpi changes anything."""
    before = environment.recorded(os.environ)
    container = recipe_source.call(model, hf_folder)
    kept: list[str] = []
    layer = _own(model, container, kept)
    untouched |= copy.deepcopy(layer)
    for path in TPI_FIELDS:
        section, _, name = path.partition(".")
        layer.get(section, {}).pop(name, None)
    if layer["model"].get("gradient_accumulation_fusion"):  # Bridge's default, which is stock's alone
        del layer["model"]["gradient_accumulation_fusion"]
    _apply_followers(layer)
    _tokenizer(layer, hf_folder, text_data=text_data)
    if text_data:  # of a split without documents Megatron looks for samples for ever
        layer["dataset"].pop("split", None)
        kept = [path for path in kept if path != "dataset"]
    kind = "recipe" if "dataset" in kept else _data(layer)
    layer["data"] = {"kind": kind, "path": None, "tokenizer": None, "json_key": "text", "cache": None}
    # Its variables count as those of the container do: the launcher sets them, and the ledger records them.
    variables = dict(environment.recorded(os.environ).items() - before.items())
    variables |= {name: str(value) for name, value in (container.env_vars or {}).items()}
    if variables:
        layer["cluster"] = {"environment": variables}
    layer["logging"] = {"kind": "none"}
    layer["recipe"] = {
        "name": model.removeprefix(recipe_source.PREFIX),
        "hf_folder": hf_folder,
        "source": recipe_source.digest(model),
        "kept": [path for path in kept if path not in TPI_FIELDS],
        "adjusted": [],
    }
    return layer


def _own(model: str, container: ConfigContainer, kept: list[str]) -> dict[str, Any]:
    """kept: receives the paths of what a tree cannot hold."""
    refuse([f"{model}: {problem}" for problem in recipe_fields.foreign(container)])
    layer: dict[str, Any] = {}
    of_examples = type(container.dataset) is schema.bridge_class(schema.SFT_DATASET)
    for name, path in schema.BRIDGE_SECTIONS.items():
        if (part := getattr(container, name)) is None:
            continue
        if name == "dataset" and recipe_fields.own_data(part):
            layer[name] = {}
            kept.append(name)
            continue
        # The class that a run will have there: Bridge's, where the recipe has Core's that it derives from.
        own = path == schema.PROVIDER or (name == "dataset" and of_examples)
        cls = type(part) if own else schema.bridge_class(path)
        values = _values(name, part)
        fields, objects = recipe_fields.plain_fields(values, cls, _stated(name, values))
        kept += [f"{name}.{field}" for field in objects if not (field in SPECS and _tpi_builds(part, values[field]))]
        if name in ("model", *_conf()) or fields or recipe_fields.required(cls):
            layer[name] = fields
    layer["model"][schema.PROVIDER] = f"{type(container.model).__module__}.{type(container.model).__qualname__}"
    if of_examples:
        layer["dataset"][schema.PROVIDER] = schema.SFT_DATASET
    from megatron.bridge.training.config import OptimizerConfigOverrideProvider as Stock

    given = container.optimizer_config_override_provider
    if not (type(given) is Stock and vars(given) == vars(Stock())):
        kept.append("optimizer_config_override_provider")
    layer["mixed_precision"] = recipe_fields.precision(container.mixed_precision)
    return layer


@functools.cache
def _conf() -> dict[str, Any]:
    """Return the sections of `conf/config.yaml` as written."""
    return yaml.safe_load((conf_files.conf_dir() / "config.yaml").read_text(encoding="utf-8"))


def _values(section: str, part: Any) -> dict[str, Any]:
    """Return the fields of a section, but those that say nothing."""
    values = {
        name: value
        for name, value in recipe_fields.values(part)
        if (path := f"{section}.{name}") not in NOT_READ and not (path in INERT_VALUES and value is INERT_VALUES[path])
    }
    for name, (value, kind) in EARLIER_GRAPHS.items():
        if section == "model" and values.get(name) == value:
            del values[name]
            values["cuda_graph_impl"] = kind
    if type(values.get(NAMED)).__name__ == "dtype":
        values[NAMED] = recipe_fields.serialize(values[NAMED])
    return values


def _stated(section: str, values: Mapping[str, Any]) -> set[str]:
    """Return the fields that are written down whatever their value: conf/config.yaml has others, or rules read them."""
    stated = {*(_conf().get(section) or {})}
    if section == "model":
        stated |= {name for name in READ_BY_RULES if values.get(name) is not None}
    return stated | {*finetuning.STATED} if section == finetuning.SECTION else stated


def _tpi_builds(part: Any, spec: Any) -> bool:
    """Whether latent_spec.py or spec.py of numerics/megatron builds a provider's layers: DeepSeek, Moonlight, GLM."""
    provider = f"{type(part).__module__}.{type(part).__qualname__}"
    if not isinstance(spec, functools.partial) or provider not in (schema.LATENT, schema.PROVIDERS[0]):
        return False
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    plain = not spec.args and spec.keywords.keys() <= {"use_transformer_engine"}
    return spec.func is get_gpt_decoder_block_spec and plain


def _apply_followers(layer: dict[str, Any]) -> None:
    """Let fields follow others that they equal; those that conf/config.yaml lets follow, too."""
    for path, leader in FOLLOWS.items():
        (section, _, name), (leading, _, leads) = path.partition("."), leader.partition(".")
        if name in layer.get(section, {}) and layer[section][name] == layer.get(leading, {}).get(leads):
            layer[section][name] = f"${{{leader}}}"
    model = layer["model"]
    # With one rank there is none, and experts on several ranks need it.
    if model.get("sequence_parallel") or model.get("num_moe_experts"):
        model["sequence_parallel"] = _WITH_TP
    # Modules of CUDA graphs go by the present name of their field.
    if not cuda_graphs.requested(model):
        model.pop("cuda_graph_scope", None)
    elif isinstance(model.get("cuda_graph_scope"), list):
        model["cuda_graph_modules"] = model.pop("cuda_graph_scope")
    _sizes(layer)
    if model.get("expert_tensor_parallel_size") is None:
        model["expert_tensor_parallel_size"] = _ETP if model.get("num_moe_experts") else 1


def _sizes(layer: dict[str, Any]) -> None:
    """Set the numbers that Bridge and Megatron-Core would fill in, since rules reckon with them."""
    model, tokenizer = layer["model"], layer["tokenizer"]
    if model.get("vocab_size") is None:
        model["vocab_size"] = tokenizer.get("vocab_size") or 0  # 0 is refused by the name of the key
        if tokenizer.get("tokenizer_type") == "NullTokenizer":
            tokenizer["use_tokenizer_vocab_size"] = True  # as Bridge does
    if layer["validation"].get("eval_interval") == 0:  # as Bridge reads it
        layer["validation"]["eval_interval"] = None
    if model.get("ffn_hidden_size") is None:
        model["ffn_hidden_size"] = "${tpi.times:4,${model.hidden_size}}"


def _data(layer: dict[str, Any]) -> str:
    """Return the kind of data: "mock" is what Megatron generates, "recipe" what the recipe names or describes as
    examples.
    """
    dataset = layer["dataset"]
    named = any(dataset.get(name) for name in ("blend", "blend_per_split", "data_path"))
    return "recipe" if named or finetuning.is_sft(dataset) else "mock"


def _tokenizer(layer: dict[str, Any], hf_folder: str | None, *, text_data: bool) -> None:
    """Keep a recipe's tokenizer for its own data. What tpi generates or prepares has token ids, no text.

    hf_folder: what stands for the recipe's models, and for their tokenizer if it has one.
    """
    if finetuning.is_sft(layer["dataset"]):
        if hf_folder is not None and any(Path(hf_folder).glob("tokenizer*")):
            layer["tokenizer"]["tokenizer_model"] = hf_folder
        return
    null = layer["tokenizer"].get("tokenizer_type") == "NullTokenizer"
    if text_data or (_data(layer) == "mock" and not null):
        del layer["tokenizer"]
    elif null and "vocab_size" in layer["tokenizer"] and layer["model"].get("vocab_size"):
        size = layer["tokenizer"]["vocab_size"]
        if layer["tokenizer"].pop("use_tokenizer_vocab_size", False):
            layer["model"]["vocab_size"] = None  # it follows the tokenizer's
        layer["tokenizer"]["vocab_size"] = f"${{tpi.at_most:{size},${{model.vocab_size}}}}"


def without_defaults(model: dict[str, Any], answer: RecipeAnswer) -> dict[str, Any]:
    """Return the fields of a model but those that no rule reads and that have the default of the model's class.

    An override can so take back what a recipe sets.
    """
    same = model[schema.PROVIDER] == answer.own["model"][schema.PROVIDER]
    defaults = answer.defaults if same else _defaults(model[schema.PROVIDER])
    stated = READ_BY_RULES | (_conf()["model"]).keys()
    return {n: v for n, v in model.items() if n in stated or n not in defaults or v != defaults[n]}


def without_pretraining_fields(
    dataset: dict[str, Any], answer: RecipeAnswer, requested: Collection[str]
) -> dict[str, Any]:
    """Return a section `dataset` without the fields of conf/config.yaml that are of pretraining, where it is of
    examples.

    requested: the paths that the command line sets.
    """
    if not finetuning.is_sft(dataset):
        return dataset
    pretraining = {n for n in _conf()["dataset"] if n not in answer.examples and f"dataset.{n}" not in requested}
    if not dataset.get("enable_offline_packing") and f"dataset.{finetuning.PACKING}" not in requested:
        pretraining.add(finetuning.PACKING)
    return {name: value for name, value in dataset.items() if name not in pretraining}


def enter(recipe: RecipeSettings) -> None:
    """Let a user's recipe change this process, one of its run's: it is imported and called once more.

    Bridge's own recipes change nothing. Raises ConfigError: the recipe's file has changed since the run was composed.
    """
    model = f"{recipe_source.PREFIX}{recipe.name}"
    if recipe.name is not None and recipe_source.parse(model).module != recipe_source.BRIDGE:
        _entered(model, recipe.hf_folder, recipe.source)


@functools.cache
def _entered(model: str, hf_folder: str | None, source: str | None) -> None:
    variables = environment.recorded(os.environ)
    recipe_source.call(model, hf_folder)
    os.environ.update(variables)  # cluster.environment has the recipe's, and the command line overrides them
    _check_source(model, source)


def _check_source(model: str, source: str | None) -> None:
    if recipe_source.digest(model) != source:
        raise ConfigError(f"{model}: its file is not the one that this run was composed of")


def restore(container: ConfigContainer, recipe: RecipeSettings) -> None:
    """Put what a tree cannot hold into a container.

    Raises ConfigError: the recipe's file has changed since the run was composed.
    """
    if not recipe.kept:
        return
    model = f"{recipe_source.PREFIX}{recipe.name}"
    called = recipe_source.call(model, recipe.hf_folder)
    _check_source(model, recipe.source)
    for path in recipe.kept:
        section, _, name = path.rpartition(".")
        holder, source = (getattr(container, section), getattr(called, section)) if section else (container, called)
        setattr(holder, name, getattr(source, name))
