# SPDX-License-Identifier: Apache-2.0
"""The rows of `scripts/gpu`: `tpi` commands, what each shows, and how each should end."""

import itertools
import math
import re
from dataclasses import dataclass

KILLED = -9
# The control starts from the weights of `tree`.
WEIGHTS = "numerics=deterministic numerics.initial_weights=invariant numerics.virtual_shards=null"
NEMOTRON = "nemotron3_nano model.hybrid_layer_pattern=MEMEM*EMEMEM*E numerics.virtual_shards=2"  # 13 of 52 layers
# Adam's moments in bf16, so that a whole model fits four GPUs of 80 GB.
SMALL_MOMENTS = (
    "optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=bfloat16 optimizer.exp_avg_sq_dtype=bfloat16"
)


@dataclass(frozen=True)
class Command:
    """words: after `tpi`; {} is the row's folder. status: how it should end (1: different; KILLED).

    kill_at: SIGKILL launcher and ranks when the ledger has that many steps.
    """

    words: str
    status: int = 0
    kill_at: int | None = None

    @property
    def gpus(self) -> int:
        """How many GPUs it computes on: the ranks of its largest layout; 0 for commands that compute nothing."""
        if self.words.split()[0] not in ("train", "score", "export"):
            return 0
        degrees = dict(re.findall(r"(?:^|\s)(tp|dp|pp|cp)=([\d,]+)", self.words))
        return math.prod(max(map(int, degrees.get(name, "1").split(","))) for name in ("tp", "dp", "pp", "cp"))


@dataclass(frozen=True)
class Row:
    """shows: what. stages: one after the other; the commands of a stage run side by side."""

    shows: str
    stages: tuple[tuple[Command, ...], ...]

    @property
    def commands(self) -> tuple[Command, ...]:
        """Those of all stages."""
        return tuple(itertools.chain(*self.stages))

    @property
    def gpus(self) -> int:
        """How many it needs."""
        return max(command.gpus for command in self.commands)


def verified(shows: str, model: str, degrees: str, more: str) -> Row:
    """Identical for every degree of tp, with a certificate of the first; stock differs."""
    first, *_, last = every = degrees.split(",")
    trained = [f"train {model} tp={tp} {more} numerics=tree run.dir={{}}/tree-{tp}" for tp in every]
    stock = [f"train {model} tp={tp} iters=10 {WEIGHTS} run.dir={{}}/stock-{tp}" for tp in (first, last)]
    names = " ".join(f"{{}}/tree-{tp}" for tp in every)
    verdicts = (
        Command(f"compare {names}"),
        Command(f"compare {{}}/stock-{first} {{}}/stock-{last}", 1),
        Command(f"certify {{}}/tree-{first} --out {{}}/certificate.tpicert"),
    )
    return Row(shows, (tuple(map(Command, trained + stock)), verdicts))


def same_ledger(shows: str, what: str, *layouts: str) -> Row:
    """The layouts' runs are compared with the first one's."""
    trained = tuple(Command(f"train {what} {layout} run.dir={{}}/{n}") for n, layout in enumerate(layouts))
    names = " ".join(f"{{}}/{n}" for n in range(len(layouts)))
    verdicts = (Command(f"compare {names}"), Command("certify {}/0 --out {}/certificate.tpicert"))
    return Row(shows, (trained, verdicts))


def resumed(shows: str, what: str, whole: str, killed: str, later: str) -> Row:
    """A run that SIGKILL ends continues in another layout, with the ledger of a whole run."""
    begun = (
        Command(f"train {what} {whole} run.dir={{}}/whole"),
        Command(f"train {what} {killed} run.dir={{}}/killed", KILLED, kill_at=12),
    )
    return Row(
        shows,
        (begun, (Command(f"train --resume {{}}/killed {later}"),), (Command("compare {}/whole {}/killed"),)),
    )


def in_turn(shows: str, *commands: str) -> Row:
    """Commands that end with 0, one after the other."""
    return Row(shows, tuple((Command(words),) for words in commands))


# Settings of the published losses (docs/evidence.md), which start from weights drawn on the CPU.
AS_PUBLISHED = (
    "qwen3_0p6b seq=2048 dataset.split='1,1,1' tokenizer.vocab_size=32000 scheduler.lr_decay_iters=100 "
    "model.attention_backend=unfused"
)
PEERS = "qwen3_0p6b model.num_layers=8 seq=2048 gbs=2 iters=8 ledger.state_digests=1"
MESSAGES = "guard=products guard.collectives=all"
WAYS = (
    "device.peer_memory=always",
    *(
        f"device.peer_memory=never cluster.environment.{variable}"
        for variable in ("NCCL_ALGO=Ring", "NCCL_PROTO=Simple", "NCCL_PROTO=LL", "NCCL_PROTO=LL128")
    ),
)
DRAWN = "numerics=deterministic numerics.initial_weights=megatron model.use_cpu_initialization=true"

