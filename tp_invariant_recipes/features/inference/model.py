# SPDX-License-Identifier: Apache-2.0
"""The model of a forward pass: a run's checkpoint or a Hugging Face folder, in any layout, planned as a training."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check.hosts import inputs
from tp_invariant_recipes.check.hosts.machine import LAYERS, PendingRun
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import Override, given, latest, parse_all
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError, TpiError, lines, refuse
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.launch import local, plan
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.launch.ranks import RankFn
from tp_invariant_recipes.launch.resume import overrides_to_repeat
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.runs import checkpoints
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import environment, finetuning
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.schema import LEARNED
from tp_invariant_recipes.sources import hf_models, weights

# What may be set: fields of these sections, and these groups and fields. All else belongs to a training.
SECTIONS = ("numerics.", "model.", "parallel.", "mixed_precision.", "patches.")
FIELDS = (
    *("numerics.mode", "device.kind", "device.peer_memory", "precision", "run.hang_timeout"),
    *("dist.distributed_timeout_minutes", "dist.distributed_backend"),
)
OTHERWISE = {
    "model.seq_length": "every sequence has its own length",
    "weights.folder": "name the folder instead of the run",
    "cuda_graph": "passes of every length run without CUDA graphs of a training",
    **dict.fromkeys(
        ("numerics.data_shards", "numerics.expert_groups", "numerics.grad_norm", "numerics.clip_rounding"),
        "there are no gradients",
    ),
    "numerics.initial_weights": "the weights are there already",
}
# What a training alone has.
OFF = ("cuda_graph=off", "guard=off", "logging=none", "save=0", "ledger.digests=0", "validation.eval_iters=0")
# What is taken from a run: these, but for what belongs to its layout and its batches.
REPEATED_FIELDS = ("numerics.*", "model.*", "mixed_precision.*", "recipe.*", "tokenizer*", "precision")
OMITTED_FIELDS = (
    *("*_parallel_size", "*.sequence_parallel", "*pipeline*", "*.account_for_*", "*cuda_graph*", "*.recompute_*"),
    *("*overlap*", "*.delay_wgrad_compute"),
    *("numerics.mode", "numerics.data_shards", "numerics.expert_groups"),
)


@dataclass(frozen=True)
class Model:
    """A model with its weights, checked. checkpoint: None: a folder has the weights.

    tokenizer: of the folder or of the run's text; None: there is none.
    identity:  what decides its bits, of which the layout is no part, unless the numerics depend on it.
    """

    composed: Composed
    checkpoint: Path | None
    tokenizer: str | None
    identity: dict[str, Any]

    @property
    def config(self) -> RunConfig:
        """Return the checked configuration."""
        return self.composed.config

    @property
    def longest(self) -> int | None:
        """Tokens of a sequence, at most; None: any number."""
        learned = self.config.model.get("position_embedding_type") == LEARNED
        return self.config.shape.sequence if learned else None

    def plan(self, out: Path) -> Plan:
        """Plan ranks that write what becomes the file `out`."""
        variables = environment.of_run(self.config)
        return Plan(self.composed, self.config, self.config.layout, output.partial(out), {}, variables)


@dataclass(frozen=True)
class FileJob:
    """What writes a file of lines, ready to start.

    identity: what decides the lines of `out`, of which the layout is no part. checkpoint: None: a folder has weights.
    """

    plan: Plan
    checkpoint: Path | None
    out: Path
    tokenizer: str | None
    identity: dict[str, Any]

    @property
    def partial(self) -> RunDir:
        """Where it is written until it is whole."""
        return output.partial(self.out)

    def completes(self, tick: Callable[[], None], rank_fn: RankFn) -> bool:
        """Run the ranks, and return whether they came to their end; Ctrl-C is none."""
        try:
            return local.run(self.plan, tick, rank_fn=rank_fn) is local.Outcome.COMPLETED
        except KeyboardInterrupt:
            return False


def model_of(
    source: Path,
    requested: Sequence[Override],
    step: int | None,
    command: str,
    unfit: Callable[[RunConfig], Sequence[str]],
    problems: Sequence[str] = (),
    numerics: str = mode.DEFAULT,
) -> Model:
    """Plan a model. Nothing is written. Raises a TpiError that lists what is wrong.

    source: a run directory or a Hugging Face folder. step: of the run's checkpoint; None: the newest.
    command: in words. unfit: what it refuses of a configuration. problems: what is wrong already.
    numerics: of a folder, unless they are requested; a run has its own.
    """
    problems = [*problems, *early_problems(source, requested, step, command)]
    refuse(problems)
    of_run, folder = RunDir(source).run.exists(), source.expanduser().absolute()
    composed, checkpoint, of_weights = (
        _of_run(source, requested, step) if of_run else _of_folder(folder, requested, numerics)
    )
    config = composed.config
    problems += unfit(config)
    problems += [f"model.{name}=0" for name in ("hidden_dropout", "attention_dropout") if config.model.get(name)]
    problems += lines(broken_rules(PendingRun(config), LAYERS))
    try:
        inputs.check_weights(config)
    except ConfigError as error:
        problems += error.problems
    refuse(problems)
    arithmetic = {name: getattr(config.numerics, name) for name in ("mode", "virtual_shards", "context_shards")}
    identity: dict[str, Any] = {
        "schema": 1,
        "weights": of_weights,
        "numerics": arithmetic | {"product": mode.definition(config.numerics.mode, config.device.kind)},
        "overrides": [override.text for override in composed.overrides if is_repeated(override)],
    }
    if config.numerics.arithmetic is None or not config.numerics.arithmetic.any_machine:
        identity["device"] = config.device.kind  # other machines may not be bitwise identical
    if config.numerics.arithmetic is None:
        identity["layout"] = config.layout.as_dict()
    return Model(
        composed, checkpoint, _tokenizer(config, source, of_run=of_run), json.loads(json.dumps(identity, default=str))
    )


def early_problems(source: Path, requested: Sequence[Override], step: int | None, command: str) -> list[str]:
    """Return what is wrong before anything is composed: overrides that the command does not read, and the source.

    As of `model_of`.
    """
    unread = [f"{override.text}: {why}" for override in requested if (why := _refused(override, command))]
    return [*unread, *_misplaced(source, step)]


def _misplaced(source: Path, step: int | None) -> list[str]:
    """Return why a source is neither a run directory nor a Hugging Face folder, or cannot have the step."""
    folder = source.expanduser().absolute()
    if RunDir(source).run.exists():
        return []
    if (folder / weights.CONFIG).is_file():
        steps = f"--step {step}: {source} is a Hugging Face folder, which has no steps; leave it out"
        return [steps] if step is not None else []
    wrong = "neither a run directory nor a Hugging Face folder" if folder.exists() else "no such folder"
    return [f"{source}: {wrong}: there is no run.json and no config.json"]


def _refused(override: Override, command: str) -> str | None:
    if override.field in OTHERWISE:
        return f"{OTHERWISE[override.field]}; leave it out"
    if (
        override.field.startswith(SECTIONS)
        or override.field in FIELDS
        or override.path in FIELDS
        or override.wrong is not None
    ):
        return None
    return f"{command} trains nothing and does not read it; leave it out"


def is_repeated(override: Override) -> bool:
    """Return whether an override belongs to a model and its arithmetic, and to no layout."""
    return any(fnmatchcase(override.field, pattern) for pattern in REPEATED_FIELDS) and not any(
        fnmatchcase(override.field, pattern) for pattern in OMITTED_FIELDS
    )


def _of_run(source: Path, requested: Sequence[Override], step: int | None) -> tuple[Composed, Path, dict[str, Any]]:
    run_dir = RunDir(source)
    before = run_dir.read_run(RunFile)
    if finetuning.adapts(run_dir.read_run_config()):
        raise ConfigError(f"{source} has adapters: tpi export {source} FOLDER --merge, then name FOLDER")
    checkpoint = checkpoints.of_run(run_dir.checkpoints, step, before.identity_hash)
    asked = given(requested, "numerics.mode")
    invariant = mode.find(before.numerics["mode"]) is not None and not (asked and asked.value in mode.MEGATRONS)
    kept = [
        override
        for override in overrides_to_repeat(run_dir, before, requested)
        if is_repeated(override) and (invariant or not override.field.startswith("numerics."))
    ]
    shards = ("virtual_shards", "context_shards") if invariant else ()
    kept += parse_all(f"numerics.{name}={before.numerics[name]}" for name in shards if before.numerics.get(name))
    numerics = before.numerics["mode"] if invariant else mode.DEFAULT
    composed = _composed(before.model, [*kept, *requested], numerics)
    manifest = checkpoint.read_manifest()
    files = {name: file.xxh3_128 for name, file in sorted(manifest.files.items())}
    return composed, checkpoint.path.absolute(), {"run": before.identity_hash, "step": checkpoint.step, "files": files}


def _of_folder(folder: Path, requested: Sequence[Override], numerics: str) -> tuple[Composed, None, dict[str, Any]]:
    read = weights.read(folder)
    model, sizes = hf_models.model_of(read)
    composed = _composed(model, [*parse_all([*sizes, f"weights={folder}"]), *requested], numerics)
    return composed, None, {"digest": read.digest()}


def _composed(model: str, overrides: Sequence[Override], numerics: str) -> Composed:
    """Compose with one sequence for each data-parallel rank, which a training's checks ask for."""
    dp = given(overrides, "parallel.data_parallel_size")
    off = [*OFF, *([f"gbs={dp.value}"] if dp and dp.value.isdecimal() else ["gbs=1"])]
    # MTP and load balancing are parts of a training's loss.
    device = plan.detect_device()
    requested = latest(parse_all([*overrides, *off]))
    more: list[str] = []

    def ahead(config: RunConfig) -> list[str]:
        fields = ("mtp_num_layers", "mtp_hybrid_override_pattern")
        more.extend(f"model.{name}=null" for name in fields if config.model.get(name))
        return []

    try:
        first = compose(model, requested, device=device, numerics=numerics, also=ahead)
    except ConfigError:
        if not more:  # else a mode may not cover MTP
            raise
    return compose(model, [*requested, *more], device=device, numerics=numerics) if more else first


def _tokenizer(config: Any, source: Path, *, of_run: bool) -> str | None:
    """Find the tokenizer of the folder, or of the text that the run was trained on; None: it has none."""
    candidates = [RunDir(source).read_run_config().data.tokenizer if of_run else source, config.weights.folder]
    candidates.append(config.section("tokenizer").get("tokenizer_model"))
    for candidate in filter(None, candidates):
        try:
            sequences.identify(str(candidate))
            return str(candidate)
        except TpiError:
            continue
    return None
