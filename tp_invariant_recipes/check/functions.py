"""Functions that a command line names: Bridge takes whatever can be called, and a rank would call it.

A recipe may have functions of its own.
"""

from collections.abc import Collection

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.values import value_text


def _names(package: str, names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names.split())


# Fields -> the functions that they may name, or packages, with a dot at the end; and what to type otherwise.
KNOWN = (
    (
        _names("model", "activation_func"),
        (
            *_names("torch.nn.functional", "celu elu gelu hardswish leaky_relu mish relu relu6 selu sigmoid silu "
                    "softplus tanh"),
            *_names("megatron.core.activations", "fast_gelu quick_gelu squared_relu"),
            "megatron.core.fusions.fused_bias_geglu.quick_gelu",
        ),
        "model.activation_func=torch.nn.functional.silu, or another of torch's or megatron.core.activations",
    ),
    (
        _names("model", "init_method output_layer_init_method embedding_init_method"),
        _names("torch.nn.init", "kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_ trunc_normal_ uniform_ "
               "xavier_normal_ xavier_uniform_ zeros_"),
        "model.init_method_std=0.02, or one of torch.nn.init, such as torch.nn.init.normal_",
    ),
    (
        _names("model", "transformer_layer_spec hybrid_stack_spec"),
        ("megatron.", "tp_invariant_recipes."),
        "one of megatron.bridge, or a recipe with its own (recipe=FILE.py:FUNCTION)",
    ),
    (
        _names("model", "finalize_model_grads_func grad_scale_func grad_sync_func no_sync_func param_sync_func "
               "moe_grad_scale_func mtp_grad_scale_func experimental_attention_variant_loss_scale_func"),
        (),
        "leave it out: the training loop sets it",
    ),
)  # fmt: skip


def unknown(config: RunConfig, typed: Collection[str]) -> list[Problem]:
    """Return the functions that are none of these. typed: paths that the command line sets."""
    problems = []
    for path in dict.fromkeys(typed):
        section, _, field = path.partition(".")
        for fields, names, solve in KNOWN:
            value = config.section(section).get(field) if path in fields else None
            packages = tuple(name for name in names if name[-1] == ".")
            if value is not None and value not in names and not str(value).startswith(packages):
                problems.append(Problem(f"{path}={value_text(value)}", "no function that tpi knows", solve))
    return problems
