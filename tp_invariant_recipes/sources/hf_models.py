# SPDX-License-Identifier: Apache-2.0
"""The models of Hugging Face that weights come from and go to: sizes in config.json, names and shapes of tensors.

A row of `hf_families.FAMILIES` is one architecture that Bridge's AutoBridge converts and whose tensors are all known.
The sizes are those of `config.json`, under their names there; Family.fields has the fields of the model. So a folder is
compared with a run before anything starts, and without Bridge.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings.values import value_text
from tp_invariant_recipes.sources.hf_families import DEPTHS, FAMILIES, NAMES, PLAIN, WHOLE
from tp_invariant_recipes.sources.hf_family import EMBEDDING, OUTPUT, Family
from tp_invariant_recipes.sources.weights import SHOWN, Checkpoint
from tp_invariant_recipes.text import abbreviated

# Fields of transformers' classes that no training reads, or that others here compare.
INERT = {
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache"),
    *("max_position_embeddings", "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "intermediate_size"),
    *("max_window_layers", "rope_parameters", "layer_types", "_sliding_window_pattern"),
}


def family_of(model: Mapping[str, Any]) -> Family | str:
    """Return the architecture of a model, a section `model` of a tree; if it has none here, why."""
    if model.get("hybrid_layer_pattern"):
        return f"a hybrid model has no weights that tpi imports or exports; it knows {NAMES}"
    own = next((family for family in FAMILIES if family.has(model)), None)
    wrong = [
        f"model.{name}={value_text(model.get(name, default))}"
        for name, (value, default) in (own or PLAIN[0]).shared.items()
        if _plain(model.get(name, default)) != _plain(value)
    ]
    if own is None and not wrong:
        traits = ("add_qkv_bias", "qk_layernorm", "num_moe_experts")
        wrong = [f"model.{name}={value_text(model.get(name))}" for name in traits]
    if own is None or wrong:
        return f"no architecture that tpi imports or exports has {', '.join(wrong)}; it knows {NAMES}"
    return own.refused(model) or own


def config_of(family: Family, model: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return what config.json of a model holds. dtype: of the weights, such as "bfloat16"."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "initializer_range": model.get("init_method_std") or 0.02,
        **family.config(model),
    }


def problems(model: Mapping[str, Any], checkpoint: Checkpoint) -> list[str]:
    """Why the weights of a folder are not those of a model, each problem with the key that solves it."""
    where, own = f"weights={checkpoint.folder}", family_of(model)
    try:
        family = _named(checkpoint)
    except ValueError as error:
        return [f"{where}: {error}"]
    if isinstance(own, str):
        return [f"{where}: {own}"]
    if own != family:
        return [f"{where} is of {family.architecture}, and this model is a {own.architecture}; choose another model"]
    try:
        with _reading(family):
            config = _config(checkpoint.folder)
            sizes, fixed = _sizes(family, config), _fixed(family, config)
            kinds = family.layer_types(sizes) or [WHOLE] * sizes["num_hidden_layers"]
            if "layer_types" not in sizes and getattr(config, "layer_types", kinds) not in (kinds, None):
                fixed.append(f"layer_types other than {value_text(kinds)}")
            wanted = dict(family.tensors(sizes))
    except ValueError as error:
        return [f"{where}: {error}"]
    wrong = [f"{where}: its config.json has {setting}, and tpi imports no such model" for setting in fixed]
    has = family.sizes(model)
    for key, value in has.items():
        if value != sizes[key] and (key, value) != (DEPTHS, 0):  # a model may leave the folder's MTP out
            wrong.append(f"{where}: its {key} is {value_text(sizes[key])}; {_fix(family, key, sizes)}, not "
                         f"{value_text(family.of_model(key, has))}")  # fmt: skip
    tensors = _tensors(checkpoint, wanted, lambda name: family.spare(name, sizes))
    return wrong + [f"{where}: {problem}" for problem in tensors]


def model_of(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """Return the model of a folder: one of conf/model/, and the overrides that give it the folder's sizes.

    Raises ConfigError: its architecture, or a part of its config.json, is not known here.
    """
    try:
        family = _named(checkpoint)
        with _reading(family):
            sizes = _sizes(family, _config(checkpoint.folder))
    except ValueError as error:
        raise ConfigError(f"{checkpoint.folder}: {error}") from error
    fixes = (_fix(family, key, sizes) for key in sizes)
    lines = [line for fix in fixes for line in fix.replace(" model.", "\nmodel.").splitlines()]
    return family.like, [*family.without, *lines]


def _named(checkpoint: Checkpoint) -> Family:
    """Return the architecture that config.json names. Raises ValueError: none, or one that is not known here."""
    named = checkpoint.config.get("architectures")
    for family in FAMILIES:
        if named == [family.architecture]:
            return family
    architecture = f"is of {value_text(named)}" if named else "names no architecture"
    raise ValueError(f"its config.json {architecture}; tpi imports {NAMES}")


@contextmanager
def _reading(family: Family) -> Iterator[None]:
    """Read a config.json of the family. Raises ValueError for whatever transformers raises of a damaged one."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        why = str(error).splitlines()[0][:200]
        raise ValueError(f"its config.json is none of {family.architecture}: {why}") from error


