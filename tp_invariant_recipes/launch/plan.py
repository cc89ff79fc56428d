"""Everything that is decided before a process starts: what to train, on what, where it is written, where it resumes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.compare import comparability
from tp_invariant_recipes.config import going_on, hydra_tree, relations
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.identity import WEIGHTS_DIGEST, identity
from tp_invariant_recipes.config.null_tokenizer import eod_id
from tp_invariant_recipes.config.overrides import DECIDED_BY as _BY
from tp_invariant_recipes.config.overrides import Override, given, parse, parse_all, texts
from tp_invariant_recipes.data.examples import Examples, read_examples
from tp_invariant_recipes.data.prepare import ensure_prepared, foresee
from tp_invariant_recipes.data.prepared import PreparedData
from tp_invariant_recipes.errors import CheckpointError, ConfigError, RunError, listed
from tp_invariant_recipes.host import gpus
from tp_invariant_recipes.host.versions import versions
from tp_invariant_recipes.launch import experiments, preflight
from tp_invariant_recipes.ledger.open import read, streamed
from tp_invariant_recipes.ledger.run_files import AttemptJob, RunFile
from tp_invariant_recipes.ledger.schema import Header
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.runs import attempts, checkpoints
from tp_invariant_recipes.runs.checkpoints import RunCheckpoint, iteration_dir
from tp_invariant_recipes.runs.run_dir import RunDir, choose
from tp_invariant_recipes.settings import conf_files, environment, layout, peft, sft
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import DataSettings
from tp_invariant_recipes.settings.values import value_text
from tp_invariant_recipes.sources import hf_models, lora, weights

# Overrides of one attempt at a run and not of the run: which step it resumed from, and what started its ranks.
OF_AN_ATTEMPT = ("checkpoint.ckpt_step", "launcher.kind", *relations.REPLACED)
# And the one that says where it was written, which a repetition does elsewhere.
NOT_REPEATED = (*OF_AN_ATTEMPT, "run.dir")


@dataclass(frozen=True)
class Plan:
    """A run, ready to start.

    config:      as composed, with data, tokenizer and checkpoint filled in.
    environment: variables to set before torch is imported.
    start:       completed steps to start from; 0 for a new run.
    here:        whether ranks will run on this machine; False where their job is only submitted.
    data_missing: whether text has yet to be prepared; such a plan is for `tpi train --dry-run` alone.
    attempts:    at the run so far, when this was planned; None: there was no run.
    remark:      what to tell of going on with the run; None: nothing.
    """

    composed: Composed
    config: RunConfig
    layout: layout.Layout
    run_dir: RunDir
    identity: dict[str, Any]
    environment: dict[str, str]
    start: int = 0
    here: bool = True
    data_missing: bool = False
    attempts: int | None = None
    remark: str | None = None

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


@dataclass(frozen=True)
class Request:
    """What a command of `tpi train` asks for: a model, or a run to continue.

    It is composed once; what is composed is then handed to `plan` or `follow`.
    go_on: continue the run in run.dir if there is one.
    dry: plan only; prepare no data.
    """

    model: str | None
    overrides: tuple[Override, ...]
    resume: Path | None = None
    go_on: bool = False
    dry: bool = False

    @property
    def launcher(self) -> str:
        """Who is to start the ranks: as typed, not yet checked."""
        asked = given(self.overrides, "launcher.kind")
        return asked.value if asked else "local"

    def composed(self, device: str | None = None) -> Composed:
        """The configuration alone. Raises ConfigError; RunError where there is no run to continue.

        device: where neither the overrides nor the run to continue name one; None: what is here.
        """
        if self.resume is not None:
            self._goes_on_there(self.resume)
            return _composed_again(self.resume, self.model, self.overrides)
        if self.model is None:
            raise ConfigError("name a model to train (tpi models lists them), or a run to continue: --resume RUN")
        composed = compose(self.model, self.overrides, device=device or detect_device())
        return _with_its_numerics(composed) if self.go_on else composed

    def _goes_on_there(self, run: Path) -> None:
        """Raises ConfigError where run.dir is not the run's directory."""
        asked = given(self.overrides, "run.dir")
        where = asked and asked.parsed and asked.parsed.value()
        if asked and (where is None or Path(str(where)).expanduser().resolve() != run.resolve()):
            raise ConfigError(f"--resume {run} goes on in {run}: leave out {asked.text}")

    def plan(self, composed: Composed, progress: Callable[[int, int], None] | None = None) -> Plan:
        """Plan the run. Raises a TpiError."""
        if self.resume is not None:
            return resume_run(self.resume, composed, progress=progress, dry=self.dry)
        if self.go_on:
            return resume_or_start(composed, progress=progress, dry=self.dry)
        return new(composed, progress=progress, dry=self.dry)

    def follow(self, composed: Composed, start: int) -> Plan:
        """Plan the same where another machine has planned it to start after step `start`. Raises a TpiError."""
        if self.resume is not None:
            return resume_run(self.resume, composed, start=start)
        return resume_or_start(composed, start=start)

    def words(self) -> list[str]:
        """What follows `tpi train`, to ask for the same again."""
        resume = [] if self.resume is None else ["--resume", str(self.resume.absolute())]
        model = [] if self.model is None else [self.model]
        return [*model, *texts(self.overrides), *resume, *(["--continue"] if self.go_on else [])]


