# SPDX-License-Identifier: Apache-2.0
"""Megatron's top-k router with invariant sums over tokens: the weight gradient, the load-balancing loss, the z-loss.

Everything else is row by row. Expert capacity counts a virtual shard's tokens, as Megatron does on V ranks.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.row_sums import folding_sum, token_sum
from tp_invariant_recipes.numerics.gemm.gemm import gemm
from tp_invariant_recipes.numerics.layers.bias import row_bias
from tp_invariant_recipes.numerics.layers.experts.experts import token_gate
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches, InvariantTokenDispatcher
from tp_invariant_recipes.numerics.megatron import spec
from tp_invariant_recipes.numerics.megatron.base import ExpertsForward, OnMesh, adapter_of
from tp_invariant_recipes.numerics.sums import bucket_reduction
from tp_invariant_recipes.numerics.sums.expert_groups import visited
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_all_reduce, tree_sums
from tp_invariant_recipes.numerics.sums.weight_gradient import reduce_weight_gradient
from tp_invariant_recipes.replacement import resolve_own


def latent_projection(original: Any) -> Any:
    """Return what projects tokens to the experts' latents and back (`moe_latent_size`): the invariant class for
    Megatron's.
    """
    return original and resolve_own(spec.SUBSTITUTES[original.__name__])


class InvariantSharedExpertMLP(OnMesh, SharedExpertMLP):
    """Experts that see every token, gated for each token or not. sigmoid: of the gate, in fp32."""

    sigmoid: Callable[[Tensor], Tensor] = staticmethod(torch.sigmoid)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[s/t, b, h] → the same."""
        if not self.use_shared_expert_gate:
            return super().forward(hidden_states)
        output, _ = MLP.forward(self, hidden_states)
        return token_gate(output, hidden_states, self.gate_weight, self.mesh, self.sigmoid)


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


DTYPES = {None: None, "fp32": torch.float32}


