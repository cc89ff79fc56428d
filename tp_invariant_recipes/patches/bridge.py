# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Bridge compiles at every start, forgets, or knows of Transformer Engine's layers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.patches import patch
from tp_invariant_recipes.patches.patch import Form, Patch

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig


def nothing(original: Any) -> Callable[[], None]:
    """Replace a function without arguments by one that does nothing."""
    return lambda: None


def _helpers_without_makefile() -> bool:
    """Whether Megatron-Core has compiled helpers and no Makefile."""
    core = patch.folder("megatron.core")
    if core is None:
        return False
    return not (core / "datasets/Makefile").exists() and any((core / "datasets").glob("helpers_cpp*.so"))


HELPERS = Patch(
    name="bridge-compile-helpers",
    versions="a megatron-core with compiled helpers and no Makefile",
    form=_helpers_without_makefile,
    replaces={"megatron.bridge.training.initialize:compile_helpers": nothing},
    why="Megatron-Bridge runs make in a folder where the megatron-core wheel has no Makefile, and exits; the wheel "
    "contains the compiled helpers",
)


def of_the_models_kind(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace mtp_block_spec: local layers for a model of local layers."""

    def mtp_block_spec(config: Any, vp_stage: int | None = None) -> Any:
        if config.transformer_impl != "local" or not config.mtp_num_layers:
            return original(config, vp_stage=vp_stage)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        layers = config.transformer_layer_spec(config)
        block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=vp_stage)
        if block is None:
            return None
        norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
        return replace(
            block,
            layer_specs=[replace(spec, submodules=replace(spec.submodules, **norms)) for spec in block.layer_specs],
        )

    return mtp_block_spec


LOCAL_MULTI_TOKEN = Patch(
    name="bridge-local-mtp",
    versions="mtp_block_spec() without model.transformer_impl",
    form=Form(
        "models/gpt_provider.py",
        "mtp_block_spec",
        has="use_transformer_engine=True",
        lacks="transformer_impl",
        package="megatron.bridge",
    ),
    replaces={"megatron.bridge.models.gpt_provider:mtp_block_spec": of_the_models_kind},
    why="with model.transformer_impl=local Megatron-Bridge still asks for Transformer Engine's layers for multi-token "
    "prediction, and fails where it is not installed",
    reached=lambda config: config.shape.depths,
)

_LATEST_MASK: list[Any] = [None]  # the loss mask of the latest micro-batch


def keeping_the_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace gpt_step.get_batch: the third of what it returns is the mask, [sequences, tokens of this rank]."""

    def get_batch(*args: Any, **more: Any) -> Any:
        batch = original(*args, **more)
        _LATEST_MASK[0] = batch[2]
        return batch

    return get_batch


def with_the_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace gpt_model.process_mtp_loss: without a mask it takes the micro-batch's."""

    def process_mtp_loss(*args: Any, loss_mask: Any = None, **more: Any) -> Any:
        return original(*args, loss_mask=_LATEST_MASK[0] if loss_mask is None else loss_mask, **more)

    return process_mtp_loss


def predicts_tokens_of_whole_sequences(config: RunConfig) -> bool:
    """Whether a stock run has MTP on ranks that have whole sequences."""
    return bool(config.shape.depths and not config.numerics.invariant and config.layout.cp == 1)


MULTI_TOKEN_MASK = Patch(
    name="bridge-mtp-mask",
    versions="a gpt_step that does not pass the loss mask",
    form=Form(
        "training/gpt_step.py",
        "_forward_step_common",
        has='"labels": labels,',
        lacks='"loss_mask": loss_mask',
        package="megatron.bridge",
    ),
    replaces={
        "megatron.bridge.training.gpt_step:get_batch": keeping_the_mask,
        "megatron.core.models.gpt.gpt_model:process_mtp_loss": with_the_mask,
        "megatron.core.models.hybrid.hybrid_model:process_mtp_loss": with_the_mask,
    },
    why="with model.mtp_num_layers every token counts in the losses of MTP, masked prompts and "
    "padding as well: Megatron-Bridge does not pass the loss mask to the model",
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6103",
    reached=predicts_tokens_of_whole_sequences,
)


def without_draws_on_resume(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace setup_data_iterators: after a checkpoint was loaded, torch's CPU generator stays as it was saved."""

    def setup_data_iterators(*args: Any, **more: Any) -> Any:
        import torch

        state = more["train_state"] if "train_state" in more else args[1]
        before = torch.get_rng_state()
        iterators = original(*args, **more)
        if state.step:
            torch.set_rng_state(before)
        return iterators

    return setup_data_iterators


LOADER_DRAWS = Patch(
    name="bridge-resume-rng",
    versions="a DataLoader without a generator of its own",
    form=Form(
        "data/samplers.py",
        "build_pretraining_data_loader",
        has="persistent_workers=persistent_workers,\n        worker_init_fn=worker_init_fn,\n    )\n",
        package="megatron.bridge",
    ),
    replaces={"megatron.bridge.training.setup:setup_data_iterators": without_draws_on_resume},
    why="a DataLoader draws its seed from torch's CPU generator, and Megatron-Bridge makes it after it has restored "
    "that generator: a resumed run draws other numbers on the CPU than an uninterrupted one",
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5257",
)

_ON_CPU = "use_cpu_initialization"


def drawn_on_the_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace get_model: the field holds while the model is built. Then Megatron-Bridge moves the model to the GPU."""

    def get_model(provider: Any, *args: Any, **kwargs: Any) -> Any:
        if not provider.use_cpu_initialization or kwargs.get(_ON_CPU):
            return original(provider, *args, **kwargs)
        with _built_with_the_field(provider):
            return original(provider, *args, **kwargs)

    return get_model


@contextmanager
def _built_with_the_field(provider: Any) -> Iterator[None]:
    provide = provider.provide

    def with_the_field(*args: Any, **kwargs: Any) -> Any:
        provider.use_cpu_initialization = True
        try:
            return provide(*args, **kwargs)
        finally:
            provider.use_cpu_initialization = False

    provider.provide = with_the_field
    try:
        yield
    finally:
        del provider.provide
        provider.use_cpu_initialization = True


CPU_WEIGHTS = Patch(
    name="bridge-cpu-initialization",
    versions=f"get_model() that overwrites model.{_ON_CPU}",
    # It sets the field to its own argument, which a training does not give.
    form=Form(
        "models/model_provider.py",
        "get_model",
        has=f"model_provider.{_ON_CPU} = {_ON_CPU}",
        package="megatron.bridge",
    ),
    replaces={"megatron.bridge.models.model_provider:get_model": drawn_on_the_cpu},
    why=f"Megatron-Bridge overwrites model.{_ON_CPU}=true before it builds the model, so that weights are drawn on the "
    "GPU: other ones for every tp, and others than Megatron-LM draws",
    reached=lambda config: config.model.get(_ON_CPU),
)

_GEMMA = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_feedforward_layernorm"}


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


# Module and class -> a part of the local names, which it lacks, and what adds them.
_MAPPINGS = {
    ("gemma.gemma3_bridge", "Gemma3ModelBridge"): ("pre_mlp_layernorm", with_local_norms),
    ("olmoe.olmoe_bridge", "OlMoEBridge"): ("local_experts", with_local_experts),
    ("glm.glm45_bridge", "GLM45Bridge"): ("local_experts", with_local_experts),
}


def _lacks_local_names() -> bool:
    """Whether one of the installed classes names Transformer Engine's layers alone."""
    return any(
        Form(f"models/{module.replace('.', '/')}.py", "mapping_registry", lacks=part, package="megatron.bridge")()
        for (module, _), (part, _) in _MAPPINGS.items()
    )


LOCAL_NAMES = Patch(
    name="bridge-local-names",
    versions="mappings of weights without pre_mlp_layernorm or local_experts",
    form=_lacks_local_names,
    replaces={
        f"megatron.bridge.models.{module}:{name}.mapping_registry": make
        for (module, name), (_, make) in _MAPPINGS.items()
    },
    why="with model.transformer_impl=local Megatron-Bridge finds no names for Gemma's norms, OLMoE's and GLM-4.5's "
    "experts",
    reached=lambda config: config.weights.folder is not None,
)

PATCHES = (HELPERS, LOCAL_MULTI_TOKEN, MULTI_TOKEN_MASK, LOADER_DRAWS, CPU_WEIGHTS, LOCAL_NAMES)
