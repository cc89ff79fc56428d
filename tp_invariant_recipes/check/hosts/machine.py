# SPDX-License-Identifier: Apache-2.0
"""Checks, before anything is written, that this machine has what a run needs."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tp_invariant_recipes.check.hosts import inputs
from tp_invariant_recipes.check.hosts.inputs import Reading
from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.files import free_bytes, no_inodes, shortage
from tp_invariant_recipes.ledger.digests import MANY
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import environment, run_config
from tp_invariant_recipes.settings.field_table import SERVICES
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing import available_memory
from tp_invariant_recipes.sizing.size import parameters
from tp_invariant_recipes.start import needed
from tp_invariant_recipes.text import plural

_FLA = "flash-linear-attention"  # tpi installs it nowhere
_FUSED = "model.gradient_accumulation_fusion"

# What a run writes besides checkpoints and sample indices: configuration, logs, ledger.
SMALL_FILES = 8 * 2**20

# A digest in the ledger, and how many tensors of a model have two at every step: gradient and weight.
DIGEST_BYTES = 36
TENSORS_OF_LAYER, TENSORS_OF_EXPERT = 8, 2

# Megatron's mock dataset indexes all its tokens, 100,000 documents of up to 4096. A sample has three 4-byte numbers:
# the document that it begins in, the offset there, and its place in a shuffled order.
MOCK_TOKENS = 100_000 * 4096 // 2
INDEX_BYTES_PER_SAMPLE = 12

# A checkpoint holds each parameter in the training dtype and three fp32 copies: master weight, both moments.
CHECKPOINT_BYTES_PER_PARAMETER = 2 + 3 * 4


@dataclass(frozen=True)
class PendingRun(Reading):
    """A run that is about to start.

    run_dir: whose disk must do, wherever ranks will run; None: it writes none, as a score.
    """

    run_dir: RunDir | None = None


def check_start(start: PendingRun) -> list[Problem]:
    """Everything that this machine lacks, before anything is written."""
    return broken_rules(start, RULES)


def _flash(config: RunConfig) -> list[Problem]:
    variables = {**config.cluster.environment, **os.environ}
    return environment.flash_problems(config.device.kind, config.numerics.invariant, variables)


def _optimizer(config: RunConfig) -> Problem | None:
    name, package = config.section("optimizer").get("optimizer", "adam"), "emerging-optimizers"
    if name in ("adam", "sgd") or installed(package) is not None:
        return None
    how = f"make, or pip install {package} in a container (tpi doctor)"
    return Problem("", f"optimizer.optimizer={name} needs {package}, which is not installed: {how}")


def _logging(config: RunConfig) -> Problem | None:
    service = SERVICES.get(config.logging.kind)
    if service is None or needed.there(service.module):
        return None
    package = f"logging={config.logging.kind} needs {needed.DISTRIBUTIONS[service.module]}"
    how = f"pip install 'tp-invariant-recipes[{service.extra}]' (docs/logging.md)"
    return Problem("", f"{package}, which is not installed here: {how}")


def _fused_gradients(config: RunConfig) -> bool:
    return bool(config.at(_FUSED)) and (config.numerics.invariant or config.device.kind == "cpu")


def _gpus(config: RunConfig) -> Iterator[Problem]:
    cluster, at = config.cluster, config.layout
    if config.device.kind == "cpu":
        if cluster.gpus_per_node:
            yield Problem("", f"cluster={cluster.name} is of GPU nodes and device=cpu")
        return
    visible = gpus.visible()
    degrees = f"tp={at.tp} * pp={at.pp} * cp={at.cp} * dp={at.dp} = {at.world} ranks"
    ranks = at.world
    if config.launcher.kind == "slurm":
        allocated = run_config.allocation_of(config)
        ranks, degrees = allocated.ranks, f"{degrees} on {plural(allocated.nodes, 'node')}, {allocated.ranks} on each"
    if not visible:
        yield Problem("", "device=gpu, but this machine shows no GPU", "device=cpu runs the toy models (tpi doctor)")
    elif ranks > len(visible):
        yield Problem("", f"{degrees}, but this machine has {plural(len(visible), 'GPU')}", "lower one of them")
    absent, how = "which is not installed", "make gpu (tpi doctor)"
    if installed("transformer-engine") is None:
        yield Problem("", f"device=gpu needs Transformer Engine, {absent}: {how}")
    if config.shape.pattern and installed("mamba-ssm") is None:
        yield Problem("", f"this model's Mamba layers need mamba-ssm, {absent}: {how}")
    if families.delta_sizes(config.model) and not config.numerics.invariant and installed(_FLA) is None:
        text = f"stock's gated delta nets need {_FLA}, {absent}: pip install {_FLA}"
        yield Problem("", text, "those of numerics=tree do not")
    wanted = cluster.compute_capability
    if wrong := {g.name for g in visible if wanted and list(g.capability) != list(wanted)}:
        yield Problem("", f"cluster={cluster.name} is of other GPUs than this machine's {', '.join(sorted(wrong))}")


def _interfaces(config: RunConfig) -> Iterator[Problem]:
    """Gloo takes a list of names; NCCL one of prefixes, of names behind "=", or of what to leave out behind "^"."""
    variables = {**config.cluster.environment, **os.environ}
    present = sorted(name for _, name in socket.if_nameindex())
    for variable in ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if config.device.kind == "gpu" else [])):
        value = variables.get(variable, "")
        names = [name.partition(":")[0] for name in value.removeprefix("=").split(",") if name]
        if variable.startswith("GLOO") or value.startswith("="):
            wrong = not {*names} <= {*present}
        else:
            wrong = bool(names) and value[0] != "^" and not any(name.startswith(tuple(names)) for name in present)
        if wrong:
            text = f"this machine has no such network interface, but {', '.join(present)}"
            yield Problem(f"{variable}={value}", text, f"unset {variable}, or name one of these")


def _loopback(config: RunConfig) -> Problem | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        text = f"ranks meet at 127.0.0.1, which no process of this machine reaches: {error.strerror or error}"
        return Problem("", text, "switch the interface lo on (ip link set lo up)")
    return None


def _ledger_bytes(config: RunConfig) -> int:
    """Return the approximate size of the digests of all steps."""
    every, state = config.ledger.digests, config.ledger.state_digests
    layers = config.shape.layers or len(config.shape.pattern)
    experts = layers * TENSORS_OF_EXPERT * config.shape.experts
    chosen = config.ledger.experts
    if experts and (chosen == "together" or (chosen == "auto" and experts >= MANY)):
        experts = layers * TENSORS_OF_EXPERT
    tensors = layers * TENSORS_OF_LAYER + experts
    if not every:
        return 0
    steps = config.train["train_iters"]
    kinds = 2 * (steps // every) + 4 * (steps // state if state else 0)  # clipped gradients are with the three moments
    return DIGEST_BYTES * tensors * kinds


def _disk(start: PendingRun) -> Problem | None:
    config, run_dir = start.config, start.run_dir
    if run_dir is None:
        return None
    if no_inodes(run_dir.path):
        return Problem("", shortage(run_dir.path), "remove files, or set run.dir=PATH on another disk")
    free, saves = free_bytes(run_dir.path), config.section("checkpoint")["save_interval"]
    samples = config.train["train_iters"] * config.train["global_batch_size"]  # that Megatron will index
    if config.data.kind == "mock":
        samples = MOCK_TOKENS // config.shape.sequence
    need = SMALL_FILES + INDEX_BYTES_PER_SAMPLE * samples + _ledger_bytes(config)
    if saves:
        need += CHECKPOINT_BYTES_PER_PARAMETER * parameters(config.shape)
    if free >= need:
        return None
    ways = ["free some", "set run.dir=PATH on another disk"]
    if _ledger_bytes(config) > SMALL_FILES:
        ways.append("record digests less often (ledger.digests=N ledger.state_digests=N)")
    if saves:
        ways.append("or save=0")
    sizes = f"{free / 2**20:.1f} MiB free and this run writes at least {need / 2**20:.0f} MiB"
    return Problem("", f"{Path(run_dir.path).absolute()} has {sizes}", ", ".join(ways))


DISK: Rule[PendingRun] = Rule(_disk)


def _memory(start: PendingRun) -> list[Problem]:
    return [Problem("", text) for text in available_memory.problems(start.config, here=start.here)]


def _torchruns(config: RunConfig) -> bool:
    """Whether this process is one that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


# About the machine that ranks run on.
_here = partial(Rule, of=lambda start: (start.config,), needs=lambda start: start.here)

LAYERS: tuple[Rule[PendingRun], ...] = (
    _here(_torchruns, "torchrun has started this process as a rank", "tpi.pretrain(tpi.recipe(…)) starts no other"),
    _here(_gpus),
    _here(_optimizer),
    _here(_fused_gradients, "only Megatron's own layers on a GPU fuse them", f"{_FUSED}=false",
        head=lambda start: f"{_FUSED}=true"),
    _here(_interfaces),
    _here(_loopback),
    _here(registry.problems),
    _here(_flash),
)  # fmt: skip
RULES: tuple[Rule[PendingRun], ...] = (
    *LAYERS, _here(_logging), Rule(_memory), *inputs.RULES, DISK,
)  # fmt: skip
