"""`tpi score`: log-probabilities of sequences from a run's checkpoint or a Hugging Face folder.

While it runs, OUT.partial is a directory with the lines so far, the ranks' logs, and what is scored (`score.json`). The
same command goes on there after a stop. Then the lines become OUT, and what was scored OUT.meta.json.
"""

import hashlib
import json
import os
import shutil
import time
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
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError, TpiError, lines, reason, refuse
from tp_invariant_recipes.features.export.workflow import checkpoint_of
from tp_invariant_recipes.features.train import workflow as train
from tp_invariant_recipes.files import sync_folder, write_atomically
from tp_invariant_recipes.launch import local, plan
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.launch.resume import overrides_to_repeat
from tp_invariant_recipes.ledger.run_files import LARGEST, RunFile
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.reading import MIB, open_file, parse_json, read_limited
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.runs.run_dir import RunDir, cannot_write
from tp_invariant_recipes.settings import environment, peft
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.schema import LEARNED
from tp_invariant_recipes.sources import hf_models, weights

# What a scoring may set: fields of these sections, and these groups and fields. All else belongs to a training.
SECTIONS = ("numerics.", "model.", "parallel.", "mixed_precision.", "patches.")
FIELDS = (
    *("numerics.mode", "device.kind", "precision", "run.hang_timeout"),
    *("dist.distributed_timeout_minutes", "dist.distributed_backend"),
)
OTHERWISE = {
    "model.seq_length": "every sequence has its own length",
    "weights.folder": "name the folder instead of the run",
    "cuda_graph": "sequences of every length run without CUDA graphs",
    **dict.fromkeys(
        ("numerics.data_shards", "numerics.expert_groups", "numerics.grad_norm", "numerics.clip_rounding"),
        "a scoring has no gradients",
    ),
    "numerics.initial_weights": "the weights are there already",
}
# What a training has and a scoring has not.
OFF = ("cuda_graph=off", "guard=off", "logging=none", "save=0", "ledger.digests=0", "validation.eval_iters=0")
# What a scoring takes from a run: these, but for what belongs to its layout and its batches.
REPEATED_FIELDS = ("numerics.*", "model.*", "mixed_precision.*", "recipe.*", "tokenizer*", "precision")
OMITTED_FIELDS = (
    *("*_parallel_size", "*.sequence_parallel", "*pipeline*", "*.account_for_*", "*cuda_graph*", "*.recompute_*"),
    *("numerics.mode", "numerics.data_shards", "numerics.expert_groups"),
)
WRITTEN = "written"  # key of OUT.meta.json: hash and number of OUT's lines
DEFAULT_TOKENS = 16384  # of a forward pass, where sequences share one


@dataclass(frozen=True)
class Options:
    """step: of a run's checkpoint; None: the newest. tokenizer: None: the folder's. tokens: of a forward pass.

    entropies: whether OUT must have them. against: whether it is compared with an engine's.
    """

    step: int | None = None
    tokenizer: str | None = None
    tokens: int = DEFAULT_TOKENS
    ranks: bool = False
    entropies: bool = False
    against: bool = False

    @property
    def columns(self) -> dict[str, bool]:
        """What a new OUT has beside log-probabilities: what a temperature would change depends on the entropy."""
        return {"ranks": self.ranks, "entropies": self.entropies or self.against}


@dataclass(frozen=True)
class Scoring:
    """A scoring, ready to start.

    identity: what decides the lines of `out`, of which the layout is no part. checkpoint: None: a folder has weights.
    """

    plan: Plan
    checkpoint: Path | None
    file: Path
    out: Path
    tokenizer: str | None
    options: Options
    identity: dict[str, Any]

    @property
    def meta(self) -> Path:
        """Return what was scored, beside the scores."""
        return self.out.with_name(f"{self.out.name}.meta.json")

    @property
    def partial(self) -> RunDir:
        """Where it is written until it is whole."""
        return RunDir(self.out.with_name(f"{self.out.name}.partial"))

    @property
    def lines(self) -> Path:
        """The lines so far."""
        return self.partial.path / "scores.jsonl"

    @property
    def count(self) -> int:
        """Sequences of the file."""
        return self.identity["sequences"]["count"]


