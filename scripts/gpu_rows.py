# SPDX-License-Identifier: Apache-2.0
"""The rows of `scripts/gpu`: `tpi` commands, what each shows, and how each should end."""

import itertools
import math
import re
from dataclasses import dataclass

ON_TWO_NODES = "cluster.ranks_per_node=1"
KILLED = -9
# What a rank of qwen3_8b tp=4 computes, without collectives.
SINGLE_RANK = (
    "qwen3_8b tp=1 cuda_graph=full numerics.virtual_shards=2 model.num_attention_heads=8 model.num_query_groups=2 "
    "model.ffn_hidden_size=3072 model.vocab_size=37984"
)
ALL = "stock,deterministic,tree"  # modes of a benchmark
# The control starts from the weights of `tree`.
WEIGHTS = "numerics=deterministic numerics.initial_weights=invariant numerics.virtual_shards=null"
# Small models wait for the host, so several share a GPU: a command takes so many shares of 19 GiB of each of its GPUs.
# Others take FULL, which is a GPU of 80 GB. The rows cut qwen3_30b_a3b to a few layers.
SHARE, FULL = 19 << 30, 4
SHARES = {"_toy": 1, "qwen3_0p6b": 2, "llama32_1b": 2, "qwen3_30b_a3b": 3, "olmoe_1b_7b": 3}
NEMOTRON = "nemotron3_nano model.hybrid_layer_pattern=MEMEM*EMEMEM*E numerics.virtual_shards=2"  # 13 of 52 layers
# Adam's moments in bf16, so that a whole model fits four GPUs of 80 GB.
SMALL_MOMENTS = (
    "optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=bfloat16 optimizer.exp_avg_sq_dtype=bfloat16"
)


@dataclass(frozen=True)
class Command:
    """words: after `tpi`; {} is the row's folder. status: how it should end (1: different; KILLED).

    kill_at: SIGKILL launcher and ranks when the ledger has that many steps.
    A command with ON_TWO_NODES runs in two network namespaces of this machine, each with half of the GPUs.
    """

    words: str
    status: int = 0
    kill_at: int | None = None

    @property
    def shareable(self) -> str:
        """The words for GPUs that others use: with peers' memory, a command that starts later would starve this one."""
        words = self.words.split()
        takes = words[0] in ("train", "verify", "score") and "numerics=deterministic" not in words
        return f"{self.words} device.peer_memory=never" if takes else self.words

    @property
    def gpus(self) -> int:
        """How many GPUs it computes on: the ranks of its largest layout; 0 for commands that compute nothing."""
        if self.words.split()[0] not in ("train", "verify", "bench", "audit", "score", "bisect", "export"):
            return 0
        degrees = dict(re.findall(r"(?:^|\s)(tp|dp|pp|cp)=([\d,]+)", self.words))
        return math.prod(max(map(int, degrees.get(name, "1").split(","))) for name in ("tp", "dp", "pp", "cp"))


@dataclass(frozen=True)
class Row:
    """gpus: needed. shows: what. stages: one after the other; the commands of a stage run side by side.

    alone: it measures time, so nothing else runs on the machine.
    """

    gpus: int
    shows: str
    stages: tuple[tuple[Command, ...], ...]
    alone: bool = False

    @property
    def commands(self) -> tuple[Command, ...]:
        """Those of all stages."""
        return tuple(itertools.chain(*self.stages))

    @property
    def shares(self) -> int:
        """How many shares of a GPU a command of this row takes."""
        if self.alone:
            return FULL
        return max(_shares(command.words) for command in self.commands)


def _shares(words: str) -> int:
    if words.startswith(("compare", "certify")) or "--resume" in words:
        return 1
    return next((shares for name, shares in SHARES.items() if name in words), FULL)


def verified(gpus: int, shows: str, model: str, degrees: str, more: str) -> Row:
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
    return Row(gpus, shows, (tuple(map(Command, trained + stock)), verdicts))