class InvariantTopKRouter(OnMesh, TopKRouter):
    """Chooses the experts of each token. products: what multiplies, as numerics/gemm/gemm.py does.

    widens: whether it multiplies numbers of the logits' dtype (`moe_router_dtype`), else those of the tokens'.
    """

    products, tensor_model_parallel = staticmethod(gemm), False
    widens = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.capacity = config.moe_expert_capacity_factor, config.moe_token_drop_policy
        # Megatron's capacity would count a rank's tokens; `routing` applies ours.
        config = copy.copy(config)
        config.moe_expert_capacity_factor = None
        super().__init__(config, *args, **kwargs)
        self.counted = 0  # sequences of the step
        self.of_shards: dict[int, tuple[Tensor | float, int]] = {}  # data shard -> tokens of each expert, and sequences
        self.shards_at_once = 1  # data shards that the sequences of a micro-batch are of, one of each

    def gating(self, input: Tensor) -> Tensor:
        """[s/t, b, h] → logits [s/t, b, E]. Raises ConfigError: on a CPU a shard's logits must be whole vectors."""
        each = input.shape[0] // self.mesh.local_chunks * self.config.num_moe_experts
        if not input.is_cuda and each % VECTORS:
            raise ConfigError(
                f"on a CPU seq / V / C * model.num_moe_experts must be a multiple of {VECTORS}, not {each}"
            )
        dtype = DTYPES[self.config.moe_router_dtype] or input.dtype
        operands = dtype if self.widens else input.dtype
        logits = _Gating.apply(input, self.weight, self.mesh, dtype, operands, self.products)
        if self.bias is None:
            return logits
        # The ranks of a tensor-parallel group have the same tokens only where there is one rank.
        return row_bias(logits, self.bias, self.mesh, True).to(dtype)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s/t, b, E] → probabilities and routing map, [n, E]."""
        if padding_mask is not None:
            raise NotImplementedError("a padding mask has no invariant version")
        probs, routing_map = super().routing(logits)
        now = bucket_reduction.current()
        if now is not None and now.idle:
            return probs, torch.zeros_like(routing_map)
        if self.capacity[0] is not None:
            probs, routing_map = self._within_capacity(probs, routing_map)
        super()._apply_expert_bias(routing_map)
        return probs, routing_map

    def _within_capacity(self, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """[n, E] → the same without tokens beyond the experts' capacity for a virtual shard of each data shard."""
        each = (
            routed.view(-1, self.shards_at_once, self.num_experts).chunk(self.mesh.local_chunks)
            for routed in (probs, routing_map)
        )
        kept = [self._dropped(*shard) for shard in zip(*each, strict=True)]
        probs, routing_map = (torch.cat(parts).flatten(0, 1) for parts in zip(*kept, strict=True))
        return probs, routing_map

    def _dropped(self, probs: Tensor, routing_map: Tensor) -> Iterator[Tensor]:
        """Of one virtual shard, [n, data shards, E] → the same."""
        each = zip(probs.unbind(1), routing_map.unbind(1), strict=True)
        kept = [moe_utils.apply_router_token_dropping(*sequence, self.topk, *self.capacity) for sequence in each]
        return (torch.stack(parts, 1) for parts in zip(*kept, strict=True))

    def _maintain_float32_expert_bias(self) -> None:
        """Keep the token counts in fp32 too: Megatron's bf16 counts of a rank are rounded above 256."""
        super()._maintain_float32_expert_bias()
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert.data = self.local_tokens_per_expert.data.float()

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Do nothing yet: `routing` counts the tokens that remain after dropping."""

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """[n, E] → the same, with ST-MoE's loss (arXiv 2202.08906): the mean over tokens of log(Σ exp(logits))²."""
        coefficient, now = self.config.moe_z_loss_coeff, bucket_reduction.current()
        counts = self.training and torch.is_grad_enabled() and not (now is not None and now.idle)
        if not (coefficient and counts):
            return logits
        context = VirtualMesh.from_group(self.cp_group.size(), self.cp_group)
        loss = _ZLoss.apply(logits, coefficient / (len(logits) * self.tp_cp_group.size()), self.mesh, context)
        if now is not None:
            loss = loss * now.loss_share
        return self.attach_and_log_load_balancing_loss(logits, coefficient, loss, "z_loss", self.tp_cp_group)

    def _apply_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._balanced(probs, scores, routing_map, self.shards_at_once, "aux_loss", "load_balancing_loss")

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, seq_length: int, bsz: int, *_: Any, **__: Any
    ) -> Tensor:
        return self._balanced(probs, scores, routing_map, bsz, "seq_aux_loss", "seq_load_balancing_loss")

    def _apply_global_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._balanced(
            probs, scores, routing_map, self.shards_at_once, "global_aux_loss", "global_load_balancing_loss"
        )

    def _of_batch(self, counts: Tensor) -> Tensor:
        """Return the mean tokens of each expert over the sequences of the data shard so far, this one included.

        Megatron's is over those of all ranks so far. A rank that computes several data shards does not know of the next
        one's; only this mean is the same for every dp.
        """
        shards = getattr(self.config, "data_shards", None)
        ranks = parallel_state.get_data_parallel_world_size()
        each = get_num_microbatches() // (shards // ranks) if shards is not None else get_num_microbatches()
        shard = visited(self.counted) // each
        self.counted += 1
        total, sequences = self.of_shards.get(shard, (0.0, 0))
        self.of_shards[shard] = total, sequences = total + counts.float(), sequences + 1
        return total / sequences

    def reset_global_aux_loss_tracker(self) -> None:
        """Forget the counts, as Megatron asks for when a step ends."""
        super().reset_global_aux_loss_tracker()
        self.counted, self.of_shards = 0, {}

    def of_other_shards(self, shards: int) -> dict[str, Any]:
        """Attributes for passes over other data shards side by side: each counts by itself, from nothing."""
        return {"shards_at_once": shards, "counted": 0, "of_shards": {}}

    def _balanced(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, sequences: int, kind: str, name: str
    ) -> Tensor:
        """Attach the loss of Switch Transformer (arXiv 2101.03961), for each sequence alone or for all together.

        scores, routing_map: [n, E], the sequences side by side, token by token. sequences: 1 for all together.
        """
        coefficient, now = self.get_aux_loss_coeff(kind), bucket_reduction.current()
        if coefficient == 0 or (now is not None and now.idle):
            return probs
        scores, routing_map = (values.reshape(-1, sequences * self.num_experts) for values in (scores, routing_map))
        counts, here, tokens = moe_utils.get_tokens_per_expert_and_token_count(routing_map, self.tp_cp_group)
        factor = self.num_experts * coefficient / (self.topk * tokens * tokens)
        context = VirtualMesh.from_group(self.cp_group.size(), self.cp_group)
        if kind == "global_aux_loss":
            counts = self._of_batch(counts)
        loss = _LoadBalance.apply(scores, counts, factor, self.mesh, context) / sequences
        if now is not None:
            loss = loss * now.loss_share
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, name, self.tp_cp_group, valid_token_count=here * sequences
        )