def _model_problems(config: RunConfig, options: Options) -> list[str]:
    """Return what of a model, its weights and layout cannot be scored."""
    problems = []
    if not config.numerics.invariant and options.columns["entropies"] and config.layout.tp & (config.layout.tp - 1):
        problems.append(f"--entropy: tp={config.layout.tp} under numerics=stock: entropies need a power of two")
    problems += [f"model.{name}=0" for name in ("hidden_dropout", "attention_dropout") if config.model.get(name)]
    problems += lines(broken_rules(PendingRun(config), LAYERS))
    try:
        inputs.check_weights(config)
    except ConfigError as error:
        problems += error.problems
    return problems


def _identity(
    composed: Composed, options: Options, of_weights: dict[str, Any], of_sequences: dict[str, Any]
) -> dict[str, Any]:
    """Return what decides the lines of scores."""
    config = composed.config
    numerics = {name: getattr(config.numerics, name) for name in ("mode", "virtual_shards", "context_shards")}
    identity = {
        "schema": 1,
        "weights": of_weights,
        "numerics": numerics | {"product": mode.definition(config.numerics.mode, config.device.kind)},
        "overrides": [override.text for override in composed.overrides if _kept(override)],
        "sequences": of_sequences,
        "columns": options.columns,
    }
    if config.numerics.arithmetic is None or not config.numerics.arithmetic.any_machine:
        identity["device"] = config.device.kind  # other machines may have other bits
    if config.numerics.arithmetic is None:
        identity["layout"] = config.layout.as_dict() | {"tokens": options.tokens}
    return identity


def new(source: Path, file: Path, overrides: Sequence[str], out: Path, options: Options) -> Scoring:
    """Plan a scoring. Nothing is written. Raises a TpiError that lists what is wrong.

    source: a run directory or a Hugging Face folder. file: of sequences. overrides: as typed.
    """
    requested = parse_all(overrides)
    problems = [f"{override.text}: {why}" for override in requested if (why := _refused(override))]
    if options.tokens < 1:
        problems.append(f"--batch-tokens {options.tokens}: must be at least 1")
    of_run = RunDir(source).run.exists()
    if not of_run and options.step is not None:
        problems.append(f"--step {options.step}: {source} is a Hugging Face folder, which has no steps; leave it out")
    refuse(problems)
    composed, checkpoint, of_weights = (_of_run if of_run else _of_folder)(source, requested, options.step)
    config = composed.config
    refuse(_model_problems(config, options))
    tokenizer = options.tokenizer or _tokenizer(config, source, of_run=of_run)
    encode, digest = None, None
    if tokenizer is not None:
        encode, _, digest = sequences.tokenizer(tokenizer)
    file, out = file.expanduser().absolute(), out.expanduser().absolute()
    read = sequences.survey(file, config.shape.vocabulary, encode)
    if config.model.get("position_embedding_type") == LEARNED and read.longest > config.shape.sequence:
        positions = f"the model has learned {config.shape.sequence} positions"
        raise ConfigError(f"{file}: a sequence has {read.longest} tokens, and {positions}; leave longer ones out")
    of_sequences = {"sha256": read.sha256, "count": read.sequences, "tokenizer": digest}
    identity = _identity(composed, options, of_weights, of_sequences)
    where = RunDir(out.with_name(f"{out.name}.partial"))
    variables = environment.settings(config.device.kind, os.environ, config.cluster.environment)
    planned = Plan(composed, config, config.layout, where, {}, variables)
    return Scoring(planned, checkpoint, file, out, tokenizer, options, json.loads(json.dumps(identity, default=str)))


