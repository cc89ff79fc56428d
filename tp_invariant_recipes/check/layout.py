# SPDX-License-Identifier: Apache-2.0
"""The rules of a parallel layout: the ranks, the model and the batch must divide evenly.

Every degree is at least 1 when they are asked (check/typed.py).
"""

import math
import re
from collections.abc import Callable
from functools import partial

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.machine.gpus import PEERS
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.run_config import ACCOUNTED, SPLIT_BY_TP, UNEVEN, Layout, RunConfig, ranks_per_node

CHUNKS = "model.virtual_pipeline_model_parallel_size"
LARGEST_LISTED = 4096  # the largest degree that a message proposes


def _divides(
    name: str, degree: Callable[[Layout], int], *numbers: str
) -> Callable[[RunConfig, Layout], Problem | None]:
    """Return the rule that a degree divides each of these numbers of the model, if the model has them."""

    def rule(config: RunConfig, layout: Layout) -> Problem | None:
        totals = {f"model.{n}": config.model[n] for n in numbers if config.model.get(n) is not None}
        d = degree(layout)
        wrong = [f"{field}={total}" for field, total in totals.items() if total % d]
        if not wrong:
            return None
        common = math.gcd(*totals.values())
        fits = ", ".join(str(n) for n in range(1, min(common, LARGEST_LISTED) + 1) if common % n == 0)
        size = totals.get("model.vocab_size", 0)
        longer = f"; or model.vocab_size={-(-size // d) * d}" if wrong == [f"model.vocab_size={size}"] else ""
        return Problem("", f"{name}={d} does not divide {', '.join(wrong)}", f"{name} can be {fits}{longer}")

    rule.__name__ = f"{name}_divides"
    return rule


def _layers(config: RunConfig, layout: Layout) -> Problem | None:
    model, chunks = config.model, config.at(CHUNKS) or 1
    if stages := model.get("pipeline_model_parallel_layout"):
        # Megatron-Core would interleave the stages, after everything else has taken them for one a rank.
        return _stated_stages("pipeline_model_parallel_layout", stages, layout, chunks)
    ends = {key: model[key] for key in UNEVEN if model.get(key)}
    counted = [f"model.{key}" for key in ACCOUNTED if model.get(key)]
    if ends and counted:
        given, off = (", ".join(words) for words in ((f"model.{key}" for key in ends), (f"{c}=false" for c in counted)))
        return Problem(given, "Megatron counts no embedding or loss beside it", off)
    if ends and config.shape.layers:
        return _uneven(config.shape.layers, layout.pp, ends)
    if counted and config.shape.layers:
        total = config.shape.layers + len(counted)
        if total % layout.pp == 0:
            return None
        fits = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        why = f"model.num_layers={config.shape.layers} + {len(counted)} ({', '.join(counted)})"
        return Problem("", f"pp={layout.pp} does not divide {why}", f"pp can be {fits}")
    each = (config.shape.layers or 0) // layout.pp
    if config.shape.layers == each * layout.pp and each % chunks:
        return Problem(f"{CHUNKS}={chunks}", f"it does not divide the {each} layers of each stage", "change it")
    return _divides("pp", lambda at: at.pp, "num_layers")(config, layout)


def _uneven(layers: int, stages: int, ends: dict[str, int]) -> Problem | None:
    between, others = layers - sum(ends.values()), stages - len(ends)
    if others >= 0 and (between == 0 if others == 0 else between > 0 and between % others == 0):
        return None
    stated = " and ".join(f"model.{key}={count}" for key, count in ends.items())
    text = f"{stated} of model.num_layers={layers} leaves {between} layers for the other {others} of pp={stages} stages"
    solve = f"each of them needs the same number; change it, or {' '.join(f'model.{key}=null' for key in ends)}"
    return Problem("", text, solve)


def _sequence(config: RunConfig, layout: Layout) -> Problem | None:
    seq = config.shape.sequence
    per = layout.cp * (2 if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)
    if seq % per == 0:
        return None
    why = " * ".join(
        words for words, on in ((f"2 * cp={layout.cp}", layout.cp > 1), (f"tp={layout.tp} (sp=true)", layout.sp)) if on
    )
    return Problem("", f"seq={seq} is not a multiple of {why}", f"the next that is: seq={-(-seq // per) * per}")


def _sequence_parallel(config: RunConfig, layout: Layout) -> Problem | None:
    if layout.tp > 1 and not layout.sp and config.shape.experts:
        text = f"Megatron trains experts with tp={layout.tp} under sequence parallelism alone"
        return Problem("sp=false", text, "sp=true")
    return Problem("", "sp=true needs tp > 1", "leave sp out or set tp") if layout.sp and layout.tp == 1 else None


