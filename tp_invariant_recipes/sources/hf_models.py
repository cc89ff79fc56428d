"""The models of Hugging Face that weights come from and go to: sizes in config.json, names and shapes of tensors.

A row of FAMILIES is one architecture that Bridge's AutoBridge converts and whose tensors are all known here. The sizes
are those of `config.json`, under their names there; FIELDS says which field of the model is which. So a folder is
compared with a run before anything starts, and without Bridge.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.settings.values import value_text
from tp_invariant_recipes.sources.weights import Checkpoint, some

# In config.json -> the field of the model, and the default of Bridge's GPTModelProvider.
FIELDS: dict[str, tuple[str, Any]] = {
    "num_hidden_layers": ("num_layers", None),
    "hidden_size": ("hidden_size", None),
    "intermediate_size": ("ffn_hidden_size", None),
    "num_attention_heads": ("num_attention_heads", None),
    "num_key_value_heads": ("num_query_groups", None),
    "head_dim": ("kv_channels", None),
    "vocab_size": ("vocab_size", None),
    "tie_word_embeddings": ("share_embeddings_and_output_weights", True),
    "rms_norm_eps": ("layernorm_epsilon", 1e-5),
    "rope_theta": ("rotary_base", 10000),
    "rope_factor": ("rope_scaling_factor", 1.0),
    "num_experts": ("num_moe_experts", None),
    "num_experts_per_tok": ("moe_router_topk", 2),
    "moe_intermediate_size": ("moe_ffn_hidden_size", None),
    "norm_topk_prob": ("moe_router_pre_softmax", False),
}
EXPERTS_ONLY = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
DENSE_ONLY = ("intermediate_size",)

# What all families have: the field of the model, the value that it must have, and the default of the provider.
SHARED: dict[str, tuple[Any, Any]] = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "layernorm_zero_centered_gamma": (False, False),
    "gated_linear_unit": (True, False),
    "activation_func": ("torch.nn.functional.silu", None),
    "add_bias_linear": (False, True),
    "position_embedding_type": ("rope", "learned_absolute"),
    "rotary_percent": (1.0, 1.0),
    "rotary_interleaved": (False, False),
    "seq_len_interpolation_factor": (None, None),
    "multi_latent_attention": (False, False),
    "qk_l2_norm": (False, False),
    "attention_output_gate": (False, False),
    "softmax_type": ("vanilla", "vanilla"),
    "window_size": (None, None),
    "mtp_num_layers": (None, None),
    "moe_layer_freq": (1, 1),
    "moe_shared_expert_intermediate_size": (None, None),
    "moe_router_enable_expert_bias": (False, False),
    "moe_router_score_function": ("softmax", "softmax"),
    "should_pad_vocab": (False, False),
}
# The same of config.json, where an architecture has the field.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Megatron-Core's constants of scaled frequencies (RotaryEmbedding._apply_scaling).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA31_LENGTH = 131072  # tokens; what such models are published for


@dataclass(frozen=True)
class Family:
    """One architecture. qkv_bias, qk_norm, experts: what tells it from the others."""

    architecture: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of FIELDS that count for it."""
        left_out = DENSE_ONLY if self.experts else EXPERTS_ONLY
        return tuple(key for key in FIELDS if key not in left_out)

    def tensors(self, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor. sizes: keys of FIELDS."""
        hidden, vocabulary, head = (int(sizes[key]) for key in ("hidden_size", "vocab_size", "head_dim"))
        yield "model.embed_tokens.weight", (vocabulary, hidden)
        yield "model.norm.weight", (hidden,)
        if not sizes["tie_word_embeddings"]:
            yield OUTPUT, (vocabulary, hidden)
        rows = {"q": sizes["num_attention_heads"] * head, **dict.fromkeys("kv", sizes["num_key_value_heads"] * head)}
        for number in range(sizes["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}.{norm}.weight", (hidden,)
            for part, size in rows.items():
                yield f"{layer}.self_attn.{part}_proj.weight", (size, hidden)
                if self.qkv_bias:
                    yield f"{layer}.self_attn.{part}_proj.bias", (size,)
            yield f"{layer}.self_attn.o_proj.weight", (hidden, rows["q"])
            for norm in ("q_norm", "k_norm") if self.qk_norm else ():
                yield f"{layer}.self_attn.{norm}.weight", (head,)
            yield from self._mlp(f"{layer}.mlp", sizes)

    def _mlp(self, mlp: str, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, size = sizes["hidden_size"], sizes["moe_intermediate_size" if self.experts else "intermediate_size"]
        names = [f"{mlp}.experts.{n}" for n in range(sizes["num_experts"])] if self.experts else [mlp]
        if self.experts:
            yield f"{mlp}.gate.weight", (sizes["num_experts"], hidden)
        for name in names:
            yield f"{name}.gate_proj.weight", (size, hidden)
            yield f"{name}.up_proj.weight", (size, hidden)
            yield f"{name}.down_proj.weight", (hidden, size)


FAMILIES = (
    Family("LlamaForCausalLM", "llama"),
    Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", qk_norm=True),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, experts=True),
)
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_NAMES = ", ".join(family.architecture for family in FAMILIES)


def family_of(model: Mapping[str, Any]) -> Family | str:
    """The architecture of a model, a section `model` of a tree; if it has none here, why."""
    if model.get("hybrid_layer_pattern"):
        return f"a hybrid model has no weights that tpi imports or exports; it knows {_NAMES}"
    wrong = [
        f"model.{name}={value_text(model.get(name, default))}"
        for name, (value, default) in SHARED.items()
        if _plain(model.get(name, default)) != _plain(value)
    ]
    if wrong:
        return f"no architecture that tpi imports or exports has {', '.join(wrong)}; it knows {_NAMES}"
    traits = (bool(model.get("add_qkv_bias")), bool(model.get("qk_layernorm")), bool(model.get("num_moe_experts")))
    found = next((one for one in FAMILIES if (one.qkv_bias, one.qk_norm, one.experts) == traits), None)
    if found is None:
        fields = ("add_qkv_bias", "qk_layernorm", "num_moe_experts")
        said = ", ".join(f"model.{name}={value_text(model.get(name))}" for name in fields)
        return f"no architecture that tpi imports or exports has {said}; it knows {_NAMES}"
    return found


def sizes_of(family: Family, model: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a model, under their names in config.json."""
    found = {key: model.get(name, default) for key, (name, default) in FIELDS.items() if key in family.keys}
    heads = found["num_attention_heads"]
    found["num_key_value_heads"] = found["num_key_value_heads"] or heads
    found["head_dim"] = found["head_dim"] or found["hidden_size"] // heads
    if family.experts:
        found["norm_topk_prob"] = not found["norm_topk_prob"]
        found["moe_intermediate_size"] = found["moe_intermediate_size"] or model.get("ffn_hidden_size")
    else:
        found["intermediate_size"] = found["intermediate_size"] or 4 * found["hidden_size"]
    if not model.get("rope_scaling"):
        found["rope_factor"] = None
    return found


def config_of(family: Family, model: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """What config.json of a model holds. dtype: of the weights, such as "bfloat16"."""
    sizes = sizes_of(family, model)
    theta, factor = sizes.pop("rope_theta"), sizes.pop("rope_factor")
    rope: dict[str, Any] = {"rope_type": "default"} if factor is None else {"rope_type": "llama3", "factor": factor}
    rope |= {} if factor is None else LLAMA3_ROPE
    fixed = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
    if family.experts:
        fixed |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        **sizes,
        **fixed,
        "initializer_range": model.get("init_method_std") or 0.02,
        "max_position_embeddings": max(model["seq_length"], LLAMA31_LENGTH if factor else 0),
        "rope_parameters": {"rope_theta": theta, **rope},
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
        sizes, fixed = _sizes(family, config), _fixed(config)
        wanted = dict(family.tensors(sizes))
    except ImportError:
        raise
    except Exception as error:  # whatever transformers raises of a damaged file
        return [f"{where}: its config.json is none of {family.architecture}: {str(error).splitlines()[0][:200]}"]
    wrong = [f"{where}: its config.json has {one}, and tpi imports no such model" for one in fixed]
    for key, value in sizes_of(family, model).items():
        if value != sizes[key]:
            wrong.append(f"{where}: its {key} is {value_text(sizes[key])}; {_fix(key, sizes[key])}, not "
                         f"{value_text(_of_model(key, value))}")  # fmt: skip
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
    kind = rope.get("rope_type", "default")
    special = {"rope_theta": rope["rope_theta"], "rope_factor": None}
    if kind == "llama3" and all(rope.get(key) == value for key, value in LLAMA3_ROPE.items()):
        special["rope_factor"] = rope["factor"]
    elif kind != "default":
        raise ValueError(f"Megatron-Core scales no rotary frequencies by {dict(rope)}")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    special |= {"head_dim": head, "num_key_value_heads": groups}
    found = {key: special[key] if key in special else getattr(config, key) for key in family.keys}
    for key, value in found.items():
        if key not in ("rope_factor", "tie_word_embeddings", "norm_topk_prob") and not value > 0:
            raise ValueError(f"{key} is {value}")
    return found


def _fixed(config: Any) -> list[str]:
    found = {key: getattr(config, key) for key in FIXED if hasattr(config, key)}
    return [f"{key}={value_text(value)}" for key, value in found.items() if (value or None) != (FIXED[key] or None)]


def _of_model(key: str, value: Any) -> Any:
    """A size as the field of the model has it."""
    return not value if key == "norm_topk_prob" else value


def _fix(key: str, value: Any) -> str:
    if key == "rope_factor" and value is None:
        return "model.rope_scaling=false"
    scaling = "model.rope_scaling=true " if key == "rope_factor" else ""
    return f"{scaling}model.{FIELDS[key][0]}={value_text(_of_model(key, value))}"


def _plain(value: Any) -> Any:
    return None if value in (None, False) else value
