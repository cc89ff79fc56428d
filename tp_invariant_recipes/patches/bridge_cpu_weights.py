"""Megatron-Bridge forgets `model.use_cpu_initialization`, and draws a training's weights on the GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

FIELD = "use_cpu_initialization"
WHY = (
    f"Megatron-Bridge overwrites model.{FIELD}=true before it builds the model, so that weights are drawn on the GPU: "
    "other ones for every tp, and others than Megatron-LM draws"
)


def drawn_on_the_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace get_model: the field holds while the model is built. Then Megatron-Bridge moves the model to the GPU."""

    def get_model(provider: Any, *args: Any, **kwargs: Any) -> Any:
        if not provider.use_cpu_initialization or kwargs.get(FIELD):
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


def overwritten() -> bool:
    """Whether the installed function sets the field to its own argument, which a training does not give."""
    function = code.source("megatron.bridge", "models/model_provider.py", "get_model")
    return f"model_provider.{FIELD} = {FIELD}" in function


PATCH = Patch(
    name="bridge-cpu-initialization",
    package="megatron-bridge",
    need=Looks(overwritten, f"get_model() that overwrites model.{FIELD}"),
    replaces={"megatron.bridge.models.model_provider:get_model": drawn_on_the_cpu},
    why=WHY,
    concerns=lambda config: config is None or bool(config.model.get(FIELD)),
)
