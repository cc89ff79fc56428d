"""Megatron-Bridge knows some weights by their names in Transformer Engine's layers alone."""

from collections.abc import Callable, Iterator
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "with model.transformer_impl=local Megatron-Bridge finds no names for Gemma's norms, OLMoE's and GLM-4.5's experts"
)
_GEMMA = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_feedforward_layernorm"}
# Module, class -> a part of the names that it lacks.
BRIDGES = {
    ("gemma.gemma2_bridge", "Gemma2Bridge"): "pre_mlp_layernorm",
    ("gemma.gemma3_bridge", "Gemma3ModelBridge"): "pre_mlp_layernorm",
    ("olmoe.olmoe_bridge", "OlMoEBridge"): "local_experts",
    ("glm.glm45_bridge", "GLM45Bridge"): "local_experts",
}


def with_local_norms(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace mapping_registry of Gemma: the norms under both names."""

    def more(_: Any) -> Iterator[Any]:
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        for local, name in _GEMMA.items():
            yield AutoMapping(f"decoder.layers.*.{local}.weight", f"model.layers.*.{name}.weight")

    return _extended(original, more)


def with_local_experts(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace mapping_registry of a model with experts: one module for each of them, or one for all."""

    def more(self: Any) -> Iterator[Any]:
        from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

        config = getattr(self, "hf_config", None)
        layers, depths = (
            getattr(config, name, None) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers")
        )
        ahead = {f"mtp.layers.{n}.mtp_model_layer": f"model.layers.{layers + n}" for n in range(depths)}
        for layer, name in ({"decoder.layers.*": "model.layers.*"} | ahead).items():
            local, hf = f"{layer}.mlp.experts.local_experts.*", f"{name}.mlp.experts.*"
            gate, up = (f"{hf}.{part}_proj.weight" for part in ("gate", "up"))
            yield GatedMLPMapping(megatron_param=f"{local}.linear_fc1.weight", gate=gate, up=up)
            yield AutoMapping(f"{local}.linear_fc2.weight", f"{hf}.down_proj.weight")

    return _extended(original, more)


def _extended(original: Callable[[Any], Any], more: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Any]:
    def mapping_registry(self: Any) -> Any:
        from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

        return MegatronMappingRegistry(*original(self).mappings, *more(self))

    return mapping_registry


def lacks_local_names() -> bool:
    """Whether one of the installed classes names Transformer Engine's layers alone."""
    folder = code.folder("megatron.bridge")
    if folder is None:
        return False
    files = ((folder / f"models/{module.replace('.', '/')}.py", part) for (module, _), part in BRIDGES.items())
    return any(file.is_file() and part not in file.read_text(encoding="utf-8") for file, part in files)


PATCH = Patch(
    name="bridge-local-names",
    package="megatron-bridge",
    need=Looks(lacks_local_names, "mappings of weights without pre_mlp_layernorm or local_experts"),
    replaces={
        f"megatron.bridge.models.{module}:{name}.mapping_registry": (
            with_local_norms if part == "pre_mlp_layernorm" else with_local_experts
        )
        for (module, name), part in BRIDGES.items()
    },
    why=WHY,
    concerns=lambda config: config is None or config.weights.folder is not None,
)