class _Gating(LayerFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, mesh: VirtualMesh, dtype: torch.dtype, operands: torch.dtype,
        gemm: Callable[..., Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.gemm, ctx.operands = mesh, gemm, operands
        rows = x.reshape(-1, x.shape[-1]).to(operands)
        logits = rows.new_empty(len(rows), len(weight), dtype=dtype)
        gemm(rows, weight.to(operands).t(), logits, rows=mesh.local_chunks)
        return logits.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        gemm = ctx.gemm
        mesh, grad = ctx.mesh, gradients[0].reshape(-1, len(weight)).to(ctx.operands)
        rows = x.reshape(-1, x.shape[-1]).to(grad.dtype)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(rows)
            dx = gemm(grad, weight.to(grad.dtype), dx, rows=mesh.local_chunks).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            leaves = torch.empty(mesh.local_chunks, 1, *weight.shape, dtype=torch.float32, device=x.device)
            for leaf, dy, tokens in zip(
                leaves, grad.chunk(mesh.local_chunks), rows.chunk(mesh.local_chunks), strict=True
            ):
                gemm(dy.t(), tokens, leaf[0])
            dw = reduce_weight_gradient(weight, leaves.view(mesh.local_chunks, 1, -1), mesh, everywhere=False)
        return dx, dw, None, None, None, None


def _over_tokens(values: Tensor, mesh: VirtualMesh, context: VirtualMesh) -> Tensor:
    """[tokens of this rank, n] → [n] fp32, the tree sum over the micro-batch's tokens."""
    sums = tree_sums(token_sum(values, mesh.local_chunks))
    return tree_all_reduce(tree_all_reduce(sums, mesh, torch.float32).unsqueeze(0), context, torch.float32)


class _ZLoss(LayerFunction):
    """factor · Σ z², z = log Σ exp(logits) of a token; of its gradient, 2 z · softmax, a row depends on that row alone.

    As of `_LoadBalance`, the first rank has the loss of the whole micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, factor: float, mesh: VirtualMesh, context: VirtualMesh) -> Tensor:
        wide = logits.float()
        top = wide.amax(1, keepdim=True)
        powers = torch.exp(wide - top)
        total = folding_sum(powers.clone(), 1)
        # A CPU computes whole vectors, since the numbers after the last one may not be bitwise identical.
        rest = 0 if total.is_cuda else -len(total) % VECTORS
        z = top + torch.log(torch.nn.functional.pad(total, (0, rest), value=1.0))[: len(total)].unsqueeze(1)
        ctx.save_for_backward(powers * (2.0 * z / total.unsqueeze(1)))
        ctx.factor, ctx.dtype = factor, logits.dtype
        return _over_tokens(z * z, mesh, context).sum() * (0.0 if mesh.rank or context.rank else factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * (gradients[0] * ctx.factor)).to(ctx.dtype), None, None, None


class _LoadBalance(LayerFunction):
    """The first rank has the loss of the whole micro-batch and the others have 0, since Megatron logs their sum."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, counts: Tensor, factor: float, mesh: VirtualMesh, context: VirtualMesh
    ) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.shape, ctx.factor = scores.shape, factor
        total = _over_tokens(scores, mesh, context)
        return (total * counts).sum() * (0.0 if mesh.rank or context.rank else factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (counts,) = ctx.saved_tensors
        return (gradients[0] * ctx.factor * counts).expand(ctx.shape), None, None, None, None