def finished(scoring: Scoring) -> bool:
    """Whether OUT has these scores, maybe with more columns. Raises RunError: it has others, or was changed since."""
    if not scoring.out.exists():
        return False
    before = _read(scoring.meta)
    wanted = {name for name in ("ranks", "entropies") if getattr(scoring.options, name)}
    if not isinstance(before, dict) or not _serves(
        {**before, WRITTEN: None}, {**scoring.identity, WRITTEN: None}, wanted
    ):
        raise RunError(f"{scoring.out} exists and holds other scores: choose another --out FILE, or remove it")
    if before.get(WRITTEN) != (now := _described(scoring.out)):
        raise RunError(
            f"{scoring.out} was changed since tpi wrote it: it has {counted(now['lines'], 'line')} and another hash "
            f"than {scoring.meta.name} says; remove it to score again, or choose another --out FILE"
        )
    return True


def _described(file: Path) -> dict[str, Any]:
    """Return what tells a file of scores from a changed one. Raises RunError."""
    digest, count = hashlib.sha256(), 0
    try:
        with open_file(file) as stream:
            while block := stream.read(MIB):
                digest.update(block)
                count += block.count(b"\n")
    except OSError as error:
        raise RunError(f"{file}: {error.strerror or error}") from error
    return {"sha256": digest.hexdigest(), "lines": count}


def has_entropies(scoring: Scoring) -> bool:
    """Return whether OUT, which is there, has entropies."""
    return bool(_read(scoring.meta)["columns"]["entropies"])


def _serves(there: Any, identity: dict[str, Any], wanted: set[str]) -> bool:
    """Return whether scores that are there are those of an identity, with the columns that are wanted or more."""
    if not isinstance(there, dict) or not isinstance(columns := there.get("columns"), dict):
        return there == identity
    return there | {"columns": None} == identity | {"columns": None} and all(columns.get(name) for name in wanted)


def execute(scoring: Scoring, tick: Callable[[], None]) -> dict[str, Any]:
    """Score what is not scored yet. Returns how many sequences and tokens, and in what time.

    tick: called about ten times a second. Raises a TpiError; Interrupted: Ctrl-C, and the same command goes on.
    """
    from tp_invariant_recipes.features.score import lines
    from tp_invariant_recipes.features.score.head import Wanted
    from tp_invariant_recipes.features.score.rank import Score

    train.validate(scoring.plan)
    partial = scoring.partial
    with locked(partial):
        described = partial.path / "score.json"
        if _read(described) not in (None, scoring.identity):
            raise RunError(f"{partial.path} holds a part of other scores: choose another --out FILE, or remove it")
        try:
            write_atomically(described, json.dumps(scoring.identity, indent=2) + "\n")
            done = lines.complete(scoring.lines)
        except OSError as error:
            raise RunError(cannot_write(described, error)) from error
        partial.logs.mkdir(exist_ok=True)
        wanted = Wanted(**scoring.options.columns)
        do = Score(
            scoring.plan.config, scoring.checkpoint, scoring.file, scoring.tokenizer, scoring.lines, done,
            scoring.options.tokens, wanted,
        )  # fmt: skip
        begun = time.monotonic()
        speed = None
        if done < scoring.count:
            scoring.lines.with_name(lines.TIMES).unlink(missing_ok=True)
            try:
                outcome = local.run(scoring.plan, tick, rank_fn=do)
            except KeyboardInterrupt:
                outcome = local.Outcome.STOPPED
            if outcome is not local.Outcome.COMPLETED:
                done = lines.complete(scoring.lines)
                raise Interrupted(
                    f"stopped: {done} of {scoring.count} sequences are scored, and the same command goes on"
                )
            speed = lines.tokens_per_second(scoring.lines)
        if (reached := lines.complete(scoring.lines)) != scoring.count:
            raise RunError(
                f"{scoring.lines} has {reached} lines of {scoring.count}: the same command goes on in {partial.path}"
            )
        written = scoring.identity | {WRITTEN: _described(scoring.lines)}
        write_atomically(scoring.meta, json.dumps(written, indent=2) + "\n")
        os.replace(scoring.lines, scoring.out)
        sync_folder(scoring.out.parent)
    shutil.rmtree(partial.path, ignore_errors=True)
    seconds = round(time.monotonic() - begun, 2)
    return {"sequences": scoring.count - done, "seconds": seconds, "tokens_per_second": speed and round(speed)}


