"""Everything that is decided before a process starts: what to train, on what, where it is written, where it resumes."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config import environment, layout
from tp_invariant_recipes.config.compose import Composed, compose, listed
from tp_invariant_recipes.config.identity import identity
from tp_invariant_recipes.config.null_tokenizer import eod_id
from tp_invariant_recipes.data.prepare import ensure_prepared
from tp_invariant_recipes.data.prepared import PreparedData
from tp_invariant_recipes.errors import CheckpointError, ConfigError, RunError
from tp_invariant_recipes.host import gpus
from tp_invariant_recipes.host.versions import versions
from tp_invariant_recipes.launch import preflight
from tp_invariant_recipes.ledger.lines import Header
from tp_invariant_recipes.training import checkpoints
from tp_invariant_recipes.training.checkpoints import Checkpoint
from tp_invariant_recipes.training.rundir import RunDir, choose

# Overrides of a run that say where it was written and where it resumed, which a repetition does elsewhere.
NOT_REPEATED = ("run.dir", "checkpoint.save", "checkpoint.ckpt_step")


@dataclass(frozen=True)
class Plan:
    """A run, ready to start.

    tree:        the composed tree with data, tokenizer and checkpoint filled in.
    environment: variables to set before torch is imported.
    start:       completed steps to start from; 0 for a new run.
    """

    composed: Composed
    tree: dict[str, Any]
    layout: layout.Layout
    run_dir: RunDir
    identity: dict[str, Any]
    environment: dict[str, str]
    start: int = 0

    @property
    def steps(self) -> int:
        """Steps the run will have when it is done."""
        train = self.tree["train"]
        every = train.get("exit_interval")  # Bridge leaves after a step that it divides
        return min(train["train_iters"], (self.start // every + 1) * every) if every else train["train_iters"]

    @property
    def device(self) -> str:
        """ "cpu" or "gpu"."""
        return self.tree["device"]["kind"]


def detect_device() -> str:
    """The device group used where none is asked for: gpu where the driver shows one."""
    return "gpu" if gpus.visible() else "cpu"


def new(model: str, overrides: Sequence[str], *, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Plan a new run. Raises a TpiError that lists what is wrong; nothing but the data cache is written.

    progress: told (bytes done, bytes in all) while text is prepared.
    """
    composed = compose(model, overrides, device=detect_device())
    run_dir = choose(composed.tree["run"]["dir"], f"{model}-tp{layout.of(composed.tree).tp}")
    return completed(composed, run_dir, progress)


def again(
    run: Path, model: str | None, overrides: Sequence[str], *, progress: Callable[[int, int], None] | None = None
) -> Plan:
    """Plan to go on with a run from its newest finished checkpoint, or from the start if it has none.

    model, overrides: None and what to change. Layout and length may change; what makes runs comparable may not.
    Raises a TpiError that names the fields, or the damaged files.
    """
    run_dir = RunDir(run)
    before = run_dir.read_run()
    if model not in (None, before["model"]):
        raise ConfigError(f"--resume {run} is a run of {before['model']}, not of {model}")
    asked = [o for o in before["overrides"] if not o.startswith("checkpoint.ckpt_step=")]  # of an earlier resume
    composed = compose(before["model"], [*asked, *overrides], device=before["device"])
    plan = completed(composed, run_dir, progress)
    _same_identity(before["identity"], plan.identity, f"--resume {run} would go on with another run.")
    step = plan.tree["checkpoint"]["ckpt_step"]
    found = checkpoints.select(run_dir.checkpoints, step)
    if found and found.read_manifest()["identity_hash"] != identity_hash(plan.identity):
        raise CheckpointError(f"{found.path} belongs to another run: its identity is not that of {run}")
    return plan if found is None else _from(plan, found)