def detect_device() -> str:
    """The device group used where none is asked for: gpu where the driver shows one."""
    return "gpu" if gpus.visible() else "cpu"


def for_nodes[T](planning: Callable[[str], T], config_of: Callable[[T], RunConfig], overrides: Sequence[Override]) -> T:
    """Compose or plan for the device of the cluster's nodes, which a login node cannot see: the cluster's file says
    how many GPUs they have.

    planning: given a device, composes. It is asked once more only where the cluster's file builds on others in a way
              that its own text does not show.
    config_of: the configuration of what it returns.
    """
    device = _nodes_device(hydra_tree.unresolved("cluster", "gpus_per_node", overrides))
    found = planning(device)
    right = _nodes_device(config_of(found).cluster.gpus_per_node)
    return found if right == device or given(overrides, "device.kind") else planning(right)


def _nodes_device(gpus_per_node: int | None) -> str:
    return detect_device() if gpus_per_node is None else "gpu" if gpus_per_node else "cpu"


def new(composed: Composed, *, progress: Callable[[int, int], None] | None = None, dry: bool = False) -> Plan:
    """Plan a new run. Raises a TpiError that lists what is wrong; nothing but the data cache is written.

    progress: told (bytes done, bytes in all) while text is prepared. dry: prepare none.
    """
    config = composed.config
    if (step := config.section("checkpoint").get("ckpt_step")) is not None:
        raise ConfigError(f"checkpoint.ckpt_step={step}: a new run begins at step 0; it goes with --resume RUN")
    where = choose(config.run.dir, f"{composed.model}-tp{layout.of(config).tp}")
    return resolve(composed, where, progress, dry=dry)


def resume_run(
    run: Path,
    composed: Composed,
    *,
    start: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    here: bool = True,
    dry: bool = False,
) -> Plan:
    """Plan to continue a run from its newest finished checkpoint, or from the start if it has none.

    composed: as the run was, but for what is to change: layout and length may, what makes runs comparable may not.
    start: the step to go on from, of which another process has made sure (0: from the beginning).
    here: as in Plan. dry: as for `new`.
    Raises a TpiError that names the fields, or the damaged files.
    """
    return _going_on(f"--resume {run}", RunDir(run), composed, progress, start, here=here, dry=dry)


def resume_or_start(
    composed: Composed,
    *,
    start: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    dry: bool = False,
) -> Plan:
    """Plan to continue the run in `run.dir` if one is there, else to begin it there.

    For a command that a scheduler may start again and again. start: as for `resume_run`. dry: as for `new`.
    Raises a TpiError.
    """
    where = composed.config.run.dir
    if where is None:
        raise ConfigError("--continue needs the directory to go on in, or to begin in: run.dir=PATH")
    run_dir = RunDir(Path(where).expanduser())
    if run_dir.run.exists():
        return _going_on(f"--continue run.dir={where}", run_dir, composed, progress, start, dry=dry)
    return resolve(composed, choose(where, composed.model), progress, dry=dry)


