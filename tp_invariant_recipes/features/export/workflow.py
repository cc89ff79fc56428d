# SPDX-License-Identifier: Apache-2.0
"""`tpi export`: a checkpoint of a run as a Hugging Face folder."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tp_invariant_recipes.config.fingerprint import WEIGHTS_DIGEST
from tp_invariant_recipes.data.tokenizer import tokenizer_files
from tp_invariant_recipes.errors import CheckpointError, ConfigError, RunError
from tp_invariant_recipes.files import whole_folder
from tp_invariant_recipes.launch import local, ranks, trust
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.machine.progress import Counter, busy
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.numerics.megatron.covered_layers import ROW_PARALLEL
from tp_invariant_recipes.reading import parse_object, read_limited
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs import checkpoints
from tp_invariant_recipes.runs.checkpoints import RunCheckpoint
from tp_invariant_recipes.runs.run_dir import RunDir, cannot_write
from tp_invariant_recipes.settings import environment, finetuning
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing.size import parameters
from tp_invariant_recipes.sources import hf_models, weights
from tp_invariant_recipes.start.bridge import quiet
from tp_invariant_recipes.text import plural

if TYPE_CHECKING:
    from tp_invariant_recipes.features.export.rank import Adapters

# What config.json says of the types of weights, which the written ones need not have.
OF_TYPES = ("torch_dtype", "quantization_config", "compression_config")


@dataclass(frozen=True)
class ExportRequest:
    """What to export. folder: not there yet, or empty. step: of the checkpoint; None: the newest.

    masters: the fp32 master weights instead of the weights that the model computes with. merge: of a run with
    adapters, the weights with the adapters added; without, what the library peft loads.
    """

    run: Path
    folder: Path
    step: int | None = None
    masters: bool = False
    merge: bool = False


@dataclass(frozen=True)
class ExportResult(Result):
    """A written folder. step: completed steps. tensors, digest: as `weights.Checkpoint` has them; of adapters alone 0
    and empty: their files are those of the library peft.
    """

    folder: Path
    step: int
    architecture: str
    dtype: str
    tensors: int
    digest: str
    copied: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """0: written."""
        return 0

    def lines(self) -> list[str]:
        """Return what was written, and the digest of whole weights."""
        what = f"{plural(self.tensors, 'tensor')}, {self.dtype}" if self.tensors else "its adapters, for peft"
        return [
            f"{self.folder}: {self.architecture} after step {self.step}, {what}",
            *([f"copied: {', '.join(self.copied)}"] if self.copied else []),
            *([f"weights digest {self.digest}"] if self.digest else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self) | {"folder": str(self.folder)}


def export(request: ExportRequest, console: Console) -> ExportResult:
    """Write a checkpoint of a run into a new folder. console: for progress.

    Raises a TpiError: there is no checkpoint, it is damaged, the model has no architecture that is known, or the folder
    holds something. Then the folder is as it was.
    """
    run, step, masters, merge = request.run, request.step, request.masters, request.merge
    folder = request.folder.expanduser().absolute()
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise ConfigError(f"{folder} is there and is no empty folder: nothing is overwritten, choose another")
    run_dir = RunDir(run)
    before = run_dir.read_run(RunFile)
    trust.require_config(run_dir, before)
    config = run_dir.read_run_config()
    _check_adapters(run, config, masters=masters, merge=merge)
    family = hf_models.family_of(config.model)
    if isinstance(family, str):
        raise ConfigError(f"{run} cannot be exported: {family}")
    if masters and config.mixed_precision is None:
        raise ConfigError(f"{run} has no master weights: its weights are fp32; leave out --masters")
    with busy(console, "verifying the checkpoint"):
        checkpoint = checkpoints.of_run(run_dir.checkpoints, step, before.identity_hash)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as temporary:
            copied = _describe(temporary, config, family, masters=masters)
            adapters = _adapters(config, before.identity, merge=merge) if finetuning.adapts(config) else None
            loading = f"loading and writing the weights of step {checkpoint.step}"
            if adapters and not merge:
                with busy(console, loading):
                    _convert(checkpoint, temporary, config.model, adapters, lambda: None, masters=masters)
                return ExportResult(folder, checkpoint.step, family.architecture, "adapters", 0, "", copied)
            console.print(f"{loading} …")
            wide = masters or config.mixed_precision is None
            total = parameters(config.shape) * (4 if wide else 2) >> 20
            with Counter(console) as counter:
                show = counter.counting("writing:", " MiB")

                def tick() -> None:
                    with suppress(OSError):  # of a file that gets its name meanwhile
                        show(min(sum(file.stat().st_size for file in temporary.iterdir()) >> 20, total), total)

                _convert(checkpoint, temporary, config.model, adapters, tick, masters=masters)
            written = weights.read(temporary)
            with busy(console, "reading the weights again for their digest"):
                digest = written.digest()
    except OSError as error:
        raise RunError(cannot_write(folder, error).replace("run.dir=PATH", "another FOLDER")) from error
    dtype = "float32" if {tensor.dtype for tensor in written.tensors.values()} == {"F32"} else "bfloat16"
    return ExportResult(folder, checkpoint.step, family.architecture, dtype, len(written.tensors), digest, copied)


def _check_adapters(run: Path, config: RunConfig, *, masters: bool, merge: bool) -> None:
    """Raise ConfigError where the run's adapters, or their absence, do not allow what is asked for."""
    if not finetuning.adapts(config):
        if merge:
            raise ConfigError(f"{run} has no adapters to merge: leave out --merge")
        return
    fields = finetuning.section(config)
    if fields is not None and not merge and config.shape.experts and finetuning.of_feed_forward(fields):
        raise ConfigError(
            f"{run} has adapters of experts, which the library peft reads in no layout that tpi writes; add --merge"
        )
    if config.shape.depths:
        raise ConfigError(f"{run} has adapters of MTP, which tpi exports to no folder")
    if masters:
        raise ConfigError(f"{run} has adapters, whose base has no master weights: leave out --masters")