def same_ledger(gpus: int, shows: str, what: str, *layouts: str) -> Row:
    """The layouts' runs are compared with the first one's."""
    trained = tuple(Command(f"train {what} {layout} run.dir={{}}/{n}") for n, layout in enumerate(layouts))
    names = " ".join(f"{{}}/{n}" for n in range(len(layouts)))
    verdicts = (Command(f"compare {names}"), Command("certify {}/0 --out {}/certificate.tpicert"))
    return Row(gpus, shows, (trained, verdicts))


def resumed(gpus: int, shows: str, what: str, whole: str, killed: str, later: str) -> Row:
    """A run that SIGKILL ends continues in another layout, with the ledger of a whole run."""
    begun = (
        Command(f"train {what} {whole} run.dir={{}}/whole"),
        Command(f"train {what} {killed} run.dir={{}}/killed", KILLED, kill_at=12),
    )
    return Row(
        gpus,
        shows,
        (begun, (Command(f"train --resume {{}}/killed {later}"),), (Command("compare {}/whole {}/killed"),)),
    )


def measured(gpus: int, shows: str, *commands: str) -> Row:
    """Commands that have the machine for themselves, one after the other."""
    return Row(gpus, shows, tuple((Command(words),) for words in commands), alone=True)


def in_turn(gpus: int, shows: str, *commands: str) -> Row:
    """Commands that end with 0, one after the other."""
    return Row(gpus, shows, tuple((Command(words),) for words in commands))


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
        gpus,
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
        gpus,
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
    "published": verified(
        8,
        "the authors' TP 8, 100 steps, and the degrees that they could not run: one set of bits",
        "qwen3_8b",
        "2,4,8",
        "iters=100",
    ),
    "published-4": verified(4, "the same models on four GPUs", "qwen3_8b", "2,4", "iters=100"),
    "data-parallel": same_ledger(
        8,
        "one ledger however eight GPUs are shared out between tp and dp",
        "qwen3_8b gbs=8 iters=20 numerics.data_shards=4",
        "tp=8 dp=1",
        "tp=4 dp=2",
        "tp=2 dp=4",
    ),
    "resume-4": resumed(
        4,
        "a run that kill -9 ends on four GPUs continues on two, with the bits of a run on one",
        "qwen3_0p6b gbs=4 iters=20 save=5 numerics.data_shards=2",
        "tp=1",
        "tp=4",
        "tp=1 dp=2",
    ),
    "resume-experts-4": resumed(
        4,
        "the same with experts",
        "qwen3_moe_0p8b seq=512 gbs=4 iters=20 save=5 numerics.data_shards=4",
        "tp=1 ep=1",
        "dp=4 ep=4",
        "tp=2 dp=1 ep=2",
    ),
    "score-4": scored(4),
    "hybrid-4": same_ledger(
        4,
        "one ledger for a hybrid model: Mamba-2, attention and experts",
        "nemotron3_nano_0p1b gbs=4 iters=10 numerics.virtual_shards=2 numerics.data_shards=4",
        "dp=1",
        "dp=2 ep=2",
        "tp=2 dp=2 ep=4",
    ),
    "nemotron-4": same_ledger(
        4,
        "one ledger for 13 layers of Nemotron-3-Nano at full width",
        f"{NEMOTRON} gbs=4 iters=10 numerics.data_shards=4",
        "dp=4 ep=4",
        "tp=2 dp=2 ep=4",
    ),
    "delta-nets-4": same_ledger(
        4,
        "one ledger for gated delta nets with experts",
        "qwen3_next_toy gbs=4 iters=10 numerics.data_shards=2",
        "tp=1",
        "tp=2 ep=2",
        "tp=2 dp=2 ep=4",
    ),
    "fp8-experts-4": same_ledger(
        4,
        "FP8 with experts at full width: one ledger",
        "qwen3_30b_a3b model.num_layers=4 gbs=4 iters=10 seq=2048 precision=fp8_tensorwise numerics.data_shards=4",
        "tp=2 ep=2",
        "tp=2 dp=2 ep=4",
        "dp=4 ep=4",
    ),
    "published-losses-4": published_losses(4),
    "experts-whole-4": same_ledger(
        4,
        "one ledger for a whole model with experts: OLMoE-1B-7B",
        "olmoe_1b_7b seq=2048 gbs=4 iters=10 numerics.data_shards=4",
        "dp=4 ep=4",
        "tp=4 ep=4",
    ),
    "latent-whole-4": same_ledger(
        4,
        "one ledger for a whole model with latent attention and experts: Moonlight-16B-A3B",
        f"moonlight_16b_a3b seq=2048 gbs=4 iters=5 numerics.data_shards=4 {SMALL_MOMENTS}",
        "dp=4 ep=4",
        "tp=4 ep=4",
    ),
    "experts-wide-4": same_ledger(
        4,
        "one ledger for six layers of Qwen3-30B-A3B",
        "qwen3_30b_a3b model.num_layers=6 seq=2048 gbs=4 iters=10 numerics.data_shards=2",
        "tp=2 ep=2",
        "tp=2 dp=2 ep=4",
    ),
    "layouts-4": same_ledger(
        4,
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
        4,
        "one ledger however four GPUs are shared out between tp and dp",
        "qwen3_8b gbs=8 iters=10 numerics.data_shards=2",
        "tp=4 dp=1",
        "tp=2 dp=2",
    ),
    "experts-4": same_ledger(
        4,
        "one ledger for experts over one to four GPUs",
        "qwen3_moe_0p8b seq=512 gbs=4 iters=10 numerics.data_shards=4",
        "tp=1 dp=1 ep=1",
        "tp=1 dp=2 ep=2",
        "tp=2 dp=2 ep=4",
        "tp=1 dp=4 ep=4",
    ),
    "fp8-layouts-4": same_ledger(
        4,
        "FP8 by blocks: one ledger for tp, dp, pp and cp",
        "qwen3_0p6b gbs=4 iters=10 precision=fp8_blockwise numerics.data_shards=2 numerics.context_shards=2",
        "tp=1",
        "tp=4",
        "pp=2",
        "tp=2 dp=2",
        "tp=2 cp=2",
    ),
    "portable-4": same_ledger(
        4,
        "numerics=portable has one set of bits; anyone can check the certificate on a CPU",
        "qwen3_0p6b numerics=portable seq=512 iters=10",
        "tp=1",
        "tp=2 cuda_graph=off",
        "tp=4",
    ),
    "peers-4": measured(
        4,
        "sums through peers' memory have the bits of NCCL's",
        *(
            f"train {PEERS} {layout} device.peer_memory={choice} run.dir={{}}/{n}-{choice}"
            for n, layout in enumerate(("tp=4 cuda_graph=full", "tp=4 cuda_graph=off", "tp=4 cuda_graph=te", "tp=2"))
            for choice in ("never", "auto", "always")
        ),
        f"compare {' '.join(f'{{}}/{n}-{choice}' for n in range(4) for choice in ('never', 'auto', 'always'))}",
    ),
    **{
        f"transport-{gpus}": measured(
            gpus,
            "one ledger by each of NCCL's algorithms and protocols, and over symmetric memory",
            *(f"train {PEERS} {MESSAGES} {layout} {way} run.dir={{}}/{n}" for n, way in enumerate(WAYS)),
            f"compare {' '.join(f'{{}}/{n}' for n in range(len(WAYS)))}",
        )
        for gpus, layout in ((2, "tp=2"), (4, "tp=2 dp=2"))
    },
    "portable-experts-4": same_ledger(
        4,
        "numerics=portable with experts in MXFP8",
        "qwen3_moe_0p8b numerics=portable precision=mxfp8 seq=96 gbs=2 iters=4 numerics.data_shards=2",
        "tp=1",
        "tp=2 dp=2 ep=4",
    ),
    "families-4": verified(4, "another family of models: one set of bits", "llama32_1b", "1,2,4", "iters=10"),
    "bench-4": measured(
        4,
        "what tree and portable cost at TP 4 with CUDA graphs",
        *(
            f"bench qwen3_8b tp=4 cuda_graph=full seq={seq} --modes stock,deterministic,tree,portable --dir {{}}/{seq}"
            for seq in (2048, 8192)
        ),
    ),
    "verify-time-4": measured(
        4, "how long verify takes (results.json): 75 s are asked", "verify qwen3_0p6b tp=1,2,4 iters=10 --dir {}/runs"
    ),
    "published-bench": measured(
        8,
        "what tree and digests cost at TP 8",
        "bench qwen3_8b tp=8 --modes stock,deterministic,tree,tree+digests --rounds 2 --steps 20 --dir {}/bench",
    ),
    "experts": same_ledger(
        8,
        "one ledger for experts over eight GPUs",
        "qwen3_30b_a3b gbs=4 iters=20 numerics.data_shards=4",
        "tp=2 dp=4 ep=8",
        "tp=4 dp=2 ep=8",
    ),
    "hybrid": in_turn(
        8,
        "a hybrid model trains at full size",
        "train nemotron3_nano tp=2 ep=8 dp=4 gbs=4 iters=10 numerics.virtual_shards=2 run.dir={}/0",
    ),
    "hybrid-bench": measured(
        8,
        "what a hybrid model at full size costs",
        "bench nemotron3_nano tp=2 ep=8 dp=4 gbs=4 numerics.virtual_shards=2 --rounds 2 --steps 10 --dir {}/bench",
    ),
    "graphs": in_turn(
        8,
        "replayed graphs of a hybrid model have the norms of eager steps",
        "audit nemotron3_nano tp=2 ep=8 dp=4 gbs=4 cuda_graph=te iters=5 --dir {}/audit",
    ),
    "layouts-2": same_ledger(
        2,
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
    "published-losses-2": published_losses(2),
    "resume-2": resumed(
        2,
        "a run that kill -9 ends on two GPUs continues on one, with the bits of a run in a third layout",
        "qwen3_0p6b gbs=4 iters=20 save=5 numerics.data_shards=2",
        "tp=2",
        "dp=2",
        "dp=1",
    ),
    "resume-experts-2": resumed(
        2,
        "the same with experts",
        "qwen3_moe_0p8b seq=512 gbs=4 iters=20 save=5 numerics.data_shards=2",
        "tp=2 ep=2",
        "dp=2 ep=2",
        "dp=1 ep=1",
    ),
    "score-2": scored(2),
    "fp8-experts-2": same_ledger(
        2,
        "FP8 with experts at full width: one ledger",
        "qwen3_30b_a3b model.num_layers=2 gbs=2 iters=8 seq=2048 precision=fp8_tensorwise numerics.data_shards=2",
        "tp=2 ep=2",
        "dp=2 ep=2",
    ),
    "fp8-layouts-2": same_ledger(
        2,
        "FP8 by blocks: one ledger for tp, dp, pp and cp",
        "qwen3_0p6b gbs=2 iters=10 precision=fp8_blockwise numerics.data_shards=2 numerics.context_shards=2",
        "tp=1",
        "tp=2",
        "dp=2",
        "pp=2",
        "cp=2",
    ),
    "delta-nets-2": same_ledger(
        2,
        "one ledger for gated delta nets with experts",
        "qwen3_next_toy gbs=2 iters=10 numerics.data_shards=2",
        "tp=1",
        "tp=2 ep=2",
        "dp=2 ep=2",
    ),
    "hybrid-2": same_ledger(
        2,
        "one ledger for a hybrid model: Mamba-2, attention and experts",
        "nemotron3_nano_0p1b gbs=2 iters=10 numerics.virtual_shards=2 numerics.data_shards=2",
        "dp=1",
        "tp=2 ep=2",
        "dp=2 ep=2",
    ),
    "nemotron-2": same_ledger(
        2,
        "one ledger for seven layers of Nemotron-3-Nano at full width",
        "nemotron3_nano model.hybrid_layer_pattern=MEMEM*E numerics.virtual_shards=2 gbs=2 iters=10 "
        "numerics.data_shards=2",
        "dp=2 ep=2",
        "tp=2 ep=2",
    ),
    "portable-experts-2": same_ledger(
        2,
        "numerics=portable with experts in MXFP8",
        "qwen3_moe_0p8b numerics=portable precision=mxfp8 seq=96 gbs=2 iters=4 numerics.data_shards=2",
        "tp=1",
        "tp=2 ep=2",
        "dp=2 ep=2",
    ),
    "bench-2": measured(
        2,
        "what tree costs at TP 2 with CUDA graphs",
        *(f"bench qwen3_8b tp=2 cuda_graph=full seq={seq} --dir {{}}/{seq}" for seq in (2048, 8192)),
    ),
    "fp8-2": Row(
        2,
        "FP8: one set of bits; stock FP8 differs",
        tuple(
            (Command(words, status),)
            for words, status in (
                ("verify qwen3_0p6b tp=1,2 iters=20 precision=fp8_tensorwise --dir {}/tree", 0),
                ("certify {}/tree/tp1 --out {}/certificate.tpicert", 0),
                (f"verify qwen3_0p6b tp=1,2 iters=10 precision=fp8_tensorwise {WEIGHTS} --dir {{}}/stock", 1),
            )
        ),
    ),
    # Sums over ranks of two machines: NCCL gets sockets alone.
    "two-nodes": same_ledger(
        2,
        "one ledger on two nodes (needs root and iproute2)",
        "qwen3_toy iters=10",
        "dp=2",
        f"dp=2 {ON_TWO_NODES}",
    ),
    "smoke-2": in_turn(
        2,
        "models with experts and hybrid ones train on two GPUs",
        "train qwen3_moe_0p8b iters=10 tp=2 run.dir={}/tp2",
        "train qwen3_moe_0p8b iters=10 dp=2 ep=2 gbs=2 run.dir={}/ep2",
        "train nemotron3_nano_0p1b iters=10 tp=2 run.dir={}/hybrid",
    ),
    "fp8-bench": measured(
        1,
        "what a step in FP8 takes, stock and tree, against bf16",
        *(
            f"bench {SINGLE_RANK} seq={seq} precision={name} --modes {ALL} --steps 8 --dir {{}}/{name}-{seq}"
            for seq in (8192, 2048)
            for name in ("fp8_tensorwise", "fp8_blockwise", "bf16")
        ),
    ),
    "bisect-time": Row(
        1,
        "how long bisect takes (results.json): 90 s are asked",
        (
            (Command("train qwen3_toy iters=5 save=2 run.dir={}/tree"),),
            (Command(f"train qwen3_toy iters=5 save=2 {WEIGHTS} run.dir={{}}/stock"),),
            (Command("bisect {}/tree {}/stock --dir {}/bisect", 1),),
        ),
        alone=True,
    ),
    "smoke": in_turn(
        1,
        "a small and a larger model train, repeat themselves and resume with the same bits",
        "train qwen3_toy iters=10 save=5 run.dir={}/toy",
        "train --resume {}/toy checkpoint.ckpt_step=5",
        "compare {}/toy/ledger.replaced-1.jsonl {}/toy/ledger.jsonl",
        "train qwen3_0p6b iters=10 run.dir={}/first",
        "train qwen3_0p6b iters=10 run.dir={}/second",
        "compare {}/first {}/second",
    ),
}
