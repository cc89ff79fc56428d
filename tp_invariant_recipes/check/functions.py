"""Functions that a command line names: Bridge takes whatever can be called, and a rank would call it.

A recipe may have functions of its own.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.values import value_text

_ACTIVATIONS = "celu elu gelu hardswish leaky_relu mish relu relu6 selu sigmoid silu softplus tanh"
_INITIALISERS = "kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_ trunc_normal_ uniform_ xavier_normal_ "


@dataclass(frozen=True)
class Functions:
    """fields: paths of fields that hold a function. names: allowed ones; with a dot at the end, packages."""

    fields: tuple[str, ...]
    names: tuple[str, ...]
    solve: str


KNOWN = (
    Functions(
        ("model.activation_func",),
        (
            *(f"torch.nn.functional.{name}" for name in _ACTIVATIONS.split()),
            *(f"megatron.core.activations.{name}" for name in ("fast_gelu", "quick_gelu", "squared_relu")),
            "megatron.core.fusions.fused_bias_geglu.quick_gelu",
        ),
        "model.activation_func=torch.nn.functional.silu, or another of torch's or megatron.core.activations",
    ),
    Functions(
        ("model.init_method", "model.output_layer_init_method", "model.embedding_init_method"),
        tuple(f"torch.nn.init.{name}" for name in (_INITIALISERS + "xavier_uniform_ zeros_").split()),
        "model.init_method_std=0.02, or one of torch.nn.init, such as torch.nn.init.normal_",
    ),
    Functions(
        ("model.transformer_layer_spec", "model.hybrid_stack_spec"),
        ("megatron.", "tp_invariant_recipes."),
        "one of megatron.bridge, or a recipe with its own (recipe=FILE.py:FUNCTION)",
    ),
    Functions(
        tuple(
            f"model.{name}"
            for name in (
                *("finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "no_sync_func", "param_sync_func"),
                *("moe_grad_scale_func", "mtp_grad_scale_func", "experimental_attention_variant_loss_scale_func"),
            )
        ),
        (),
        "leave it out: the training loop sets it",
    ),
)


def unknown(config: RunConfig, typed: Collection[str]) -> list[Problem]:
    """Return the functions that are none of these. typed: paths that the command line sets."""
    problems = []
    for path in dict.fromkeys(typed):
        known = next((functions for functions in KNOWN if path in functions.fields), None)
        section, _, name = path.partition(".")
        value = config.section(section).get(name) if known else None
        if known is None or value is None:
            continue
        if not any(value == name or (name[-1] == "." and str(value).startswith(name)) for name in known.names):
            problems.append(Problem(f"{path}={value_text(value)}", "no function that tpi knows", known.solve))
    return problems
