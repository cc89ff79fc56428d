# SPDX-License-Identifier: Apache-2.0
"""A run before its ranks start: its resolved configuration, its directory and its identity."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check import relations
from tp_invariant_recipes.check.hosts import inputs
from tp_invariant_recipes.check.hosts.machine import PendingRun, check_start
from tp_invariant_recipes.config import hydra_tree
from tp_invariant_recipes.config.compose import Composed
from tp_invariant_recipes.config.fingerprint import fingerprint
from tp_invariant_recipes.config.overrides import Override, given
from tp_invariant_recipes.data.examples import Examples
from tp_invariant_recipes.data.text import PreparedData, beside, find_prepared, read_index
from tp_invariant_recipes.errors import ConfigError, lines, refuse
from tp_invariant_recipes.ledger.schema import Header
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.runs import restarts
from tp_invariant_recipes.runs.run_dir import RunDir, choose
from tp_invariant_recipes.settings import environment, finetuning
from tp_invariant_recipes.settings.field_table import SERVICES
from tp_invariant_recipes.settings.run_config import Layout, RunConfig
from tp_invariant_recipes.settings.sections import DataSettings
from tp_invariant_recipes.sources import weights
from tp_invariant_recipes.start.cache import cache_dir


@dataclass(frozen=True)
class Planning:
    """How runs are planned.

    progress: told (bytes done, bytes in all) while text is prepared.
    here:     whether ranks will run on this machine; False where their job is only submitted.
    dry:      prepare no text.
    """

    progress: Callable[[int, int], None] | None = None
    here: bool = True
    dry: bool = False


TO_TRAIN, TO_SUBMIT = Planning(), Planning(here=False)


@dataclass(frozen=True)
class Plan:
    """A run, ready to start.

    config:      as composed, with data, tokenizer and checkpoint filled in.
    environment: variables to set before torch is imported.
    start:       completed steps to start from; 0 for a new run.
    here:        as in Planning.
    completed:   whether all its steps are made, so that nothing is to be trained or written.
    data_missing: whether text has yet to be prepared; such a plan is for `tpi train --dry-run` alone.
    attempts:    recorded restarts when this was planned; None: there was no run.
    remark:      a sentence about resuming the run for the user; None: nothing.
    text:        the files of text that it trains on, and those left out.
    """

    composed: Composed
    config: RunConfig
    layout: Layout
    run_dir: RunDir
    identity: dict[str, Any]
    environment: dict[str, str]
    start: int = 0
    here: bool = True
    completed: bool = False
    data_missing: bool = False
    attempts: int | None = None
    remark: str | None = None
    text: str = ""

    @property
    def steps(self) -> int:
        """Steps the run will have when it is done."""
        train = self.config.train
        every = train.get("exit_interval")  # Bridge leaves after a step that it divides
        return min(train["train_iters"], (self.start // every + 1) * every) if every else train["train_iters"]

    @property
    def last_recorded(self) -> int:
        """The last of these steps in the ledger: one after which Bridge leaves has digests only if it saves."""
        every = self.config.train.get("exit_interval")
        leaves = every and self.steps % every == 0
        return self.steps - 1 if leaves and not self.config.section("checkpoint")["save"] else self.steps

    @property
    def device(self) -> str:
        """ "cpu" or "gpu"."""
        return self.config.device.kind

    @property
    def identity_hash(self) -> str:
        """The hash in the ledger's header: equal exactly when the identities are."""
        return Header(identity=self.identity).identity_hash


def detect_device() -> str:
    """Return the device group used where none is requested: gpu where the driver shows one."""
    return "gpu" if gpus.visible() else "cpu"