def _composed_again(run: Path, model: str | None, overrides: Sequence[Override]) -> Composed:
    before = RunDir(run).read_run(RunFile)
    if model not in (None, before.model):
        raise ConfigError(f"--resume {run} is a run of {before.model}, not of {model}")
    return _compose_as(before, [*_asked(before, OF_AN_ATTEMPT), *_kept(before), *overrides])


def _kept(before: RunFile) -> list[Override]:
    """What a run keeps of its numerics although another layout has another default."""
    return [parse(text) for text in going_on.kept(before.numerics)]


def _compose_as(before: RunFile, overrides: Sequence[Override]) -> Composed:
    """Compose with the device and the numerics of an earlier attempt, whatever is the default here and now."""
    return compose(before.model, overrides, device=before.device, numerics=before.numerics["mode"])


def _with_its_numerics(composed: Composed) -> Composed:
    """With the numerics that the run began with, if the default has changed since: a job may outlive a release."""
    where = composed.config.run.dir
    run_dir = RunDir(Path(where or "").expanduser())
    if where is None or not run_dir.run.exists() or given(composed.overrides, "numerics.mode"):
        return composed
    numerics, device = run_dir.read_run(RunFile).numerics["mode"], composed.config.device.kind
    if composed.config.numerics.mode == numerics:
        return composed
    return compose(composed.model, composed.overrides, device=device, numerics=numerics)


def asked_again(before: RunFile) -> list[Override]:
    """The overrides that repeat a run elsewhere, its device and numerics among them. before: its `run.json`."""
    asked = _asked(before, NOT_REPEATED)
    decided = {"device": before.device, "numerics": before.numerics["mode"]}
    missing = {group: option for group, option in decided.items() if not given(asked, f"{group}.{_BY[group]}")}
    return [*(parse(f"{group}={option}") for group, option in missing.items()), *asked]


def _asked(before: RunFile, apart_from: Sequence[str]) -> list[Override]:
    """The overrides that a run was made of."""
    return [override for override in parse_all(before.overrides) if override.field not in apart_from]


def _going_on(
    asked: str,
    run_dir: RunDir,
    composed: Composed,
    progress: Callable[[int, int], None] | None,
    start: int | None = None,
    *,
    here: bool = True,
    dry: bool = False,
) -> Plan:
    """asked: the words of the command, for messages. start, here: as for `resume_run`. dry: as for `new`."""
    before = run_dir.read_run(RunFile)
    begun = start or _has_checkpoint(run_dir)
    imported = _imported(before, composed) if begun else None
    plan = resolve(composed, run_dir, progress, here=here, dry=dry, imported=imported)
    if plan.data_missing:
        plan.identity["data.digest"] = before.identity.get("data.digest")  # not known before it is prepared
    if composed.model != before.model:
        raise ConfigError(f"{asked} is a run of {before.model}, not of {composed.model}")
    _same_identity(before.identity, plan.identity, f"{asked} would continue another run.", composed.overrides)
    if start is not None:
        return _from(plan, RunCheckpoint(iteration_dir(run_dir.checkpoints, start), start)) if start else plan
    step = plan.config.section("checkpoint")["ckpt_step"]
    found = checkpoints.select(run_dir.checkpoints, step, within=_recorded(run_dir))
    if found and found.step > plan.config.train["train_iters"]:
        raise ConfigError(
            f"{asked} goes on at step {found.step}, after iters={plan.config.train['train_iters']}: raise iters, or "
            f"checkpoint.ckpt_step=STEP"
        )
    if found and found.read_manifest().identity_hash != identity_hash(plan.identity):
        raise CheckpointError(f"{found.path} belongs to another run: its identity is not the one of {run_dir.path}")
    if found:
        _same_bits(asked, before, plan, found)
    return plan if found is None else replace(_from(plan, found), remark=_products(plan, found.step))


def _products(plan: Plan, step: int) -> str | None:
    """Whether the steps after `step` have another definition of a product than those before, in a sentence."""
    version = mode.definition(plan.config.numerics.mode, plan.device)
    return comparability.changed_products(streamed(plan.run_dir.ledger).header, version, step) if version else None