def _describe(folder: Path, config: RunConfig, family: hf_models.Family, *, masters: bool) -> tuple[str, ...]:
    """Write config.json, copy the tokenizer of the folder that the run started from, and return the files copied."""
    source = config.weights.folder
    dtype = "float32" if masters or config.mixed_precision is None else "bfloat16"
    written = hf_models.config_of(family, config.model, dtype)
    copied = []
    if source is not None and _same_model(Path(source), config.model):
        before = parse_object(read_limited(Path(source) / weights.CONFIG, weights.LARGEST_CONFIG))
        written = {key: value for key, value in before.items() if key not in OF_TYPES} | {"dtype": dtype}
        for file in [*tokenizer_files(Path(source)), Path(source) / "generation_config.json"]:
            if file.is_file() and file.name != weights.CONFIG:
                name = file.relative_to(source)
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, folder / name)
                copied.append(str(name))
    (folder / weights.CONFIG).write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return tuple(copied)


def _same_model(folder: Path, model: dict[str, Any]) -> bool:
    try:
        return not hf_models.problems(model, weights.read(folder))
    except ConfigError:
        return False


def _check_norms(config: RunConfig) -> None:
    """Raise ConfigError: adapters add to what a norm returns."""
    family = families.family_of(config.model)
    after = {*finetuning.targets(finetuning.section(config) or {})} & {*ROW_PARALLEL}
    if family is not None and families.FAMILIES[family].after and after:
        raise ConfigError(
            f"Bridge adds adapters of {' and '.join(sorted(after))} after the norms that {family} has there, which "
            "neither merged weights nor the library peft can; peft.target_modules=[linear_qkv,linear_fc1]"
        )


def _adapters(config: RunConfig, identity: Mapping[str, Any], *, merge: bool) -> "Adapters":
    """Return the adapters of a run, and where the weights are that they adapt. Raises a TpiError: they are gone."""
    _check_norms(config)
    from tp_invariant_recipes.features.export.rank import Adapters

    fields = dict(finetuning.section(config) or {})
    if config.weights.folder is not None:
        base = Path(config.weights.folder)
        if weights.read(base).digest() != identity.get(WEIGHTS_DIGEST):
            raise ConfigError(f"{base} does not hold the weights that the run has adapted")
        return Adapters(fields, base, hugging_face=True, merge=merge)
    base = Path(config.section("checkpoint")["pretrained_checkpoint"])
    if not (base / ".metadata").exists():
        chosen = checkpoints.select(base)
        if chosen is None:
            raise CheckpointError(f"{base} holds no checkpoint: the weights that the run has adapted are gone")
        base = chosen.path
    return Adapters(fields, base.absolute(), hugging_face=False, merge=merge)


def _convert(
    checkpoint: RunCheckpoint,
    folder: Path,
    model: dict[str, Any],
    adapters: "Adapters | None",
    tick: Callable[[], None],
    *,
    masters: bool,
) -> None:
    """Write the tensors in a new process, which is the only rank of a world of one. tick: called while it lives."""
    from tp_invariant_recipes.start import bridge
    from tp_invariant_recipes.training.rank import RankInfo

    os.environ.update(environment.settings("cpu", os.environ))
    local.prepare_environment("lo")
    with quiet(), tempfile.TemporaryDirectory() as scratch:
        bridge.load_models()
        from tp_invariant_recipes.features.export.rank import Export

        store = local.store()
        do = Export(checkpoint.path.absolute(), folder, model, masters, adapters)
        with ranks.stopping() as stop:
            outcome = ranks.run(
                RunDir(Path(scratch)), "cpu", [RankInfo(0, 0, 1, 1, "127.0.0.1", (store.port,))], tick, stop, rank_fn=do
            )
    if outcome is not ranks.Outcome.COMPLETED:
        raise KeyboardInterrupt