def _batch(config: RunConfig, layout: Layout) -> Problem | None:
    mbs, gbs = config.train["micro_batch_size"], config.train["global_batch_size"]
    step = mbs * layout.dp
    if gbs % step == 0:
        return None
    text = f"gbs={gbs} is not a multiple of mbs * dp = {mbs} * {layout.dp}"
    return Problem("", text, f"the next that is: gbs={-(-gbs // step) * step}")


def _experts(config: RunConfig, layout: Layout) -> Problem | None:
    experts = config.shape.experts
    if not experts:
        wrong = ", ".join(f"{name}={degree}" for name in ("ep", "etp") if (degree := layout.degrees[name]) > 1)
        return Problem(wrong, "this model has no experts") if wrong else None
    if experts % layout.ep:
        return Problem("", f"ep={layout.ep} does not divide model.num_moe_experts={experts}")
    group = layout.etp * layout.ep * layout.pp
    if layout.world % group == 0:
        return None
    text = f"etp * ep * pp = {group} does not divide the {layout.world} ranks (tp * pp * cp * dp)"
    return Problem("", text, f"raise dp or tp, or lower ep={layout.ep}")


def _pattern(config: RunConfig, layout: Layout) -> Problem | None:
    pattern = config.shape.pattern.partition("/")[0]
    if "|" in pattern:  # of more stages Megatron-Core builds the first ones alone
        return _stated_stages("hybrid_layer_pattern", pattern, layout, 1)
    if layout.pp == 1 or not pattern:
        return None
    text = f"pp={layout.pp} does not divide the {len(pattern)} layers of this model"
    return Problem("", text) if len(pattern) % layout.pp else None


def _stated_stages(field: str, stages: str | list[list[str]], layout: Layout, each: int) -> Problem | None:
    """Return why the stages that a field of the model lists are not `each` for every pipeline rank."""
    if isinstance(stages, str):
        for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # in the order of Megatron-Core: "Et|(tt|)*3L"
            stages = re.sub(repeated, lambda found: found[1] * int(found[2]), stages)
        stages = [[stage] for stage in stages.split("|")]
    count = len(stages)
    if count == layout.pp * each:
        return None
    interleaved = field != "hybrid_layer_pattern" and layout.pp > 1 and count > layout.pp and count % layout.pp == 0
    solve = f"{CHUNKS}={count // layout.pp}, or " if interleaved else ""
    text = f"it lists {count} stages, and each of pp={layout.pp} ranks has {each}"
    return Problem(f"model.{field}", text, f"{solve}change pp or the number of stages")