def rerun(
    run: Path,
    run_dir: RunDir,
    start: Checkpoint | None,
    *,
    last_step: int,
    record: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan to repeat a run in a directory of its own, up to `last_step` at least, as it last was; nothing is saved.

    start:  a finished checkpoint of that run; None: from the beginning.
    record: overrides of what the ledger records.
    Raises a TpiError: this machine cannot carry it, or it would be another run.
    """
    before = RunDir(run).read_run()
    asked = [o for o in before["overrides"] if o.partition("=")[0].lstrip("+") not in NOT_REPEATED]
    # The length stays: how often Megatron goes through the text, and in which order, depends on it. Bridge leaves
    # without a word to callbacks, so the ledger has the digests of a step only if another one follows.
    shorter = f"train.exit_interval={last_step + 1}"
    changes = [*record, "save=0", "logging=none", shorter, "train.exit_duration_in_mins=null"]
    plan = completed(compose(before["model"], [*asked, *changes], device=before["device"]), run_dir, progress)
    _same_identity(before["identity"], plan.identity, f"{run} cannot be repeated: it would be another run now.")
    plan.tree["checkpoint"]["save"] = None
    return plan if start is None else _from(plan, start)


def _from(plan: Plan, found: Checkpoint) -> Plan:
    """The plan, begun at a checkpoint of a run of the same identity."""
    # The identity is the same, so the checkpoint's schedule is this run's: Megatron would refuse a longer run over the
    # number of steps alone.
    scheduler = plan.tree["scheduler"] | {"use_checkpoint_opt_param_scheduler": True}
    checkpoint = plan.tree["checkpoint"] | {"ckpt_step": found.step, "load": str(found.path.parent)}
    return replace(plan, tree=plan.tree | {"scheduler": scheduler, "checkpoint": checkpoint}, start=found.step)


def write(plan: Plan) -> None:
    """Write the run directory, before anything starts. Raises RunError."""
    run_dir = plan.run_dir
    attempts = run_dir.read_run()["attempts"] if run_dir.run.exists() else []
    attempt = {
        "command": shlex.join(["tpi", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": os.uname().nodename,
        "from_step": plan.start,
        "to_step": plan.steps,
    }
    run = {
        "model": plan.composed.model,
        "overrides": list(plan.composed.overrides),
        "device": plan.device,
        "layout": plan.layout.as_dict(),
        "numerics": plan.tree["numerics"],
        "identity": plan.identity,
        "identity_hash": identity_hash(plan.identity),
        "notes": _notes(plan.tree),
        "attempts": [*attempts, attempt],
    }
    run_dir.write(run_dir.config, plan.tree)
    run_dir.write(run_dir.environment, environment.recorded(os.environ | plan.environment))
    run_dir.write(run_dir.versions, versions())
    run_dir.write(run_dir.run, run)


def identity_hash(identity: dict[str, Any]) -> str:
    """The hash that the ledger's header will carry: equal exactly when the identities are."""
    return Header(identity=identity).identity_hash


def completed(composed: Composed, run_dir: RunDir, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Fill in what only this machine knows, and check that it can carry the run. Raises a TpiError."""
    tree = {name: dict(part) if isinstance(part, dict) else part for name, part in composed.tree.items()}
    at = layout.of(tree)
    variables = environment.settings(tree["device"]["kind"], os.environ)
    preflight.check(tree, at, run_dir)
    data = _prepare(tree, progress)
    tree["run"]["dir"] = str(run_dir.path)
    tree["checkpoint"]["save"] = str(run_dir.checkpoints)
    tree["dataset"]["path_to_cache"] = str(run_dir.index_cache)
    if data is not None:
        _use(tree, data)
    if tree["logging"]["kind"] != "none":
        tree["logger"]["tensorboard_dir"] = str(run_dir.tensorboard)
    if tree["logging"]["kind"] == "wandb":
        tree["logger"] |= {"wandb_exp_name": run_dir.path.name, "wandb_save_dir": str(run_dir.path)}
        if "WANDB_API_KEY" not in os.environ:
            variables |= {"WANDB_MODE": os.environ.get("WANDB_MODE", "offline")}
    return Plan(composed, tree, at, run_dir, identity(tree, data.digest if data else None), variables)


def _prepare(tree: dict[str, Any], progress: Callable[[int, int], None] | None) -> PreparedData | None:
    data = tree["data"]
    if data["kind"] != "text":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(data["cache"] or Path(home) / "tpi" / "data").expanduser()
    return ensure_prepared(
        Path(data["path"]).expanduser(),
        cache,
        tokenizer=str(Path(data["tokenizer"]).expanduser()),
        json_key=data["json_key"],
        progress=progress,
    )


def _use(tree: dict[str, Any], data: PreparedData) -> None:
    """Point the dataset at prepared data and give the NullTokenizer the ids that data holds."""
    if data.vocab_size > tree["model"]["vocab_size"]:
        raise ConfigError(
            f"{data.prefix} holds {data.vocab_size} token ids but model.vocab_size={tree['model']['vocab_size']}; "
            f"use data.tokenizer=byte (257 ids) or raise model.vocab_size"
        )
    tree["dataset"]["blend"] = [[str(data.prefix.absolute())], None]
    tree["tokenizer"] |= {"vocab_size": data.vocab_size, "vocab_includes_eod": True}
    if data.eod != data.vocab_size - 1:
        tree["tokenizer"]["null_tokenizer_eod_id"] = data.eod


def _notes(tree: dict[str, Any]) -> dict[str, Any]:
    """Facts worth saying in the ledger."""
    tokenizer = tree["tokenizer"]
    if tokenizer["tokenizer_type"] != "NullTokenizer":
        return {}
    includes, size = tokenizer["vocab_includes_eod"], tokenizer["vocab_size"]
    eod = tokenizer.get("null_tokenizer_eod_id")
    return {
        "tokenizer.vocab_includes_eod": includes,
        "tokenizer.vocab_size": size,
        "tokenizer.eod": eod if eod is not None else eod_id(size, includes_eod=includes),
    }


def _same_identity(before: dict[str, Any], now: dict[str, Any], otherwise: str) -> None:
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        problems = [f"{key} was {before.get(key)} and is {now.get(key)} now" for key in changed]
        raise RunError(f"{otherwise}\n{listed(problems)}")