def _has_checkpoint(run_dir: RunDir) -> bool:
    """Whether there is one to go on from, whose weights count and not those of a folder."""
    recorded = _recorded(run_dir)
    return any(found.step <= recorded for found in checkpoints.finished(run_dir.checkpoints))


def _imported(before: RunFile, composed: Composed) -> str | None:
    """The digest of the weights that a run has started from, if these are still asked for.

    None: they have to be read. Checkpoints of adapters have no others.
    """
    if peft.adapts(composed.config):
        return None
    now, then = (given(texts, "weights.folder") for texts in (composed.overrides, parse_all(before.overrides)))
    same = (now and now.value) == (then and then.value)
    return before.identity.get(WEIGHTS_DIGEST) if same else None


def _same_bits(asked: str, before: RunFile, plan: Plan, found: RunCheckpoint) -> None:
    """Raises ConfigError: in this layout the steps to come would have other bits, or the checkpoint cannot be read."""
    degrees, manifest = plan.layout.as_dict(), found.read_manifest()
    are_apart = going_on.experts_apart(plan.config.numerics.mode, plan.config.model, degrees)
    state = going_on.unreadable_state(
        manifest.optimizer_state,
        manifest.layout,
        going_on.optimizer_state(plan.config),
        degrees,
        apart=(manifest.experts_apart, are_apart),
    )
    problems = [
        going_on.other_gradients(vars(before), {"numerics": plan.config.section("numerics"), "layout": degrees}),
        state and f"{found.path}: {state}",
    ]
    wrong = [problem for problem in problems if problem]
    if wrong:
        raise ConfigError(f"{asked} cannot go on at step {found.step} in this layout.\n{listed(wrong)}", wrong)


def _recorded(run_dir: RunDir) -> int:
    """Steps in the ledger. A node that dies can take its last lines with it, when the checkpoint is already whole."""
    return len(read(run_dir.ledger).steps) if run_dir.ledger.exists() else 0


