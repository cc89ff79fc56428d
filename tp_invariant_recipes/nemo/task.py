# SPDX-License-Identifier: Apache-2.0
"""The entry point of a task that the plugin has changed: Bridge's pretrain(), with invariant numerics and a ledger.

The variables of the plugin say how. The switch for other programs (tp_invariant_recipes/patch_mode.py) makes the
numerics, and `tpi.LedgerCallback` makes the ledger.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import ConfigError, RunError, TpiError
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.replacement import Replacement, applied

RUNNER = "tp_invariant_recipes.nemo"
LEDGER = "TPI_LEDGER"
SWITCH, SHARDS = "NVTE_TP_INVARIANT_MODE", "TPI_SHARDS"  # of tp_invariant_recipes/patch_mode.py


def variables(ledger: str, shards: int) -> dict[str, str]:
    """Return the environment of a task. Raises ConfigError."""
    if shards < 1 or shards.bit_count() != 1:
        raise ConfigError(f"virtual_shards={shards}: must be a power of two")
    if not ledger:
        raise ConfigError("ledger is empty: name a folder for the ledger")
    return {SWITCH: "1", SHARDS: str(shards), LEDGER: ledger}


def pretrain(config: Any, forward_step_func: Callable[..., Any], callbacks: Any = None) -> None:
    """Bridge's pretrain() of a ConfigContainer, with invariant numerics and a ledger in the folder TPI_LEDGER.

    ConfigError: lists what `numerics=tree` does not cover. RunError: the folder holds another run.
    """
    with _environment() as original:
        _pretrain_recorded(original, config, forward_step_func, callbacks)


def main(words: Sequence[str]) -> int:
    """Run [-m] SCRIPT ARGUMENTS…, whose pretrain() is the one above, and return the exit status."""
    module = words[:1] == ["-m"]
    rest = list(words[1:] if module else words)
    if not rest:
        print(f"usage: python -m {RUNNER} [-m] SCRIPT [ARGUMENTS]", file=sys.stderr)
        return 2
    calls: list[None] = []
    try:
        with _environment() as original:

            def counted(*arguments: Any, **keywords: Any) -> None:
                calls.append(None)
                _pretrain_recorded(original, *arguments, **keywords)

            there = list(sys.modules.items())
            places = [name for name, m in there if getattr(m, "__dict__", {}).get("pretrain") is original]
            rows = [Replacement(f"{place}:pretrain", lambda _: counted, "it writes the ledger") for place in places]
            sys.argv = rest
            with applied(rows):
                if module:
                    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
                else:
                    sys.path.insert(0, str(Path(rest[0]).resolve().parent))
                    runpy.run_path(rest[0], run_name="__main__")
        if not calls:
            raise RunError(f"{rest[0]} has not called Bridge's pretrain(), so there is no ledger")
    except TpiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _environment() -> Iterator[Callable[..., None]]:
    """Switch Bridge on, patched, on a CPU where there is no GPU. Yields Bridge's pretrain()."""
    from tp_invariant_recipes.cpu_host import cpu
    from tp_invariant_recipes.machine import gpus
    from tp_invariant_recipes.start import bridge

    missing = [name for name in (SWITCH, SHARDS, LEDGER) if not os.environ.get(name)]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not set; InvariantPlugin sets them for a task")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    import tp_invariant_recipes.patch_mode  # noqa: F401 -- its import switches on, before CUDA starts

    bridge.load()
    from megatron.bridge.training.pretrain import pretrain as original

    from tp_invariant_recipes.patches import registry

    with ExitStack() as stack:
        if not gpus.visible():
            stack.enter_context(cpu.installed())
        stack.enter_context(registry.applied())
        yield original


def _pretrain_recorded(
    original: Callable[..., None], config: Any, forward_step_func: Callable[..., Any], callbacks: Any = None
) -> None:
    from megatron.bridge.training.callbacks import CallbackManager

    from tp_invariant_recipes.observe.ledger_callback import LedgerCallback
    from tp_invariant_recipes.runs.run_dir import RunDir
    from tp_invariant_recipes.training.rank import closing

    run_dir = RunDir(Path(os.environ[LEDGER]))
    if run_dir.ledger.exists() and config.checkpoint.load is None:
        raise RunError(f"{run_dir.path} holds the ledger of another task; give this one a folder of its own")
    ledger = LedgerCallback(run_dir.path)
    if isinstance(callbacks, CallbackManager):
        callbacks.add(ledger)
    else:
        callbacks = [*(callbacks or []), ledger]
    try:
        with closing([ledger]):
            original(config, forward_step_func, callbacks=callbacks)
    finally:
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1) and run_dir.ledger.exists():
            _write_files(run_dir, config)


def _write_files(run_dir: Any, config: Any) -> None:
    """Write what a certificate holds beside the ledger."""
    from tp_invariant_recipes.ledger.open import streamed
    from tp_invariant_recipes.machine import gpus
    from tp_invariant_recipes.settings.secrets import without

    header = streamed(run_dir.path).header
    run = RunFile(
        model=type(config.model).__name__,
        overrides=(),
        device="gpu" if gpus.visible() else "cpu",
        layout=header.layout,
        numerics=header.numerics,
        identity=header.identity,
        identity_hash=header.identity_hash,
        attempts=(),
    )
    # Values that are no text are named by their class.
    text = json.dumps(config.to_dict(), default=lambda value: type(value).__qualname__)
    run_dir.write(run_dir.config, without(json.loads(text, parse_constant=str)))
    run_dir.write(run_dir.environment, header.environment)
    run_dir.write(run_dir.versions, header.versions)
    run_dir.write(run_dir.run, run.as_json())
