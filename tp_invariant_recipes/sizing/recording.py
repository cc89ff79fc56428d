"""How many bytes `tpi audit` records of a training (docs/audit.md)."""

from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing import activations, size

# Tensors of hidden size that modules return or send back, for each token and layer; counted on the toys.
TENSORS = 35
SCORES = 4  # of each head and pair of positions, where attention is not fused
GRADIENT, UPDATE = 4, 4  # bytes of a parameter's


def recorded(config: RunConfig, steps: int, *, weights: bool) -> int:
    """Bytes of a recording, by every replica, of some steps, and of the `weights` before the first."""
    element, at = activations.element(config), config.layout
    tokens = config.train["global_batch_size"] * config.shape.sequence
    layers = sum(size.layers(config.shape).values())
    local = config.device.kind == "cpu" and not config.numerics.invariant
    scores = SCORES * config.shape.heads * config.shape.sequence if local else 0
    of_tokens = tokens * (layers * (TENSORS * config.shape.hidden + scores) + 2 * config.shape.vocabulary)
    whole = size.parameters(config.shape)
    held = whole * at.dp * at.cp
    updated = held if not config.section("optimizer").get("use_distributed_optimizer") else whole
    return steps * (of_tokens * element + updated * (GRADIENT + UPDATE)) + weights * held * element