def for_nodes[T](planning: Callable[[str], T], config_of: Callable[[T], RunConfig], overrides: Sequence[Override]) -> T:
    """Compose or plan for the device of the cluster's nodes, which a login node cannot see: the cluster's file says
    how many GPUs they have.

    planning: given a device, composes. Called twice only where the cluster's file builds on others in a way
              that its own text does not show.
    config_of: the configuration of what it returns.
    """
    device = _nodes_device(hydra_tree.unresolved("cluster", "gpus_per_node", overrides))
    planned = planning(device)
    nodes_device = _nodes_device(config_of(planned).cluster.gpus_per_node)
    return planned if nodes_device == device or given(overrides, "device.kind") else planning(nodes_device)


def _nodes_device(gpus_per_node: int | None) -> str:
    return detect_device() if gpus_per_node is None else "gpu" if gpus_per_node else "cpu"


def new(composed: Composed, how: Planning = TO_TRAIN) -> Plan:
    """Plan a new run. Raises a TpiError that lists what is wrong; nothing but the data cache is written."""
    config = composed.config
    if (step := config.section("checkpoint").get("ckpt_step")) is not None:
        raise ConfigError(f"checkpoint.ckpt_step={step}: a new run begins at step 0; it goes with --resume RUN")
    where = choose(config.run.dir, f"{composed.model}-tp{config.layout.tp}")
    return resolve(composed, where, how)


def resolve(composed: Composed, run_dir: RunDir, how: Planning = TO_TRAIN, *, imported: str | None = None) -> Plan:
    """Fill in what only this machine knows, and check that it can carry the run. Raises a TpiError.

    imported: the digest of the folder that the run's weights come from; None: read the folder, if there is one.
    """
    config = composed.config
    so_far = restarts_so_far(run_dir)
    variables = environment.of_run(config)
    if pretrained := config.section("checkpoint").get("pretrained_checkpoint"):
        config = config.with_fields("checkpoint", pretrained_checkpoint=str(Path(pretrained).expanduser()))
    if config.weights.folder is not None:
        folder = Path(config.weights.folder).expanduser().absolute()
        config = config.with_fields("weights", folder=str(folder))
    refuse(lines(check_start(PendingRun(config, how.here, imported is not None, run_dir))))
    if config.weights.folder is not None:
        imported = imported or weights.read(Path(config.weights.folder)).digest()
    config, described, data = with_data(config, how, imported)
    config = config.with_fields("run", dir=str(run_dir.path))
    config = config.with_fields("checkpoint", save=str(run_dir.checkpoints))
    config = finetuning.with_index(config, run_dir.index_cache)
    config = config.with_fields("logger", **logger_fields(config, run_dir))
    return Plan(
        composed,
        config,
        config.layout,
        run_dir,
        described,
        variables | logger_variables(config),
        here=how.here,
        data_missing=data is not None and not data.documents,
        attempts=so_far,
        text=data.source if data else "",
    )


def with_data(
    config: RunConfig, how: Planning = TO_TRAIN, imported: str | None = None
) -> tuple[RunConfig, dict[str, Any], PreparedData | None]:
    """Return the run with the files of its data, its identity, and its text, which is prepared. Raises a TpiError."""
    data = _prepare(config.data, how)
    config, examples = _with_examples(config)
    if data is not None:
        config = _with_data(config, data)
    known = data or examples
    digest = known.digest if known else _digest_of_named(config, how)
    return config, fingerprint(config, digest, imported), data


def logger_fields(config: RunConfig, run_dir: RunDir) -> dict[str, str]:
    """Return fields of the section `logger`: where the curves of a run go."""
    kind = config.logging.kind
    if kind == "none":
        return {}
    fields = {"tensorboard_dir": str(run_dir.tensorboard)}  # Bridge logs nowhere without a writer of TensorBoard
    if kind in SERVICES:
        fields[SERVICES[kind].run_name] = config.logging.name or run_dir.path.name
    if kind == "wandb":
        fields["wandb_save_dir"] = str(run_dir.path)
    if kind == "mlflow":
        uri = config.section("logger").get("mlflow_tracking_uri")
        if not (uri or "MLFLOW_TRACKING_URI" in os.environ):
            fields["mlflow_tracking_uri"] = str(run_dir.mlflow)
    return fields