def _tensors(checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]], spare: Callable[[str], bool]) -> Iterator[str]:
    there = checkpoint.tensors
    missing = [name for name in wanted if name not in there]
    more = [name for name in sorted(there) if name not in wanted and not spare(name)]
    if OUTPUT in more and EMBEDDING in there:  # tied, and stored twice
        more.remove(OUTPUT)
        if checkpoint.bits(OUTPUT) != checkpoint.bits(EMBEDDING):
            yield f"{OUTPUT} and {EMBEDDING} differ, and its config.json ties them"
    if missing:
        yield f"there is no tensor {abbreviated(missing, SHOWN)}"
    if more:
        yield f"the model has no parameter for the tensor {abbreviated(more, SHOWN)}"
    shapes = [name for name in wanted if name in there and there[name].shape != wanted[name]]
    if shapes:
        each = [f"{name} {list(there[name].shape)} instead of {list(wanted[name])}" for name in shapes]
        yield f"the shape of {abbreviated(each, SHOWN)}"


def _config(folder: Path) -> Any:
    """config.json as transformers reads it, and so Bridge: with the defaults of its class."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder), local_files_only=True)  # imports it, which takes seconds


def _sizes(family: Family, config: Any) -> dict[str, Any]:
    """Raise AttributeError, TypeError, ValueError: a size is missing or none."""
    special = family.rotary(config.rope_parameters)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    special |= {"head_dim": head, "num_key_value_heads": groups}
    sizes = {
        key: special[key] if key in special else getattr(config, key, *family.absent(key)) for key in family.fields
    }
    for key, value in sizes.items():
        if type(value) in (int, float) and not (value > 0 or value in family.absent(key)):
            raise ValueError(f"{key} is {value}")
    return sizes


def _fixed(family: Family, config: Any) -> list[str]:
    """Return the settings that change what a model computes and that tpi does not know, of all that its class reads."""
    from transformers import PretrainedConfig

    read = (
        type(config)().to_dict().keys() - PretrainedConfig().to_dict().keys() - {*type(config).attribute_map.values()}
    )
    wanted = {key: getattr(type(config)(), key) for key in read - family.fields.keys() - INERT} | {**family.fixed}
    values = {key: getattr(config, key) for key in sorted(wanted) if hasattr(config, key)}
    return [f"{key}={value_text(value)}" for key, value in values.items() if (value or None) != (wanted[key] or None)]


def _fix(family: Family, key: str, sizes: Mapping[str, Any]) -> str:
    if key == "rope_factor" and sizes[key] is None:
        return "model.rope_scaling=false"
    scaling = "model.rope_scaling=true " if family.fields[key][0] == "rope_scaling_factor" else ""
    return f"{scaling}model.{family.fields[key][0]}={value_text(family.of_model(key, sizes))}"


def _plain(value: Any) -> Any:
    value = [*value] if isinstance(value, tuple) else value
    return None if value in (None, False) else value