SCORE = "score {}/run {}/sequences.jsonl"


def published_losses(gpus: int) -> Row:
    """Both layouts and stock train from the weights that Megatron draws on the CPU."""
    trained = (("gather", 1, "1"), ("gather", gpus, str(gpus)), ("deterministic", 1, "stock"))
    return Row(
        "numerics=gather at the settings of the published losses (scripts/published-losses compares them)",
        (
            (Command(f"train {AS_PUBLISHED} {DRAWN} lr=0 optimizer.min_lr=0 iters=1 save=1 run.dir={{}}/drawn"),),
            (Command("export {}/drawn {}/weights"),),
            tuple(
                Command(
                    f"train {AS_PUBLISHED} numerics={mode} weights={{}}/weights iters=100 tp={tp} run.dir={{}}/{name}"
                )
                for mode, tp, name in trained
            ),
            (Command(f"compare {{}}/1 {{}}/{gpus}"),),
        ),
    )


def scored(gpus: int) -> Row:
    """Scores of a run at tp=1 and on all GPUs."""
    return Row(
        f"log-probabilities have the same bytes at tp=1 and tp={gpus}; stock's differ",
        (
            (Command("train qwen3_0p6b iters=2 save=2 run.dir={}/run"),),
            (Command(f"{SCORE} tp=1 --out {{}}/one.jsonl"),),
            (
                Command(f"{SCORE} tp={gpus} --out {{}}/all.jsonl --against {{}}/one.jsonl"),
                Command(f"{SCORE} tp={gpus} numerics=deterministic --out {{}}/stock.jsonl --against {{}}/one.jsonl", 1),
            ),
        ),
    )


