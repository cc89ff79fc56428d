# SPDX-License-Identifier: Apache-2.0
"""Which experts the tokens of a step go to, in an audit.

Where two experts are almost equally good for a token, rounding alone may choose the other one, and all that follows is
another computation. So the reference takes the choices of the audited run. What it would have chosen itself, and by how
much the choices are worse in its own scores, is recorded beside them, so that a wrong choice is found all the same.

    choices/ROUTER/scores       what the experts are chosen by: [tokens, experts]
    choices/ROUTER/own          the choice that follows from them: bool
    backward/ROUTER/auxiliary   the gradient that auxiliary losses alone send to the scores: [tokens, experts]

An auxiliary loss is a thousandth of the gradient that arrives at a router, less than its rounding. By itself it is
exact to a few bits, so that one which is counted twice is seen at any coefficient.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.observe.dump_writer import DumpWriter
from tp_invariant_recipes.observe.module_hooks import named_modules
from tp_invariant_recipes.observe.placement import Site, class_names, experts


class ExpertChoices:
    """The routers of a step: records their scores, and has them take the choices of another recording.

    follow: the folder of that recording; None: the choices are this run's own.
    """

    def __init__(self, writer: DumpWriter, step: int, site: Site, follow: Path | None) -> None:
        self._writer, self._site = writer, site
        self._recorded = None if follow is None else dumps.read_step(follow, step)
        self._restored: list[tuple[Any, Any]] = []

    def hook(self, model: Any) -> None:
        """Register hooks on the routers of a chunk."""
        for name, module in named_modules(model):
            if "TopKRouter" in class_names(module):
                self._restored.append((module, module.routing))
                module.routing = partial(self._routing, name, module, module.routing, [], [])

    def unhook(self) -> None:
        """Leave the routers as they were."""
        for module, _ in self._restored:
            del module.routing  # what we set hides the method
        self._restored.clear()

    def _routing(
        self,
        name: str,
        module: Any,
        original: Any,
        calls: list[int],
        losses: list[int],
        logits: Tensor,
        *args: Any,
        **more: Any,
    ) -> Any:
        """Return a router's `routing(logits, …)` with the recorded choices.

        calls, losses: of it, and those with gradients.
        """
        from megatron.core.transformer.moe import router

        calls.append(len(calls))
        scores = _scores(module, logits.detach().view(-1, logits.shape[-1]))
        chosen = self._chosen(name, scores, calls[-1])
        route, for_loss = router.topk_routing_with_score_function, router.compute_routing_scores_for_aux_loss
        plain = module.expert_bias is None and not module.config.moe_router_group_topk

        def routed(values: Tensor, topk: int, **given: Any) -> Any:
            if chosen is None:
                return route(values, topk, **given)
            own = route(values.detach(), topk, **given)[1]
            self._add(f"choices/{name}/scores", module, calls[-1], scores)
            self._add(f"choices/{name}/own", module, calls[-1], own)
            if not bool((chosen.sum(1) == topk).all()):  # tokens were dropped: the choice is not known
                return route(values, topk, **given)
            return route(values, topk, **given, precomputed_indices=chosen.nonzero()[:, 1].view(-1, topk))

        def scored(*inputs: Any, **given: Any) -> Any:
            own, values = for_loss(*inputs, **given)
            if values.requires_grad:
                losses.append(len(losses))
                values.register_hook(partial(self._add, f"backward/{name}/auxiliary", module, losses[-1]))
            follow = chosen is not None and plain and bool((chosen.sum(1) == own.sum(1)).all())
            return (chosen if follow else own), values

        router.topk_routing_with_score_function, router.compute_routing_scores_for_aux_loss = routed, scored
        try:
            return original(logits, *args, **more)
        finally:
            router.topk_routing_with_score_function, router.compute_routing_scores_for_aux_loss = route, for_loss

    def _chosen(self, name: str, scores: Tensor, micro_batch: int) -> Tensor | None:
        """Return the recorded choice for this rank's tokens, bool [tokens, experts]; None: it has no place."""
        if self._recorded is None or f"forward/{name}/output.1" not in self._recorded.parts:
            return None
        rows = torch.arange(len(scores))[:, None].expand(scores.shape)
        placed = experts(rows, None, micro_batch, self._site)
        if placed is None:
            return None
        try:
            whole = torch.from_numpy(self._recorded.read(f"forward/{name}/output.1").bits.astype(bool))
        except LedgerError:  # its pieces are not the whole
            return None
        chosen = torch.empty(scores.shape, dtype=torch.bool)
        for part in placed.parts:
            here = part.values[:, 0]
            chosen[here] = whole[part.row : part.row + part.step * len(here) : part.step]
        return chosen.to(scores.device)

    def _add(self, name: str, module: Any, micro_batch: int, values: Tensor) -> None:
        placed = experts(values, module, micro_batch, self._site)
        if placed is None:
            return
        for part in placed.parts:
            self._writer.add(name, str(values.dtype).removeprefix("torch."), placed.shape, part)


def _scores(module: Any, logits: Tensor) -> Tensor:
    """Return the scores that experts are chosen by, float32 [tokens, experts]."""
    if module.score_function == "softmax":
        return logits.float()
    values = torch.sigmoid(logits.float())
    return values if module.expert_bias is None else values + module.expert_bias
