"""The models of Hugging Face that weights come from and go to: sizes in config.json, names and shapes of tensors.

A row of FAMILIES is one architecture that Bridge's AutoBridge converts and whose tensors are all known here. The sizes
are those of `config.json`, under their names there; Family.fields has the fields of the model. So a folder is compared
with a run before anything starts, and without Bridge.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tp_invariant_recipes.settings.values import value_text
from tp_invariant_recipes.sources.hf_family import EMBEDDING, OUTPUT, Family
from tp_invariant_recipes.sources.hf_gpt_oss import GPT_OSS
from tp_invariant_recipes.sources.weights import Checkpoint, some

PLAIN = (
    Family("LlamaForCausalLM", "llama"),
    Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", qk_norm=True),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, experts=True),
)
FAMILIES: tuple[Family, ...] = (*PLAIN, GPT_OSS)
_NAMES = ", ".join(family.architecture for family in FAMILIES)


def family_of(model: Mapping[str, Any]) -> Family | str:
    """The architecture of a model, a section `model` of a tree; if it has none here, why."""
    if model.get("hybrid_layer_pattern"):
        return f"a hybrid model has no weights that tpi imports or exports; it knows {_NAMES}"
    sinks = GPT_OSS if model.get("softmax_type") == "learnable" else None
    wrong = [
        f"model.{name}={value_text(model.get(name, default))}"
        for name, (value, default) in (sinks or FAMILIES[0]).shared.items()
        if _plain(model.get(name, default)) != _plain(value)
    ]
    if wrong:
        return f"no architecture that tpi imports or exports has {', '.join(wrong)}; it knows {_NAMES}"
    if sinks is not None:
        return sinks
    traits = (bool(model.get("add_qkv_bias")), bool(model.get("qk_layernorm")), bool(model.get("num_moe_experts")))
    found = next((one for one in PLAIN if (one.qkv_bias, one.qk_norm, one.experts) == traits), None)
    if found is None:
        fields = ("add_qkv_bias", "qk_layernorm", "num_moe_experts")
        said = ", ".join(f"model.{name}={value_text(model.get(name))}" for name in fields)
        return f"no architecture that tpi imports or exports has {said}; it knows {_NAMES}"
    return found


def sizes_of(family: Family, model: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a model, under their names in config.json."""
    return family.sizes(model)


def config_of(family: Family, model: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """What config.json of a model holds. dtype: of the weights, such as "bfloat16"."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "initializer_range": model.get("init_method_std") or 0.02,
        **family.config(model),
    }


def problems(model: Mapping[str, Any], checkpoint: Checkpoint) -> list[str]:
    """Why the weights of a folder are not those of a model, each problem with the key that solves it."""
    where, named = f"weights={checkpoint.folder}", checkpoint.config.get("architectures")
    family = next((one for one in FAMILIES if named == [one.architecture]), None)
    if family is None:
        said = f"is of {value_text(named)}" if named else "names no architecture"
        return [f"{where}: its config.json {said}; tpi imports {_NAMES}"]
    own = family_of(model)
    if isinstance(own, str):
        return [f"{where}: {own}"]
    if own != family:
        return [f"{where} is of {family.architecture}, and this model is a {own.architecture}; choose another model"]
    try:
        config = _config(checkpoint.folder)
        sizes, fixed = _sizes(family, config), _fixed(family, config)
        wanted = dict(family.tensors(sizes))
    except ImportError:
        raise
    except Exception as error:  # whatever transformers raises of a damaged file
        return [f"{where}: its config.json is none of {family.architecture}: {str(error).splitlines()[0][:200]}"]
    wrong = [f"{where}: its config.json has {one}, and tpi imports no such model" for one in fixed]
    for key, value in sizes_of(family, model).items():
        if value != sizes[key]:
            wrong.append(f"{where}: its {key} is {value_text(sizes[key])}; {_fix(family, key, sizes[key])}, not "
                         f"{value_text(family.of_model(key, value))}")  # fmt: skip
    return wrong + [f"{where}: {one}" for one in _tensors(checkpoint, wanted)]


def _tensors(checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]]) -> Iterator[str]:
    there = checkpoint.tensors
    missing = [name for name in wanted if name not in there]
    more = [name for name in sorted(there) if name not in wanted]
    if OUTPUT in more and EMBEDDING in there:  # tied, and stored twice
        more.remove(OUTPUT)
        if checkpoint.bits(OUTPUT) != checkpoint.bits(EMBEDDING):
            yield f"{OUTPUT} and {EMBEDDING} differ, and its config.json ties them"
    if missing:
        yield f"there is no tensor {some(missing)}"
    if more:
        yield f"no place in the model for the tensor {some(more)}"
    shapes = [name for name in wanted if name in there and there[name].shape != wanted[name]]
    if shapes:
        each = [f"{name} {list(there[name].shape)} instead of {list(wanted[name])}" for name in shapes]
        yield f"the shape of {some(each)}"


def _config(folder: Path) -> Any:
    """config.json as transformers reads it, and so Bridge: with the defaults of its class."""
    from transformers import AutoConfig  # seconds to import

    return AutoConfig.from_pretrained(str(folder), local_files_only=True)


def _sizes(family: Family, config: Any) -> dict[str, Any]:
    """Raises AttributeError, TypeError, ValueError: a size is missing or none."""
    rope = config.rope_parameters
    special = {"rope_theta": rope["rope_theta"], "rope_factor": family.rope(rope)}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    special |= {"head_dim": head, "num_key_value_heads": groups}
    found = {key: special[key] if key in special else getattr(config, key) for key in family.fields}
    for key, value in found.items():
        if key not in ("rope_factor", "tie_word_embeddings", "norm_topk_prob") and not value > 0:
            raise ValueError(f"{key} is {value}")
    return found


def _fixed(family: Family, config: Any) -> list[str]:
    found = {key: getattr(config, key) for key in family.fixed if hasattr(config, key)}
    wanted = family.fixed
    return [f"{key}={value_text(value)}" for key, value in found.items() if (value or None) != (wanted[key] or None)]


def _fix(family: Family, key: str, value: Any) -> str:
    if key == "rope_factor" and value is None:
        return "model.rope_scaling=false"
    scaling = "model.rope_scaling=true " if family.fields[key][0] == "rope_scaling_factor" else ""
    return f"{scaling}model.{family.fields[key][0]}={value_text(family.of_model(key, value))}"


def _plain(value: Any) -> Any:
    return None if value in (None, False) else value
