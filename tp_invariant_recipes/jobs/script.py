"""The scripts that SLURM runs: the resources of a job, and the templates in `slurm/` that request them."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tp_invariant_recipes.config.overrides import Override, cluster_files, texts
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.foreign_text import single_line
from tp_invariant_recipes.multinode import srun_command
from tp_invariant_recipes.settings.allocation import Allocation, ranks_per_node
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import SlurmSettings

_PACKAGE = Path(__file__).resolve().parents[1]
_PLAIN = re.compile(r"[\w@%+=:,./\[\]*&|()-]+")  # needs no quotes on an #SBATCH line


@dataclass(frozen=True)
class Job:
    """The resources that a script requests from SLURM.

    nodes:       how many, or the fewest and the most: "2-4".
    about:       a sentence for people who read the script.
    gres:        of each node, such as "gpu:8"; None: none. cpus: of each node; None: the site's default.
    whole:       whether the job has its nodes to itself.
    save_before: seconds before the time limit at which SLURM signals the run; None: it does not.
    directory:   the job's working directory.
    log:         the file of its output, as for sbatch's --output.
    slurm:       account, partition, qos, options and setup of all jobs.
    """

    name: str
    about: str
    nodes: int | str
    gres: str | None
    cpus: int | None
    whole: bool
    time: str
    save_before: int | None
    directory: Path
    log: str
    slurm: SlurmSettings


@dataclass(frozen=True)
class CellStep:
    """A cell of a verify: its name, the words that start its step, its overrides."""

    name: str
    srun: tuple[str, ...]
    overrides: tuple[str, ...]


def training(config: RunConfig, allocated: Allocation, *, name: str, about: str, log: str) -> Job:
    """Return the job of a run of this configuration. allocated: the part of the cluster that it needs."""
    cluster, slurm = config.cluster, config.slurm
    assert slurm.time is not None  # check/hosts/job.py refuses a job without
    kind = f"gpu:{cluster.gpu_type}" if cluster.gpu_type else "gpu"
    return Job(
        name=name,
        about=about,
        nodes=allocated.nodes,
        gres=f"{kind}:{allocated.gpus}" if allocated.gpus else None,
        cpus=None if allocated.gpus else allocated.ranks,  # on a CPU one thread a rank computes
        # By default SLURM would give a node's only task one processor, and memory in proportion.
        whole=slurm.exclusive or allocated.ranks == ranks_per_node(config),
        time=slurm.time,
        save_before=slurm.save_before,
        directory=Path.cwd(),
        log=log,
        slurm=slurm,
    )


def train(job: Job, config: RunConfig, model: str, overrides: Sequence[Override], run: Path) -> str:
    """Return the script of one run. overrides: all but run.dir and launcher."""
    srun_ = ("srun", *srun_command.arguments(config, [run, *cluster_files(overrides)]))
    words = texts(overrides)
    return _render("train", job=job, srun=srun_, tpi=srun_command.tpi(config), model=model, overrides=words, run=run)


def array(job: Job, config: RunConfig, model: str, cells: Sequence[CellStep], directory: Path) -> str:
    """Return the script of the cells of a verify, each in a directory of its name in `directory`."""
    return _render("array", job=job, tpi=srun_command.tpi(config), model=model, cells=cells, directory=directory)


def judge(job: Job, config: RunConfig, command: Sequence[str], directory: Path, needed: Sequence[Path]) -> str:
    """Return the script that judges or lists the cells when all have ended. command: without the directory.

    needed: the paths that it reads.
    """
    step = [*config.cluster.srun_options, *srun_command.container(config, needed)]
    words = [*srun_command.tpi(config), *command]
    return _render("judge", job=job, step=step, command=words, directory=directory)


def log_in(folder: Path, name: str) -> str:
    """sbatch's --output for a file in a folder. name: with SLURM's placeholders, such as "job-%j.log".

    Raises ConfigError: the path has a backslash, which makes SLURM keep its placeholders as they are.
    """
    if "\\" in str(folder):
        raise ConfigError(f"run.dir={folder}: SLURM cannot write a log where a name has a backslash in it")
    return f"{str(folder).replace('%', '%%')}/{name}"


def templates() -> Path:
    """Return the folder of the templates: beside the package in a checkout, inside it in an installed wheel."""
    inside = _PACKAGE / "slurm"
    return inside if inside.is_dir() else _PACKAGE.parent / "slurm"


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(templates()),
        undefined=StrictUndefined,
        autoescape=False,  # the text is bash; every value passes through one of the filters
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "q": _quoted,
        "words": lambda values: " ".join(map(_quoted, values)),
        "s": _sbatch,
        "option": _option,
        "comment": single_line,
    }
    return environment.get_template(f"{template}.sbatch.j2").render(values)


def _quoted(value: object) -> str:
    """One word of bash."""
    return shlex.quote(str(value))


def _sbatch(value: object) -> str:
    """Return a value on an #SBATCH line, quoted for sbatch, whose rules differ from bash's. Raises ConfigError."""
    text = str(value)
    if not text.isprintable():
        raise ConfigError(f"{text!r} cannot be told to sbatch: it has a line break or another invisible character")
    if _PLAIN.fullmatch(text):
        return text
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'"{escaped}"'


def _option(text: str) -> str:
    """Return an option as typed: --name or --name=value."""
    name, is_, value = text.partition("=")
    return f"{_sbatch(name)}={_sbatch(value)}" if is_ else _sbatch(name)