def logger_variables(config: RunConfig) -> dict[str, str]:
    """Return the environment variables of the ranks' logger."""
    kind = config.logging.kind
    if kind == "wandb" and "WANDB_API_KEY" not in os.environ:
        return {"WANDB_MODE": os.environ.get("WANDB_MODE", "offline")}
    if kind == "mlflow":
        # MLflow 3.17 requires this variable. A database in a file, its default, is unsafe on a network file system.
        return {"MLFLOW_ALLOW_FILE_STORE": os.environ.get("MLFLOW_ALLOW_FILE_STORE", "true")}
    return {}


def resolve_beside(composed: Composed, run_dir: RunDir, index_cache: Path, how: Planning) -> Plan:
    """Resolve one of several runs to compare: they share the data's index, and a signal stops them at once."""
    planned = resolve(composed, run_dir, how)
    config = finetuning.with_index(planned.config, index_cache).with_fields("train", exit_signal_handler=False)
    return replace(planned, config=config)


def restarts_so_far(run_dir: RunDir) -> int | None:
    """Return the recorded restarts; None where there is no run yet."""
    return len(restarts.read_restarts(run_dir)) if run_dir.run.exists() else None


def _prepare(data: DataSettings, how: Planning) -> PreparedData | None:
    """Return the run's data, of a dry planning perhaps not yet prepared; None: generated."""
    if data.kind != "text" or data.path is None or data.tokenizer is None:
        return None
    cache = Path(data.cache or cache_dir() / "data").expanduser()
    path, tokenizer = Path(data.path).expanduser(), str(Path(data.tokenizer).expanduser())
    progress = how.progress or (lambda done, total: None)
    return find_prepared(path, cache, tokenizer, data.json_key, progress, make=not how.dry)


def _with_examples(config: RunConfig) -> tuple[RunConfig, Examples | None]:
    """Return the configuration with absolute paths of the examples that a run fine-tunes on, and the examples; None: it
    does not. Raises ConfigError.
    """
    examples = inputs.examples(config)
    for section, name in (("dataset", "dataset_root"), ("tokenizer", "tokenizer_model")) if examples else ():
        path = Path(config.section(section)[name]).expanduser().absolute()
        config = config.with_fields(section, **{name: str(path)})
    return config, examples


def _digest_of_named(config: RunConfig, how: Planning) -> str | None:
    """Return the digest of the indexed datasets that a recipe names; None: there are none. Raises a TpiError."""
    digests = []
    for prefix in inputs.named_data(config):
        if how.here or beside(prefix, ".idx").exists():
            index = read_index(prefix, cache_dir() / "data", how.progress or (lambda done, total: None))
            if index.largest >= config.shape.vocabulary:
                size = f"model.vocab_size={config.shape.vocabulary}"
                raise ConfigError(f"dataset.blend: {prefix}.bin holds token {index.largest}, and {size}")
            digests.append(index.digest)
    return hashlib.sha256(" ".join(digests).encode()).hexdigest() if len(digests) > 1 else next(iter(digests), None)


def _with_data(config: RunConfig, data: PreparedData) -> RunConfig:
    """Return the configuration with prepared data, and with the ids of the data for the NullTokenizer."""
    if data.vocab_size > config.shape.vocabulary:
        raise ConfigError(
            f"{config.data.path} holds {data.vocab_size} token ids but model.vocab_size={config.shape.vocabulary}; "
            f"use data.tokenizer=byte (257 ids) or raise model.vocab_size"
        )
    if not data.documents:
        return config
    refuse(lines(filter(None, [relations.empty_part(config, str(data.prefix), data.documents)])))
    eod = {} if data.eod == data.vocab_size - 1 else {"null_tokenizer_eod_id": data.eod}
    config = config.with_fields("dataset", blend=[[str(data.prefix.absolute())], None])
    return config.with_fields("tokenizer", vocab_size=data.vocab_size, vocab_includes_eod=True, **eod)
