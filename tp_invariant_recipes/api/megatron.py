# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's side: configurations as its ConfigContainer, and its `pretrain()` with the invariant numerics."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tp_invariant_recipes.check.hosts.inputs import input_problems
from tp_invariant_recipes.config import container as containers
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import changed, requested
from tp_invariant_recipes.errors import ConfigError, refuse
from tp_invariant_recipes.launch import local, plan, record
from tp_invariant_recipes.settings import environment, schema
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.values import value_text
from tp_invariant_recipes.sources import recipe_fields, weights
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.training import rank

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

    from tp_invariant_recipes.api.commands import Overrides

MADE = "_tpi_made"  # attribute of a container


@dataclass(frozen=True)
class _Made:
    """What a container was made of. values: path -> value of its fields then, as `_values` has them."""

    composed: Composed
    values: dict[str, Any]


def recipe(model: str, *overrides: "Overrides", **keys: object) -> "ConfigContainer":
    """Return Megatron-Bridge's configuration of a model, for `tpi.pretrain`.

    Args:
        model: A model of `tpi models`, or "recipe=NAME".
        *overrides: Texts such as "tp=4", or mappings such as {"optimizer.adam_eps": 1e-8}.
        **keys: Keys as keywords, such as tp=4, numerics="tree", device="cpu".

    Returns:
        A ConfigContainer, whose fields you may set before you train. Bridge's own `pretrain()` trains it only with
        Megatron's numerics, "stock" or "deterministic"; else the model refuses to be built.

    Raises:
        TpiError: The configuration is wrong; `problems` lists all that is.
    """
    bridge.load()
    composed = compose(model, requested(overrides, keys), device=plan.detect_device(), also=input_problems)
    config, *_ = plan.with_data(composed.config)
    made = containers.build(config)
    if config.numerics.invariant or config.weights.folder is not None:
        made.model.register_pre_wrap_hook(_only_here)
    setattr(made, MADE, _Made(composed, _values(made)))
    return made


def _only_here(model: Any) -> Any:
    """Raise ConfigError: Bridge's own pretrain() has built a model whose numerics or weights need more than it."""
    raise ConfigError(
        "a ConfigContainer holds the invariant layers, and not the rest (gradient norm, cross entropy, imported "
        "weights): train it by tpi.pretrain(config, forward_step)"
    )


def pretrain(
    config: "ConfigContainer",
    forward_step: Callable[..., Any] | None = None,
    callbacks: Sequence[Any] = (),
) -> None:
    """Train as Megatron-Bridge's `pretrain()` does, with the numerics of the configuration.

    Every rank calls it, as torchrun has started them; a run of one rank needs no torchrun. What you have set in the
    configuration since `tpi.recipe` counts like an override, and is checked like one.

    Args:
        config: What `tpi.recipe` has returned.
        forward_step: Bridge's forward step; None: Bridge's own for GPT.
        callbacks: Bridge's callbacks, such as `tpi.LedgerCallback`.

    Raises:
        TpiError: The configuration is wrong, or the number of ranks is not the layout's.
    """
    from tp_invariant_recipes.observe.ledger_callback import LedgerCallback

    run = _checked(config)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if (needed := run.layout.world) != world:
        started = f"{world} ranks have been started" if "WORLD_SIZE" in os.environ else "this process is one"
        raise ConfigError(
            f"{needed} ranks have this layout, and {started}: torchrun --nproc-per-node {needed} SCRIPT, or another tp"
        )
    folder = run.weights.folder
    imported = weights.read(Path(folder)).digest() if folder is not None else None
    run, identity, _ = plan.with_data(run, imported=imported)
    for callback in callbacks:
        if isinstance(callback, LedgerCallback):
            callback._known = run, identity, record.notes(run)
    with _rank(run), rank.closing([*callbacks]):
        rank.pretrain(run, [*callbacks], forward_step)


@contextmanager
def _rank(config: RunConfig) -> Iterator[None]:
    """Give this process the environment of a rank. Raises ConfigError: a variable of its own would change bits."""
    import torch

    variables = environment.of_run(config)
    late = [f"{name}={value}" for name, value in variables.items() if os.environ.get(name) != value]
    if config.device.kind == "gpu" and late and torch.cuda.is_initialized():
        raise ConfigError(
            f"{', '.join(late)}: CUDA has started without; set them in the shell, or train before it starts"
        )
    if "RANK" not in os.environ:
        store = local.store()
        variables |= rank.RankInfo(0, 0, 1, 1, "127.0.0.1", (store.port,)).environment()
    if config.device.kind == "cpu":
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # torch has read it at its import
    with mock.patch.dict(os.environ, variables):  # takes back what Megatron sets in the block, too
        yield


def _checked(config: "ConfigContainer") -> RunConfig:
    """Return the run of a container, with what has been set in it since. Raises ConfigError."""
    made: _Made | None = getattr(config, MADE, None)
    if made is None:
        raise ConfigError(
            'tpi.pretrain takes what tpi.recipe returns; of a recipe of Bridge: tpi.recipe("recipe=NAME")'
        )
    now = _values(config)
    differing = sorted(path for path in made.values.keys() | now.keys() if made.values.get(path) != now.get(path))
    lost = "tpi.pretrain cannot record what you have set there; recipe=FILE.py:FUNCTION of your own can have it"
    refuse([f"{path}: {lost}" for path in differing if isinstance(now.get(path, _Object()), _Object)])
    before, device = made.composed, made.composed.config.device.kind
    words = changed(before.overrides, [f"{path}={value_text(now[path])}" for path in differing])
    return compose(before.model, words, device=device, also=input_problems).config if differing else before.config


@dataclass(frozen=True)
class _Object:
    """A value that no text expresses. identity: of the object, which is held, and of a list's elements."""

    identity: tuple[int, ...] = ()
    value: Any = field(default=None, compare=False)


def _values(container: "ConfigContainer") -> dict[str, Any]:
    """Return dotted path -> value of the fields of all sections, as a text has it; or an _Object."""
    values: dict[str, Any] = {}
    for section, part in vars(container).items():
        settings = section in schema.BRIDGE_SECTIONS and part is not None
        for name, value in recipe_fields.values(part) if settings else [("", part)]:
            plain = recipe_fields.serialize(value)
            if plain is recipe_fields.MISSING:
                plain = _Object((id(value), *(map(id, value) if isinstance(value, list) else ())), value)
            values[f"{section}.{name}".rstrip(".")] = plain
    return {path: value for path, value in values.items() if path != MADE}
