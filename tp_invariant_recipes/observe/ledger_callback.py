# SPDX-License-Identifier: Apache-2.0
"""The callback that writes a ledger of a program's own Bridge run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.config import fingerprint
from tp_invariant_recipes.ledger.schema import SHARDS
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.observe.digests.callback import Digests
from tp_invariant_recipes.observe.optimizer_step import OptimizerStep
from tp_invariant_recipes.observe.recorder import Recorder
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import expert_groups
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import LedgerSettings
from tp_invariant_recipes.sources import recipe_fields

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

DEFAULT = LedgerSettings()


def _each(event: str) -> Callable[["LedgerCallback", CallbackContext], None]:
    def call(self: "LedgerCallback", context: CallbackContext) -> None:
        for part in self._parts:
            getattr(part, event)(context)

    return call


class LedgerCallback(Callback):
    """Writes the ledger of a run of Megatron-Bridge's `pretrain()`, and changes nothing of the run.

    Every rank has one among its callbacks. The last rank writes PATH/ledger.jsonl, which `tpi compare` reads.

    Attributes:
        path: The directory of the ledger.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        digests: int = DEFAULT.digests,
        state_digests: int = DEFAULT.state_digests,
    ) -> None:
        """Name the directory, and what is recorded.

        Args:
            path: A directory of the run's own. A run that goes on continues the ledger there.
            digests: Steps between two digests of all gradients and master weights; 0: never.
            state_digests: Steps between two digests of the optimizer's moments; 0: only at the last step.
        """
        self.path = Path(path).expanduser()
        self._digests = Digests(digests, state_digests) if digests else None
        self._parts: list[Any] = []
        # The run, its identity and its notes, where `tpi.pretrain` knows them; else its ConfigContainer says them.
        self._known: tuple[RunConfig, dict[str, Any], dict[str, Any]] | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Open the ledger.

        Raises:
            TpiError: It cannot be continued.
        """
        self._parts = [self._digests] if self._digests else []
        self._parts.append(OptimizerStep(self._parts))
        if dist.get_rank() == dist.get_world_size() - 1:
            run, fingerprint, notes = self._known or _described(context.state.cfg)
            parts = {"numerics": run.section("numerics"), "layout": run.layout.as_dict(), "notes": notes}
            self.path.mkdir(parents=True, exist_ok=True)
            self._parts.append(Recorder(RunDir(self.path), fingerprint, parts, self._digests, None))
        for part in self._parts:
            part.on_train_start(context)

    on_train_step_start = _each("on_train_step_start")
    on_train_step_end = _each("on_train_step_end")
    on_eval_end = _each("on_eval_end")
    on_test_end = _each("on_test_end")
    on_checkpoint_save = _each("on_checkpoint_save")
    on_train_end = _each("on_train_end")

    def close(self) -> None:
        """After a failure write what is known."""
        if self._digests:
            self._digests.close()


def _described(container: "ConfigContainer") -> tuple[RunConfig, dict[str, Any], dict[str, Any]]:
    """Return the run that a container says, as far as a ledger holds it, and its identity."""
    sections: dict[str, Any] = {}
    for name in (*fingerprint.SECTIONS, *fingerprint.OPTIONAL):
        if (part := getattr(container, name, None)) is None or isinstance(part, str):
            sections[name] = part
            continue
        sections[name], _ = recipe_fields.plain_fields(dict(recipe_fields.values(part)), type(part), ())
    model = container.model
    degrees = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
    ranks = dist.get_world_size()
    for degree in degrees:
        ranks //= degree
    megatrons = mode.DETERMINISTIC if model.deterministic_mode else mode.STOCK
    numerics = {"mode": getattr(model, "invariant_mode", megatrons)}
    if numerics["mode"] not in mode.MEGATRONS:
        numerics["virtual_shards"] = model.virtual_shards
    run = RunConfig({**sections, "numerics": numerics, "parallel": {"data_parallel_size": ranks}})
    identity = fingerprint.of_sections(sections) | {
        "data.kind": type(container.dataset).__name__,
        "data.digest": str((sections.get("dataset") or {}).get("blend")),  # paths stand for their contents
    }
    if run.numerics.invariant:
        counts = run.layout.dp, run.layout.cp, expert_groups.groups_of_run(run)
        identity |= {key: count for key, count in zip(SHARDS, counts, strict=True) if count is not None}
    return run, dict(sorted(identity.items())), {}
