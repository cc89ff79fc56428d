"""Megatron-Bridge compiles Megatron-Core's dataset helpers at every start, which a wheel does not allow."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "Megatron-Bridge runs make in a folder where the megatron-core wheel has no Makefile, and exits; "
    "the wheel contains the compiled helpers"
)


def nothing(original: Any) -> Callable[[], None]:
    """Replace a function without arguments by one that does nothing."""
    return lambda: None


def helpers_without_makefile() -> bool:
    """Whether Megatron-Core has compiled helpers and no Makefile."""
    core = code.folder("megatron.core")
    if core is None:
        return False
    return not (core / "datasets/Makefile").exists() and any((core / "datasets").glob("helpers_cpp*.so"))


PATCH = Patch(
    name="bridge-compile-helpers",
    package="megatron-bridge",
    need=Looks(helpers_without_makefile, "a megatron-core with compiled helpers and no Makefile"),
    replaces={"megatron.bridge.training.initialize:compile_helpers": nothing},
    why=WHY,
)
