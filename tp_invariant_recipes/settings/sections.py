# SPDX-License-Identifier: Apache-2.0
"""Our own sections of the configuration, typed. Everything else in the tree is a field of Bridge's."""

from dataclasses import dataclass, field, fields
from typing import Literal

from tp_invariant_recipes.numerics.settings import NumericsSettings, PeerMemory


@dataclass(frozen=True)
class RunSettings:
    """Where the run is written, and when it is given up.

    hang_timeout: seconds without a heartbeat, whatever a rank does; auto: of a step it follows the run's own steps
                  (training/heartbeat.py); off: for ever.
    verify:       what of the checkpoint that a run goes on from is compared with its manifest: sizes alone, or hashes
                  too, for which every file is read.
    """

    dir: str | None = None
    hang_timeout: int | Literal["auto", "off"] = "auto"
    verify: Literal["hashes", "sizes"] = "hashes"


@dataclass(frozen=True)
class ParallelSettings:
    """The one degree of parallelism that Bridge derives instead of holding: data parallel."""

    data_parallel_size: int = 1


@dataclass(frozen=True)
class DataSettings:
    """What is trained on.

    kind: recipe: the indexed dataset that a recipe of Bridge's names; no option of the group.
    """

    kind: Literal["mock", "text", "recipe"] = "mock"
    path: str | None = None
    tokenizer: str | None = None
    json_key: str = "text"
    cache: str | None = None


@dataclass(frozen=True)
class WeightsSettings:
    """What the weights are before the first step (docs/weights.md).

    folder: a Hugging Face checkpoint: config.json and *.safetensors; None: new weights.
    """

    folder: str | None = None


@dataclass(frozen=True)
class DeviceSettings:
    """What computes: decides layers, collectives and how ranks are started.

    check_memory: whether a run whose estimated memory cannot fit is refused (docs/memory.md).
    peer_memory:  whether tensor- and data-parallel ranks of one host sum through symmetric memory, with the same
                  bits: auto: large operands, where a trial allows it; always: of any size, or an error; never: by NCCL.
    """

    kind: Literal["cpu", "gpu"] = "cpu"
    check_memory: bool = True
    peer_memory: PeerMemory = "auto"


@dataclass(frozen=True)
class LedgerSettings:
    """What a run records beside losses (docs/ledger.md).

    digests: every so many steps, digests of all gradients and master weights (of weights without one: themselves); 0:
             never, and none of moments.
    state_digests: every so many steps, digests of the optimizer's moments and of the gradients that it has read; 0:
             only at checkpoints and the last step, which have them in any case.
    experts: whether each expert's matrices have digests, or those of all experts of a layer together; auto: together
             from 4,096 matrices on.
    trace:   "FIRST:LAST" or "STEP", the steps of which every module's inputs and outputs have digests; None: none.
    dump:    tensors to write out at the traced steps, such as "gradients/output_layer.weight" or "weights/*".
    """

    digests: int = 1
    state_digests: int = 10
    experts: Literal["auto", "each", "together"] = "auto"
    trace: str | None = None
    dump: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GuardSettings:
    """What notices silent data corruption while a run trains (docs/guard.md). It changes no bit.

    kind:     products: samples of every step are computed again; shadow: beside them, data shards on another replica.
    every:    steps between two recomputations on another replica; without them, the steps before a fault whose
    checkpoints are not trusted.
    products: how many products of a step each rank samples.
    exclude:  whether a job is queued again without the node that has computed corrupted values.
    collectives: whether ranks compare digests of what they send and receive: of all messages, or of one in eight.
    """

    kind: Literal["off", "products", "shadow"] = "off"
    every: int = 100
    products: int = 4
    exclude: bool = False
    collectives: Literal["off", "sampled", "all"] = "sampled"