ROWS = {
    "published-4": verified("Qwen3-8B over 100 steps: one set of bits", "qwen3_8b", "2,4", "iters=100"),
    "resume-4": resumed(
        "a run that kill -9 ends on four GPUs continues on two, with the bits of a run on one",
        "qwen3_0p6b gbs=4 iters=20 save=5 numerics.data_shards=2",
        "tp=1",
        "tp=4",
        "tp=1 dp=2",
    ),
    "resume-experts-4": resumed(
        "the same with experts",
        "qwen3_moe_0p8b seq=512 gbs=4 iters=20 save=5 numerics.data_shards=4",
        "tp=1 ep=1",
        "dp=4 ep=4",
        "tp=2 dp=1 ep=2",
    ),
    "score-4": scored(4),
    "hybrid-4": same_ledger(
        "one ledger for a hybrid model: Mamba-2, attention and experts",
        "nemotron3_nano_0p1b gbs=4 iters=10 numerics.virtual_shards=2 numerics.data_shards=4",
        "dp=1",
        "dp=2 ep=2",
        "tp=2 dp=2 ep=4",
    ),
    "nemotron-4": same_ledger(
        "one ledger for 13 layers of Nemotron-3-Nano at full width",
        f"{NEMOTRON} gbs=4 iters=10 numerics.data_shards=4",
        "dp=4 ep=4",
        "tp=2 dp=2 ep=4",
    ),
    "delta-nets-4": same_ledger(
        "one ledger for gated delta nets with experts",
        "qwen3_next_toy gbs=4 iters=10 numerics.data_shards=2",
        "tp=1",
        "tp=2 ep=2",
        "tp=2 dp=2 ep=4",
    ),
    "fp8-experts-4": same_ledger(
        "FP8 with experts at full width: one ledger",
        "qwen3_30b_a3b model.num_layers=4 gbs=4 iters=10 seq=2048 precision=fp8_tensorwise numerics.data_shards=4",
        "tp=2 ep=2",
        "tp=2 dp=2 ep=4",
        "dp=4 ep=4",
    ),
    "published-losses-4": published_losses(4),
    "experts-whole-4": same_ledger(
        "one ledger for a whole model with experts: OLMoE-1B-7B",
        "olmoe_1b_7b seq=2048 gbs=4 iters=10 numerics.data_shards=4",
        "dp=4 ep=4",
        "tp=4 ep=4",
    ),
    "latent-whole-4": same_ledger(
        "one ledger for a whole model with latent attention and experts: Moonlight-16B-A3B",
        f"moonlight_16b_a3b seq=2048 gbs=4 iters=5 numerics.data_shards=4 {SMALL_MOMENTS}",
        "dp=4 ep=4",
        "tp=4 ep=4",
    ),
    "experts-wide-4": same_ledger(
        "one ledger for six layers of Qwen3-30B-A3B",
        "qwen3_30b_a3b model.num_layers=6 seq=2048 gbs=4 iters=10 numerics.data_shards=2",
        "tp=2 ep=2",
        "tp=2 dp=2 ep=4",
    ),
    "layouts-4": same_ledger(
        "one ledger for tp, dp, pp and cp, with and without CUDA graphs",
        "qwen3_0p6b gbs=4 iters=10 numerics.data_shards=4 numerics.context_shards=2",
        "tp=1",
        "tp=1 cuda_graph=off",
        "cp=2",
        "tp=2 cuda_graph=full",
        "tp=4",
        "dp=4",
        "tp=2 dp=2",
        "tp=2 pp=2",
        "tp=2 cp=2",
    ),
    "data-parallel-4": same_ledger(
        "one ledger however four GPUs are shared out between tp and dp",
        "qwen3_8b gbs=8 iters=10 numerics.data_shards=2",
        "tp=4 dp=1",
        "tp=2 dp=2",
    ),
    "experts-4": same_ledger(
        "one ledger for experts over one to four GPUs",
        "qwen3_moe_0p8b seq=512 gbs=4 iters=10 numerics.data_shards=4",
        "tp=1 dp=1 ep=1",
        "tp=1 dp=2 ep=2",
        "tp=2 dp=2 ep=4",
        "tp=1 dp=4 ep=4",
    ),
    "fp8-layouts-4": same_ledger(
        "FP8 by blocks: one ledger for tp, dp, pp and cp",
        "qwen3_0p6b gbs=4 iters=10 precision=fp8_blockwise numerics.data_shards=2 numerics.context_shards=2",
        "tp=1",
        "tp=4",
        "pp=2",
        "tp=2 dp=2",
        "tp=2 cp=2",
    ),
    "portable-4": same_ledger(
        "numerics=portable has one set of bits; anyone can check the certificate on a CPU",
        "qwen3_0p6b numerics=portable seq=512 iters=10",
        "tp=1",
        "tp=2 cuda_graph=off",
        "tp=4",
    ),
    "peers-4": in_turn(
        "sums through peers' memory have the bits of NCCL's",
        *(
            f"train {PEERS} {layout} device.peer_memory={choice} run.dir={{}}/{n}-{choice}"
            for n, layout in enumerate(("tp=4 cuda_graph=full", "tp=4 cuda_graph=off", "tp=4 cuda_graph=te", "tp=2"))
            for choice in ("never", "auto", "always")
        ),
        f"compare {' '.join(f'{{}}/{n}-{choice}' for n in range(4) for choice in ('never', 'auto', 'always'))}",
    ),
    **{
        f"transport-{gpus}": in_turn(
            "one ledger by each of NCCL's algorithms and protocols, and over symmetric memory",
            *(f"train {PEERS} {MESSAGES} {layout} {way} run.dir={{}}/{n}" for n, way in enumerate(WAYS)),
            f"compare {' '.join(f'{{}}/{n}' for n in range(len(WAYS)))}",
        )
        for gpus, layout in ((2, "tp=2"), (4, "tp=2 dp=2"))
    },
    "portable-experts-4": same_ledger(
        "numerics=portable with experts in MXFP8",
        "qwen3_moe_0p8b numerics=portable precision=mxfp8 seq=96 gbs=2 iters=4 numerics.data_shards=2",
        "tp=1",
        "tp=2 dp=2 ep=4",
    ),
    "families-4": verified("another family of models: one set of bits", "llama32_1b", "1,2,4", "iters=10"),
    "layouts-2": same_ledger(
        "one ledger for tp, dp, pp and cp on two GPUs",
        "qwen3_0p6b gbs=4 iters=10 numerics.data_shards=2 numerics.context_shards=2",
        "tp=1 dp=1",
        "tp=2 dp=1",
        "tp=1 dp=2",
        "tp=1 pp=2",
        "cp=2",
        "tp=1 cuda_graph=off",
        "tp=2 cuda_graph=full",
    ),
    "resume-2": resumed(
        "a run that kill -9 ends on two GPUs continues on one, with the bits of a run in a third layout",
        "qwen3_0p6b gbs=4 iters=20 save=5 numerics.data_shards=2",
        "tp=2",
        "dp=2",
        "dp=1",
    ),
    "smoke": in_turn(
        "a small and a larger model train, repeat themselves and resume with the same bits",
        "train qwen3_toy iters=10 save=5 run.dir={}/toy",
        "train --resume {}/toy checkpoint.ckpt_step=5",
        "compare {}/toy/ledger.replaced-1.jsonl {}/toy/ledger.jsonl",
        "train qwen3_0p6b iters=10 run.dir={}/first",
        "train qwen3_0p6b iters=10 run.dir={}/second",
        "compare {}/first {}/second",
    ),
}
