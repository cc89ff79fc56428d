"""Checks, before anything is written, that this machine has what a run needs."""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tp_invariant_recipes.errors import refuse
from tp_invariant_recipes.host import gpus
from tp_invariant_recipes.host.versions import installed
from tp_invariant_recipes.launch import experiments, inputs, memory
from tp_invariant_recipes.ledger.digests import MANY
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.runs.run_dir import RunDir, free_bytes
from tp_invariant_recipes.settings import allocation, environment, layout
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing.size import parameters

_FLA = "flash-linear-attention"  # tpi installs it nowhere

# What a run writes besides checkpoints and sample indices: configuration, logs, ledger.
SMALL_FILES = 8 * 2**20

# A digest in the ledger, and how many tensors of a model have two at every step: gradient and weight.
DIGEST_BYTES = 36
TENSORS_OF_LAYER, TENSORS_OF_EXPERT = 8, 2

# Megatron's mock dataset indexes all its tokens, 100,000 documents of up to 4096, two 4-byte numbers a sample.
MOCK_TOKENS = 100_000 * 4096 // 2
INDEX_BYTES_PER_SAMPLE = 8

# A checkpoint holds each parameter in the training dtype and three fp32 copies: master weight, both moments.
CHECKPOINT_BYTES_PER_PARAMETER = 2 + 3 * 4


def check(config: RunConfig, run_dir: RunDir, *, here: bool = True, imported: bool = False) -> None:
    """Raises ConfigError listing everything this machine lacks.

    here: whether ranks will run on it; the disk of the run directory must do in any case.
    imported: as for `inputs.problems`.
    """
    files = inputs.problems(config, here=here, imported=imported)
    of_machine: Iterable[str] = ()
    if here:
        of_machine = (*machine_problems(config), *experiments.problems(config))
    problems = [*of_machine, *memory.problems(config, here=here), *files, *_disk(config, run_dir)]
    refuse(problems)


def machine_problems(config: RunConfig) -> list[str]:
    """What this machine lacks of what the layers of a run need."""
    variables = {**config.cluster.environment, **os.environ}
    flash = environment.flash_problems(config.device.kind, config.numerics.invariant, variables)
    return [*_gpus(config), *_optimizer(config), *_apex(config), *registry.problems(config), *flash]


def _optimizer(config: RunConfig) -> list[str]:
    name, package = config.section("optimizer").get("optimizer", "adam"), "emerging-optimizers"
    if name in ("adam", "sgd") or installed(package) is not None:
        return []
    how = f"make, or pip install {package} in a container (tpi doctor)"
    return [f"optimizer.optimizer={name} needs {package}, which is not installed: {how}"]


def _apex(config: RunConfig) -> list[str]:
    key = "model.gradient_accumulation_fusion"
    if not config.model.get("gradient_accumulation_fusion") or find_spec("fused_weight_gradient_mlp_cuda"):
        return []
    return [f"{key}=true: Megatron-Core's output layer needs Apex for it, which is on no registry; {key}=false"]


def _gpus(config: RunConfig) -> list[str]:
    cluster, at = config.cluster, layout.of(config)
    if config.device.kind == "cpu":
        return [f"cluster={cluster.name} is of GPU nodes and device=cpu"] if cluster.gpus_per_node else []
    found = gpus.visible()
    degrees = f"tp={at.tp} * pp={at.pp} * cp={at.cp} * dp={at.dp} = {at.world} ranks"
    ranks = at.world
    if config.launcher.kind == "slurm":
        allocated = allocation.of(config)
        ranks, degrees = allocated.ranks, f"{degrees} on {counted(allocated.nodes, 'node')}, {allocated.ranks} on each"
    problems = []
    if not found:
        problems.append("device=gpu, but this machine shows no GPU; device=cpu runs the toy models (tpi doctor)")
    elif ranks > len(found):
        problems.append(f"{degrees}, but this machine has {counted(len(found), 'GPU')}; lower one of them")
    if installed("transformer-engine") is None:
        problems.append("device=gpu needs Transformer Engine, which is not installed: make gpu (tpi doctor)")
    if config.model.get("hybrid_layer_pattern") and installed("mamba-ssm") is None:
        problems.append("this model's Mamba layers need mamba-ssm, which is not installed: make gpu (tpi doctor)")
    if families.delta_sizes(config.model) and not config.numerics.invariant and installed(_FLA) is None:
        problems.append(
            f"stock's gated delta nets need {_FLA}, which is not installed: pip install {_FLA}; those of numerics=tree "
            "do not"
        )
    wanted = cluster.compute_capability
    wrong = {g.name for g in found if wanted and list(g.capability) != list(wanted)}
    if wrong:
        problems.append(f"cluster={cluster.name} is of other GPUs than this machine's {', '.join(sorted(wrong))}")
    return problems


def _ledger_bytes(config: RunConfig) -> int:
    """The approximate size of the digests of all steps."""
    every, state, model = config.ledger.digests, config.ledger.state_digests, config.model
    layers = model.get("num_layers") or len(model.get("hybrid_layer_pattern") or "")
    experts = layers * TENSORS_OF_EXPERT * (model.get("num_moe_experts") or 0)
    chosen = config.ledger.experts
    if experts and (chosen == "together" or (chosen == "auto" and experts >= MANY)):
        experts = layers * TENSORS_OF_EXPERT
    tensors = layers * TENSORS_OF_LAYER + experts
    if not every:
        return 0
    steps = config.train["train_iters"]
    kinds = 2 * (steps // every) + 4 * (steps // state if state else 0)  # clipped gradients are with the three moments
    return DIGEST_BYTES * tensors * kinds


def _disk(config: RunConfig, run_dir: RunDir) -> list[str]:
    free = free_bytes(run_dir.path)
    samples = config.train["train_iters"] * config.train["global_batch_size"]  # that Megatron will index
    if config.data.kind == "mock":
        samples = MOCK_TOKENS // config.model["seq_length"]
    need = SMALL_FILES + INDEX_BYTES_PER_SAMPLE * samples + _ledger_bytes(config)
    if config.section("checkpoint")["save_interval"]:
        need += CHECKPOINT_BYTES_PER_PARAMETER * parameters(config.model)
    if free >= need:
        return []
    ways = ["free some", "set run.dir=PATH on another disk"]
    if _ledger_bytes(config) > SMALL_FILES:
        ways.append("record digests less often (ledger.digests=N ledger.state_digests=N)")
    if config.section("checkpoint")["save_interval"]:
        ways.append("or save=0")
    where = Path(run_dir.path).absolute()
    return [
        f"{where} has {free / 2**20:.1f} MiB free and this run writes at least {need / 2**20:.0f} MiB; "
        + ", ".join(ways)
    ]
