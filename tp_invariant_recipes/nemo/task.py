# SPDX-License-Identifier: Apache-2.0
"""The entry point of a task that the plugin has changed: Bridge's pretrain(), with invariant numerics and a ledger.

The variables of the plugin say how. The switch for other programs (tp_invariant_recipes/patch_mode.py) makes the
numerics, and the callbacks of `tpi train` make the ledger.
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
STATE_DIGESTS = 10  # steps between digests of the moments, as `ledger.state_digests` has it


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

            places = [name for name, m in list(sys.modules.items()) if _holds(m, original)]
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


def _holds(module: Any, original: Callable[..., Any]) -> bool:
    return getattr(module, "__dict__", {}).get("pretrain") is original


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

    from tp_invariant_recipes.observe.optimizer_step import OptimizerStep
    from tp_invariant_recipes.observe.recording import recording
    from tp_invariant_recipes.runs.run_dir import RunDir
    from tp_invariant_recipes.settings.sections import LedgerSettings
    from tp_invariant_recipes.training.rank import RankInfo, closing

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run_dir = RunDir(Path(os.environ[LEDGER]))
    run = described(config, world)
    if run_dir.ledger.exists() and config.checkpoint.load is None:
        raise RunError(f"{run_dir.path} holds the ledger of another task; give this one a folder of its own")
    if rank == world - 1:
        from tp_invariant_recipes.machine.versions import versions
        from tp_invariant_recipes.settings.environment import recorded
        from tp_invariant_recipes.settings.secrets import without

        run_dir.write(run_dir.config, without(_plain(config)))
        run_dir.write(run_dir.environment, recorded(os.environ))
        run_dir.write(run_dir.versions, versions())
        run_dir.write(run_dir.run, run.as_json())
    info = RankInfo(rank, int(os.environ.get("LOCAL_RANK", rank)), world, world, "", ())
    ledger_callbacks = recording(run_dir, info, run, LedgerSettings(state_digests=STATE_DIGESTS))
    step = OptimizerStep(ledger_callbacks)
    with ExitStack() as stack:
        stack.enter_context(closing(ledger_callbacks))
        stack.callback(step.restore)
        if isinstance(callbacks, CallbackManager):
            callbacks.add([*ledger_callbacks, step])
            original(config, forward_step_func, callbacks=callbacks)
        else:
            original(config, forward_step_func, callbacks=[*(callbacks or []), *ledger_callbacks, step])


# What the patch mode sets.
_NUMERICS = {"mode": "tree", "grad_norm": "exact", "clip_rounding": "none", "initial_weights": "invariant"}


def described(config: Any, world: int) -> RunFile:
    """Return `run.json` of a ConfigContainer on `world` ranks; paths of data stand for data without a digest."""
    from tp_invariant_recipes.config import fingerprint as identities
    from tp_invariant_recipes.ledger.record import Header
    from tp_invariant_recipes.ledger.schema import SHARDS as COUNTS
    from tp_invariant_recipes.machine import gpus
    from tp_invariant_recipes.numerics.sums.expert_groups import ExpertGroups

    model = config.model
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    cp, ep = model.context_parallel_size, model.expert_model_parallel_size
    dp = world // (tp * pp * cp)
    experts = bool(getattr(model, "num_moe_experts", None))
    groups = ExpertGroups(None, dp, cp, tp, cp, dp, ep).least if experts else None
    counts = {key: count for key, count in zip(COUNTS, (dp, cp, groups), strict=True) if count is not None}
    sections = _plain(config)
    identity = (
        identities.of_sections(sections)
        | {
            "data.kind": type(config.dataset).__name__,
            "data.digest": str((sections.get("dataset") or {}).get("blend")),
        }
        | counts
    )
    identity = dict(sorted(identity.items()))
    etp = model.expert_tensor_parallel_size or tp
    layout = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "etp": etp, "sp": bool(model.sequence_parallel)}
    shards = {key.partition(".")[2]: count for key, count in counts.items()}
    shards["virtual_shards"] = int(os.environ[SHARDS])
    return RunFile(
        model=type(model).__name__,
        overrides=(),
        device="gpu" if gpus.visible() else "cpu",
        layout=layout,
        numerics=_NUMERICS | shards,
        identity=identity,
        identity_hash=Header(identity=identity).identity_hash,
        attempts=(),
    )


def _plain(config: Any) -> dict[str, Any]:
    """Return a ConfigContainer as JSON has it; an object that is no text as the name of its class."""
    text = json.dumps(config.to_dict(), default=lambda value: type(value).__qualname__)
    return json.loads(text, parse_constant=str)
