"""The value that a linear layer must return to autograd for its weight, by the way the gradient is kept.

The table comes from NVIDIA/TransformerEngine#2871.
"""

from dataclasses import dataclass
from typing import Literal

Returned = Literal["wgrad", "none", "dummy"]


@dataclass(frozen=True)
class WgradMode:
    """The way a weight's gradient is kept.

    delayed:     `backward_dw()` computes it after the backward pass.
    accumulates: the layer writes it into `main_grad`.
    flagged:     the weight has an attribute `grad_added_to_main_grad`, as Megatron's have. Matters with `accumulates`.
    """

    delayed: bool = False
    accumulates: bool = False
    flagged: bool = False

    def __str__(self) -> str:
        words = [word for word, holds in vars(self).items() if holds]
        return "-".join(words) or "vanilla"


VANILLA, DELAYED = WgradMode(), WgradMode(delayed=True)
ACCUMULATES, FLAGGED = WgradMode(accumulates=True), WgradMode(accumulates=True, flagged=True)
DELAYED_ACCUMULATES = WgradMode(delayed=True, accumulates=True)
DELAYED_FLAGGED = WgradMode(delayed=True, accumulates=True, flagged=True)

CONTRACT: dict[WgradMode, Returned] = {
    VANILLA: "wgrad", DELAYED: "none", ACCUMULATES: "none", FLAGGED: "dummy", DELAYED_ACCUMULATES: "none",
    DELAYED_FLAGGED: "dummy",
}  # fmt: skip