def _stages(config: RunConfig, layout: Layout) -> list[str]:
    """Return the stages of a hybrid model, as the letters of their layers; none where one has all or none is known."""
    pattern = config.shape.pattern.partition("/")[0]
    if layout.pp == 1 or not pattern or any(config.model.get(name) for name in UNEVEN):
        return []
    each = -(-len(pattern) // layout.pp)
    stages = pattern.split("|") if "|" in pattern else [pattern[n : n + each] for n in range(0, len(pattern), each)]
    stages[-1] += config.model.get("mtp_hybrid_override_pattern") or ""
    return stages


def _stages_without_experts(config: RunConfig, layout: Layout) -> Problem | None:
    """Megatron-Bridge's log of the experts' losses has another length on such a stage, and its ranks wait for ever."""
    pattern = config.shape.pattern.partition("/")[0]
    if not config.shape.experts or "E" not in pattern:
        return None
    without = next((stage for stage in _stages(config, layout) if "E" not in stage), None)
    text = f"a stage {without} has no experts, and Megatron-Bridge cannot log a step then"
    return None if without is None else Problem(f"pp={layout.pp}", text, "lower pp")


def _stages_without_adapters(config: RunConfig, layout: Layout) -> Problem | None:
    """Such a stage has no backward pass."""
    fields = finetuning.section(config)
    if fields is None:
        return None
    adapted = "".join(
        kinds for kinds, names in finetuning.OF_LAYERS.items() if {*names} & {*finetuning.targets(fields)}
    )
    without = next((stage for stage in _stages(config, layout) if not {*adapted} & {*stage}), None)
    if without is None or not adapted:
        return None
    solve = "lower pp, or name its layers in peft.target_modules"
    return Problem(f"pp={layout.pp}", f"a stage {without} has no adapter", solve)


def _context(config: RunConfig, layout: Layout) -> Problem | None:
    if layout.cp == 1 or config.device.kind == "gpu" or config.numerics.invariant:
        return None
    recurrent = [name for name in ("hybrid_layer_pattern", "linear_attention_freq") if config.model.get(name)]
    latent = ["multi_latent_attention"] if config.shape.latent else []
    if not (others := recurrent + latent):
        return None  # cpu_host/stand_ins/layers.py
    text = f"on a CPU stock context parallelism covers plain attention alone, not model.{others[0]}"
    return Problem(f"cp={layout.cp}", text, "device=gpu or numerics=tree")


def _interleaved(config: RunConfig, layout: Layout) -> Problem | None:
    chunks = config.at(CHUNKS)
    if not chunks or (chunks == 1 and layout.pp == 1):
        return None
    if config.shape.hybrid:
        text = "Megatron-Bridge interleaves no stages of a hybrid model"
        return Problem(f"{CHUNKS}={chunks}", text, f"{CHUNKS}=null")
    if chunks == 1:  # Megatron-Core takes any number for interleaved, Bridge gives one chunk no list of data
        return Problem(f"{CHUNKS}=1", "one virtual stage a rank is not interleaved", f"{CHUNKS}=null")
    if layout.pp == 1:
        return Problem(f"{CHUNKS}={chunks}", "interleaved stages need pp > 1")
    batches, overlaps = (config.model.get(f"{name}_p2p_comm") for name in ("batch", "overlap"))
    if batches and overlaps:
        both = "model.overlap_p2p_comm=true and model.batch_p2p_comm=true"
        return Problem("", f"{both}: messages that overlap are not in a batch")
    # Megatron's batch has "to the previous" before "to the next", and "from the previous" before "from the next". Gloo
    # and NCCL pair the messages of two ranks by their order. With two stages the next is also the previous: what goes
    # to the previous arrives as what comes from the previous, gradients as activations. Without batches Megatron sends
    # the two directions through different process groups.
    if layout.pp == 2 and batches:
        text = "in a batch two interleaved stages take each other's messages for their own"
        return Problem(f"{CHUNKS}={chunks}", text, "model.overlap_p2p_comm=true model.batch_p2p_comm=false, or pp > 2")
    count = config.train["global_batch_size"] // (config.train["micro_batch_size"] * layout.dp)
    if config.model.get("microbatch_group_size_per_vp_stage") is None and count % layout.pp:
        micro_batches = f"the {count} micro-batches (gbs / (mbs * dp)) that interleaved stages take in turns"
        return Problem(f"{CHUNKS}={chunks}", f"pp={layout.pp} does not divide {micro_batches}", "change gbs")
    return None


def _peer_memory(config: RunConfig, layout: Layout) -> Problem | None:
    """Return why `always` would be an error in a rank, or have no effect."""
    if config.device.peer_memory != "always":
        return None
    most = ranks_per_node(config) if config.launcher.kind == "slurm" else None
    reasons = (
        (config.device.kind == "cpu", "on a CPU Gloo moves all bytes"),
        (not config.numerics.invariant, f"numerics={config.numerics.mode} leaves sums to NCCL"),
        (layout.tp == 1, "tp=1 sums over one rank"),
        (layout.tp not in PEERS, f"tp={layout.tp} is not one of {', '.join(map(str, PEERS))}"),
        (most and layout.tp > most, f"tp={layout.tp} is more than the {most} ranks of a node"),
    )
    text = next((text for broken, text in reasons if broken), None)
    return Problem("device.peer_memory=always", text, "device.peer_memory=auto") if text else None


def _lr(config: RunConfig) -> Problem | None:
    lr, low = config.section("optimizer")["lr"], config.section("optimizer")["min_lr"] or 0.0
    if lr >= low >= 0:
        return None
    lower = f"optimizer.min_lr={lr}, or " if lr > 0 else ""
    return Problem("", f"lr={lr} is below optimizer.min_lr={low}", f"{lower}a higher lr")


_rule = partial(Rule, of=lambda t: (t, t.layout))

RULES: tuple[Rule[RunConfig], ...] = (
    *map(
        _rule,
        (
            _divides("tp", lambda at: at.tp, *SPLIT_BY_TP),
            _divides("etp", lambda at: at.etp, "moe_ffn_hidden_size"),
            _sequence_parallel,
            _sequence,
            _context,
            _interleaved,
            _layers,
            _pattern,
            _stages_without_experts,
            _stages_without_adapters,
            _experts,
            _batch,
            _peer_memory,
        ),
    ),
    Rule(_lr),
    Rule(lambda t: t.data.kind == "mock" and t.data.path, "data.path is set but data=mock ignores it", "add data=text"),
    Rule(lambda t: t.data.kind == "text" and not t.data.path, "data=text needs data.path=FILE_OR_FOLDER"),
)
