# SPDX-License-Identifier: Apache-2.0
"""MTP: Megatron's layers for the tokens after the next one, with invariant sums.

The last pipeline stage has these layers, a copy of the embedding, and the output layer, which all depths use. So a
backward pass has several gradients of these two weights: it adds them depth by depth, the last one first, and then the
main model's, whatever the layout. The lookups of the copy have a sum of their own (numerics/layers/embedding.py), since
at pp=1 one buffer would get them in turns with the main model's.

The loss of each depth reaches the weights token by token. What is logged is a tree sum, as the main loss
(numerics/sums/step_values.py).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from tp_invariant_recipes.numerics.megatron.spec import invariant
from tp_invariant_recipes.numerics.sums.step_values import data_mesh, keep, of_rows, summed

EACH = "micro_batches"  # key of Megatron's tracker: [depth] of each micro-batch's values


class InvariantMultiTokenPredictionLayer(MultiTokenPredictionLayer):
    """One depth: two norms, a column-parallel projection, layers, a norm.

    The layer is like the model's last; a hybrid model has those of `mtp_hybrid_override_pattern`. With
    `mtp_use_repeated_layer` all depths are this one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_layer_pattern is not None:
            # Megatron logs these routers' losses with those of the model's first layers, which another stage may have.
            for router in (module for module in self.mtp_model_layer.modules() if isinstance(module, TopKRouter)):
                router.set_layer_number(self.config.num_layers + self.layer_number)

    def _get_embeddings(self, *args: Any, embedding: Any, **kwargs: Any) -> Any:
        embedding.word_embeddings.ahead = True
        try:
            return super()._get_embeddings(*args, embedding=embedding, **kwargs)
        finally:
            embedding.word_embeddings.ahead = False


# Fields that split a model into pipeline stages.
_STAGES = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


def invariant_block(original: Callable[..., Any]) -> Callable[..., Any]:
    """Get a replacement for Bridge's mtp_block_spec, with the last layer of the model, which another stage may have."""

    def mtp_block_spec(config: Any, vp_stage: int | None = None) -> Any:
        if not getattr(config, "mtp_num_layers", None):
            return None
        given, last = copy(config), TransformerBlockSubmodules(layer_specs=[_last_layer(config)])
        given.transformer_layer_spec = lambda _: last
        block = original(given, vp_stage=vp_stage)
        if block is None:
            return None
        return replace(block, layer_specs=[_invariant(layer) for layer in block.layer_specs])

    return mtp_block_spec


def _last_layer(config: Any) -> Any:
    whole = copy(config)
    for name, value in _STAGES.items():
        setattr(whole, name, value)
    return whole.transformer_layer_spec(whole).layer_specs[-1]


def _invariant(layer: Any) -> Any:
    parts = layer.submodules
    changed = invariant(replace(layer, submodules=replace(parts, mtp_model_layer=None)))
    return replace(changed, submodules=replace(changed.submodules, mtp_model_layer=parts.mtp_model_layer))


def separate_losses(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for MTPLossLoggingHelper.save_metrics_to_tracker, which adds to one sum a depth."""

    def save(loss: Tensor, correct: Tensor, total: Tensor, layer_number: int | None, *args: Any, **more: Any) -> None:
        original(loss, correct, total, layer_number, *args, **more)
        if layer_number is not None:
            each = MTPLossLoggingHelper.tracker.setdefault(EACH, {})
            keep(each.setdefault(layer_number, {}), loss)

    return save


def losses_summed(original: Callable[[], None], shards: int) -> Callable[[], None]:
    """Return a replacement for MTPLossLoggingHelper.reduce_metrics_in_tracker, which averages over ranks. shards: D."""

    def reduce() -> None:
        tracker = MTPLossLoggingHelper.tracker
        kept = tracker.pop(EACH, {})
        if kept:
            mesh = data_mesh(shards)
            values = torch.stack([torch.stack(of_rows(kept[depth])) for depth in sorted(kept)], 1)
            # Megatron averages over the ranks; all but the first have zeros.
            tracker["loss_values"] = summed(values, mesh)
        original()

    return reduce