def rerun(
    run: Path,
    run_dir: RunDir,
    start: RunCheckpoint | None,
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
    before = RunDir(run).read_run(RunFile)
    # The length stays: how often Megatron goes through the text, and in which order, depends on it. Bridge leaves
    # without a word to callbacks, so the ledger has the digests of a step only if another one follows.
    shorter = f"train.exit_interval={last_step + 1}"
    changes = [*record, "save=0", "logging=none", shorter, "train.exit_duration_in_mins=null"]
    composed = _compose_as(before, [*_asked(before, NOT_REPEATED), *parse_all(changes)])
    imported = _imported(before, composed) if start else None
    plan = resolve(composed, run_dir, progress, imported=imported)
    _same_identity(before.identity, plan.identity, f"{run} cannot be repeated: it would be another run now.")
    plan = replace(plan, config=plan.config.with_fields("checkpoint", save=None))
    return plan if start is None else _from(plan, start)


def _from(plan: Plan, found: RunCheckpoint) -> Plan:
    """The plan, begun at a checkpoint of a run of the same identity."""
    # The identity is the same, so the checkpoint's schedule is this run's: Megatron would refuse a longer run over the
    # number of steps alone.
    config = plan.config.with_fields("scheduler", use_checkpoint_opt_param_scheduler=True)
    config = config.with_fields("checkpoint", ckpt_step=found.step, load=str(found.path.parent))
    return replace(plan, config=config, start=found.step)


def check_current(plan: Plan) -> None:
    """Raises RunError when another process has trained in the run directory since this was planned."""
    if _attempts(plan.run_dir) != plan.attempts:
        raise RunError(f"another command has begun to train in {plan.run_dir.path} since this one looked there")


def _attempts(run_dir: RunDir) -> int | None:
    return len(attempts.read_attempts(run_dir)) if run_dir.run.exists() else None


def write(plan: Plan, *, attempt: bool = True, job: AttemptJob | None = None) -> None:
    """Write the run directory, before anything starts. Raises RunError.

    attempt: whether this is one; a job that is only submitted is none yet. job: of SLURM, that makes it.
    """
    run_dir = plan.run_dir
    so_far = attempts.read_attempts(run_dir)
    if attempt:
        so_far = (*so_far, attempts.started(plan.start, plan.steps, job, plan.layout.as_dict()))
    run = RunFile(
        model=plan.composed.model,
        overrides=tuple(texts(plan.composed.overrides)),
        device=plan.device,
        layout=plan.layout.as_dict(),
        numerics=plan.config.section("numerics"),
        identity=plan.identity,
        identity_hash=identity_hash(plan.identity),
        notes=_notes(plan.config),
        attempts=so_far,
    )
    run_dir.write(run_dir.config, plan.config.sections)
    run_dir.write(run_dir.environment, environment.recorded(os.environ | plan.environment))
    run_dir.write(run_dir.versions, versions())
    run_dir.write(run_dir.run, run.as_json())


def identity_hash(identity: dict[str, Any]) -> str:
    """The hash that the ledger's header will carry: equal exactly when the identities are."""
    return Header(identity=identity).identity_hash


def resolve(
    composed: Composed,
    run_dir: RunDir,
    progress: Callable[[int, int], None] | None = None,
    *,
    here: bool = True,
    dry: bool = False,
    imported: str | None = None,
) -> Plan:
    """Fill in what only this machine knows, and check that it can carry the run. Raises a TpiError.

    here: as in Plan. dry: as for `new`. imported: the digest of the weights that the run has started from, where a
    checkpoint stands for their folder, which is then not read.
    """
    config = composed.config
    so_far = _attempts(run_dir)
    variables = environment.settings(config.device.kind, os.environ, config.cluster.environment)
    if pretrained := config.section("checkpoint").get("pretrained_checkpoint"):
        config = config.with_fields("checkpoint", pretrained_checkpoint=str(Path(pretrained).expanduser()))
        lora.check_base(config)
    if config.weights.folder is not None:
        folder = Path(config.weights.folder).expanduser().absolute()
        config = config.with_fields("weights", folder=str(folder))
        imported = imported or _check_weights(folder, config)
    preflight.check(config, run_dir, here=here)
    data = _prepare(config.data, progress, dry=dry)
    config, examples = _with_examples(config)
    config = config.with_fields("run", dir=str(run_dir.path))
    config = config.with_fields("checkpoint", save=str(run_dir.checkpoints))
    config = sft.with_index(config, run_dir.index_cache)
    if isinstance(data, int):
        _check_vocabulary(str(config.data.path), data, config)
    elif data is not None:
        config = _with_data(config, data)
    config = config.with_fields("logger", **experiments.logger_fields(config, run_dir))
    known = data if isinstance(data, PreparedData) else examples
    digest = known.digest if known else None
    return Plan(
        composed,
        config,
        layout.of(config),
        run_dir,
        identity(config, digest, imported),
        variables | experiments.variables(config),
        here=here,
        data_missing=isinstance(data, int),
        attempts=so_far,
    )


def resolve_beside(
    composed: Composed, run_dir: RunDir, index_cache: Path, progress: Callable[[int, int], None] | None = None
) -> Plan:
    """Plan one of several runs that a command compares: they share the index of the data, in `index_cache`, and
    end at once when told to.
    """
    planned = resolve(composed, run_dir, progress)
    config = sft.with_index(planned.config, index_cache).with_fields("train", exit_signal_handler=False)
    return replace(planned, config=config)


def _check_weights(folder: Path, config: RunConfig) -> str:
    """The digest of a folder's weights. Raises ConfigError: they are not those of the model."""
    checkpoint = weights.read(folder)
    if wrong := hf_models.problems(config.model, checkpoint):
        raise ConfigError(listed(wrong), wrong)
    return checkpoint.digest()


def _prepare(
    data: DataSettings, progress: Callable[[int, int], None] | None, *, dry: bool
) -> PreparedData | int | None:
    """The run's data; None: it is generated. With `dry` the size of its vocabulary where it has yet to be prepared."""
    if data.kind != "text" or data.path is None or data.tokenizer is None:
        return None
    cache = Path(data.cache or conf_files.cache_dir() / "data").expanduser()
    path, tokenizer = Path(data.path).expanduser(), str(Path(data.tokenizer).expanduser())
    if dry:
        return foresee(path, cache, tokenizer=tokenizer, json_key=data.json_key)
    return ensure_prepared(path, cache, tokenizer=tokenizer, json_key=data.json_key, progress=progress)


def _with_examples(config: RunConfig) -> tuple[RunConfig, Examples | None]:
    """The configuration with absolute paths of the examples that a run fine-tunes on, and the examples; None: it does
    not. Raises DataError, ConfigError.
    """
    dataset = config.section("dataset")
    if not sft.is_sft(dataset):
        return config, None
    root = Path(dataset["dataset_root"]).expanduser().absolute()
    folder = Path(config.section("tokenizer")["tokenizer_model"]).expanduser().absolute()
    found = read_examples(root, sft.files(config), str(folder), sft.columns(dataset), chat=sft.is_chat(dataset))
    sequences, vocabulary = config.train["global_batch_size"], config.model["vocab_size"]
    problems = []
    if found.count < sequences:
        problems.append(f"{root / sft.TRAINING} has {found.count} examples, and a step takes {sequences}; lower gbs")
    if found.vocab_size > vocabulary:
        problems.append(
            f"tokenizer.tokenizer_model={folder} has {found.vocab_size} token ids and the model {vocabulary}; the "
            f"tokenizer of the model, or model.vocab_size={found.vocab_size}"
        )
    if problems:
        raise ConfigError(listed(problems), problems)
    config = config.with_fields("dataset", dataset_root=str(root))
    return config.with_fields("tokenizer", tokenizer_model=str(folder)), found


def _check_vocabulary(where: str, size: int, config: RunConfig) -> None:
    if size > config.model["vocab_size"]:
        raise ConfigError(
            f"{where} holds {size} token ids but model.vocab_size={config.model['vocab_size']}; "
            f"use data.tokenizer=byte (257 ids) or raise model.vocab_size"
        )


def _with_data(config: RunConfig, data: PreparedData) -> RunConfig:
    """The configuration with prepared data, and with the ids of the data for the NullTokenizer."""
    _check_vocabulary(str(data.prefix), data.vocab_size, config)
    eod = {} if data.eod == data.vocab_size - 1 else {"null_tokenizer_eod_id": data.eod}
    config = config.with_fields("dataset", blend=[[str(data.prefix.absolute())], None])
    return config.with_fields("tokenizer", vocab_size=data.vocab_size, vocab_includes_eod=True, **eod)


def _notes(config: RunConfig) -> dict[str, Any]:
    """Facts worth saying in the ledger."""
    tokenizer = config.section("tokenizer")
    if tokenizer["tokenizer_type"] != "NullTokenizer":
        return {}
    includes, size = tokenizer["vocab_includes_eod"], tokenizer["vocab_size"]
    eod = tokenizer.get("null_tokenizer_eod_id")
    return {
        "tokenizer.vocab_includes_eod": includes,
        "tokenizer.vocab_size": size,
        "tokenizer.eod": eod if eod is not None else eod_id(size, includes_eod=includes),
    }


def _same_identity(
    before: dict[str, Any], now: dict[str, Any], otherwise: str, overrides: Sequence[Override] = ()
) -> None:
    """Raises RunError that names each field of the identity that has changed, and the key that corrects it."""
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        problems = [
            f"{key} was {before.get(key)} and is {now.get(key)} now; {_mended(key, before.get(key), overrides)}"
            for key in changed
        ]
        raise RunError(f"{otherwise}\n{listed(problems)}")


def _mended(key: str, value: Any, overrides: Sequence[Override]) -> str:
    """What makes a field of the identity again what it was."""
    typed = given(overrides, key) or next((one for one in overrides if key.startswith(f"{one.path}.")), None)
    if key == "data.digest":
        return "data.path, data.tokenizer and data.json_key (dataset.dataset_root, tokenizer) must give the same tokens"
    if key == WEIGHTS_DIGEST:
        return "weights must name a folder with the same tensors" if value else "leave out weights"
    if typed is not None and typed.value != value_text(value):
        return f"leave out {typed.text}, or set {key}={value_text(value)}"
    return f"set {key}={value_text(value)}"