@dataclass(frozen=True)
class PatchesSettings:
    """Which fixes to installed packages a run goes without (docs/patches.md).

    off: their names, as `tpi doctor` lists them.
    """

    off: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ClusterSettings:
    """The nodes the run is for; `conf/cluster/NAME.yaml`, or a file of one's own (slurm/README.md).

    gpus_per_node:      None: whatever this machine has; 0: none.
    ranks_per_node:     None: one a GPU.
    architecture:       of the nodes' processors, as `uname -m` prints it; None: unknown.
    compute_capability: of the GPUs, such as (9, 0).
    gpu_memory:         GiB of a GPU, for checks where no GPU can be asked; None: unknown.
    gpu_type:           the word between "gpu" and the count, where SLURM wants one: --gres=gpu:h100:8.
    environment:        variables for the ranks; one that is set where the run starts wins. Never a secret.
    forward:            names of variables that must be set where a job is submitted, such as WANDB_API_KEY. Only the
                        names are written down; sbatch hands the values on.
    container:          an image: for pyxis the path of a .sqsh file or the name of an image, for Apptainer the path of
                        a .sif file or a folder, or a URI such as docker://NAME; None: no container.
    container_runtime:  what runs it: NVIDIA's pyxis, a part of srun, or the command apptainer on the nodes.
    mounts:             what the container sees: "SOURCE:TARGET" or "SOURCE:TARGET:ro".
    python:             the interpreter that runs `tpi` on the nodes (in the container); None: the one that submits.
    srun_options:       more of srun's options, as typed: ["--container-writable", "--mpi=pmix"].
    """

    name: str = "local"
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    architecture: Literal["x86_64", "aarch64"] | None = None
    compute_capability: tuple[int, int] | None = None
    gpu_memory: float | None = None
    gpu_type: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    forward: list[str] = field(default_factory=list)
    container: str | None = None
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: list[str] = field(default_factory=list)
    python: str | None = None
    srun_options: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SlurmSettings:
    """What a job asks SLURM for.

    time:        limit of one try, as sbatch takes it: "4:00:00", "2-00:00:00", or minutes.
    save_before: seconds before the time limit at which the run saves and asks to be queued again.
    tries:       how often in a row a job may start from the same step without reaching another checkpoint.
    rendezvous_timeout: seconds that nodes wait for each other.
    exclusive:   whole nodes, also where fewer ranks would do.
    options:     more of sbatch's options, as typed: ["--reservation=maintenance"].
    setup:       lines of bash that a job runs before anything else: ["module load cuda/13"]. A line that fails ends it.
    """

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    time: str | None = None
    save_before: int = 120
    tries: int = 3
    rendezvous_timeout: int = 600
    exclusive: bool = False
    options: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LauncherSettings:
    """Who starts the ranks: this process, or SLURM's srun on every node of an allocation."""

    kind: Literal["local", "slurm"] = "local"


@dataclass(frozen=True)
class LoggingSettings:
    """Where curves are drawn, beside the ledger and the logs.

    project: the project of wandb and Comet, the experiment of MLflow.
    name:    of the run there; None: the name of `run.dir`.
    """

    kind: Literal["none", "tensorboard", "wandb", "mlflow", "comet"] = "none"
    project: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class RecipeSettings:
    """The recipe that stands for a model, where `recipe=…` names one (docs/recipes.md).

    hf_folder: a folder with the config.json that stands for the Hugging Face model of the recipe; None: the cache of
               Hugging Face has it.
    name, source, kept, adjusted: tpi fills them in: what follows `recipe=`, the SHA-256 of the file that defines it,
               the fields with objects that are no text, for which each rank calls the recipe again, and a line for each
               field that `numerics.adjust` has set otherwise.
    """

    hf_folder: str | None = None
    name: str | None = None
    source: str | None = None
    kept: list[str] = field(default_factory=list)
    adjusted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OwnSections:
    """Our sections of a run's configuration."""

    run: RunSettings = field(init=False)
    numerics: NumericsSettings = field(init=False)
    parallel: ParallelSettings = field(init=False)
    data: DataSettings = field(init=False)
    weights: WeightsSettings = field(init=False)
    device: DeviceSettings = field(init=False)
    ledger: LedgerSettings = field(init=False)
    guard: GuardSettings = field(init=False)
    patches: PatchesSettings = field(init=False)
    cluster: ClusterSettings = field(init=False)
    slurm: SlurmSettings = field(init=False)
    launcher: LauncherSettings = field(init=False)
    logging: LoggingSettings = field(init=False)
    recipe: RecipeSettings = field(init=False)


OWN_SECTIONS: dict[str, type] = {
    section.name: section.type for section in fields(OwnSections) if isinstance(section.type, type)
}

# Keys of ours inside a section of Bridge's: path -> type.
OWN_KEYS: dict[str, type] = {"tokenizer.vocab_includes_eod": bool}