def _refused(override: Override) -> str | None:
    if override.field in OTHERWISE:
        return f"{OTHERWISE[override.field]}; leave it out"
    if (
        override.field.startswith(SECTIONS)
        or override.field in FIELDS
        or override.path in FIELDS
        or override.parsed is None
    ):
        return None
    return "tpi score trains nothing and does not read it; leave it out"


def _kept(override: Override) -> bool:
    """Return whether an override belongs to a model and its arithmetic, and to no layout."""
    return any(fnmatchcase(override.field, pattern) for pattern in REPEATED_FIELDS) and not any(
        fnmatchcase(override.field, pattern) for pattern in OMITTED_FIELDS
    )


def _of_run(source: Path, requested: Sequence[Override], step: int | None) -> tuple[Composed, Path, dict[str, Any]]:
    run_dir = RunDir(source)
    before = run_dir.read_run(RunFile)
    checkpoint = checkpoint_of(run_dir, before.identity_hash, step)
    invariant = mode.find(before.numerics["mode"]) is not None
    kept = [
        override
        for override in overrides_to_repeat(before)
        if _kept(override) and (invariant or not override.field.startswith("numerics."))
    ]
    shards = ("virtual_shards", "context_shards") if invariant else ()
    kept += parse_all(f"numerics.{name}={before.numerics[name]}" for name in shards if before.numerics.get(name))
    numerics = before.numerics["mode"] if invariant else mode.DEFAULT
    composed = _composed(before.model, [*kept, *requested], numerics)
    if peft.adapts(composed.config):
        raise ConfigError(f"{source} has adapters: tpi export {source} FOLDER --merge, then tpi score FOLDER")
    manifest = checkpoint.read_manifest()
    files = {name: file.xxh3_128 for name, file in sorted(manifest.files.items())}
    return composed, checkpoint.path.absolute(), {"run": before.identity_hash, "step": checkpoint.step, "files": files}


def _of_folder(source: Path, requested: Sequence[Override], step: int | None) -> tuple[Composed, None, dict[str, Any]]:
    folder = source.expanduser().absolute()
    if not (folder / weights.CONFIG).is_file():
        wrong = "no such folder" if not folder.exists() else "neither a run directory nor a Hugging Face folder"
        raise ConfigError(f"{source}: {wrong}: there is no run.json and no config.json")
    read = weights.read(folder)
    model, sizes = hf_models.model_of(read)
    composed = _composed(model, [*parse_all([*sizes, f"weights={folder}"]), *requested], mode.DEFAULT)
    return composed, None, {"digest": read.digest()}


def _composed(model: str, overrides: Sequence[Override], numerics: str) -> Composed:
    """Compose with one sequence for each data-parallel rank, which a training's checks ask for."""
    dp = given(overrides, "parallel.data_parallel_size")
    off = [*OFF, *([f"gbs={dp.value}"] if dp and dp.value.isdecimal() else ["gbs=1"])]
    # Multi-token prediction and load balancing are parts of a training's loss.
    device = plan.detect_device()
    requested = latest(parse_all([*overrides, *off]))
    first = compose(model, requested, device=device, numerics=numerics)
    ahead = [name for name in ("mtp_num_layers", "mtp_hybrid_override_pattern") if first.config.model.get(name)]
    more = [f"model.{name}=null" for name in ahead]
    return compose(model, [*requested, *more], device=device, numerics=numerics) if more else first


def _tokenizer(config: Any, source: Path, *, of_run: bool) -> str | None:
    """Return the tokenizer of the folder, or of the text that the run was trained on; None: it has none."""
    candidates = [source, config.weights.folder] if not of_run else [config.weights.folder, config.data.tokenizer]
    candidates.append(config.section("tokenizer").get("tokenizer_model"))
    for candidate in filter(None, candidates):
        try:
            sequences.identify(str(candidate))
            return str(candidate)
        except TpiError:
            continue
    return None


def _read(file: Path) -> Any:
    """Read a JSON file; None: it is not there. Raises RunError."""
    try:
        return parse_json(read_limited(file, LARGEST)) if file.exists() else None
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: {reason(error)}") from error
