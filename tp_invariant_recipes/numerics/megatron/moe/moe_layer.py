"""Megatron's mixture-of-experts layer with another dispatcher; the specification names its router and experts."""

from typing import Any

from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches, InvariantTokenDispatcher
from tp_invariant_recipes.numerics.layers.experts.token_gate import token_gate
from tp_invariant_recipes.numerics.megatron import spec
from tp_invariant_recipes.numerics.megatron.base import ExpertsForward, OnMesh, adapter_of
from tp_invariant_recipes.replacement import resolve_own


def latent_projection(original: Any) -> Any:
    """Return what projects tokens to the experts' latents and back (`moe_latent_size`): the invariant class for
    Megatron's.
    """
    return original and resolve_own(spec.SUBSTITUTES[original.__name__])


class InvariantSharedExpertMLP(OnMesh, SharedExpertMLP):
    """Experts that see every token, gated for each token or not."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[s/t, b, h] → the same."""
        if not self.use_shared_expert_gate:
            return super().forward(hidden_states)
        output, _ = MLP.forward(self, hidden_states)
        return token_gate(output, hidden_states, self.gate_weight, self.mesh)


class InvariantMoELayer(MoELayer):
    """Router, dispatch, experts, combination, shared experts."""

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        pg_collection = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.token_dispatcher = InvariantTokenDispatcher(self.config, pg_collection)


class InvariantSequentialMLP(ExpertsForward, SequentialMLP):
    """Experts that are separate modules, as in Megatron without Transformer Engine."""

    def forward(self, rows: Tensor, batches: Batches, probs: Tensor) -> tuple[Tensor, None]:
        """[r, h] → [r, h], and None as bias."""
        fc1 = [expert.linear_fc1.weight for expert in self.local_experts]
        fc2 = [expert.linear_fc2.weight for expert in self.local_experts]
        biases = (self._biases("linear_fc1"), self._biases("linear_fc2")) if self.config.add_bias_linear else None
        return self.experts(rows, probs, batches, fc1, fc2, biases), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's, and the adapters of all experts under the names that they have on a GPU (expert_adapters.py)."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name in ("linear_fc1", "linear_fc2"):
            if (adapter := adapter_of(self, name)) is not None:
                adapters = adapter.sharded_state_dict(f"{name}.adapter.", sharded_offsets, metadata)
                replace_prefix_for_sharding(adapters, "", f"{prefix}experts.")
                state.update({f"{prefix}{key}": value for key, value in adapters.items()})
        return state

    def _biases(self, name: str) -> list[Tensor]:
        return [getattr(expert, name).bias for expert in self.local_experts]
