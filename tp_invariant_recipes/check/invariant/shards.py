# SPDX-License-Identifier: Apache-2.0
"""The shards of the invariant numerics: V of the model, D of the batch, C of a sequence, X of experts' gradients."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeGuard

from tp_invariant_recipes.check.invariant import fp8
from tp_invariant_recipes.check.invariant import model as model_rules
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import delta_net, expert_groups, run_config
from tp_invariant_recipes.settings.run_config import RunConfig

# Numbers of the model that are split into V shards.
SHARDED = (
    *("num_attention_heads", "num_query_groups", "ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("mamba_num_heads", "mamba_num_groups", "vocab_size", "seq_length"),
)

# Those of SHARDED that an activation follows.
ACTIVATED = ("ffn_hidden_size", "moe_shared_expert_intermediate_size")

DEFAULT_SHARDS = 8

# What `default_shards` reads of a model.
SIZES = (*SHARDED, *fp8.SIZES, delta_net.ATTENTION_GATE)


def default_shards(config: RunConfig) -> int:
    """Return the default V: the largest power of two up to 8 that the model's sizes, the precision, C and the device
    allow.

    config: the sections device, mixed_precision, numerics without V, and model, of which it reads SIZES.
    """
    model, precision = config.model, config.mixed_precision
    sizes = [*map(model.get, SHARDED), *delta_net.sharded(model).values()]
    shards = math.gcd(DEFAULT_SHARDS, *(size for size in sizes if isinstance(size, int)))
    in_fp8 = "fp8" in precision if isinstance(precision, str) else bool((precision or {}).get("fp8"))
    shards = math.gcd(shards, fp8.most_shards(model, precision)) if in_fp8 else shards
    if not isinstance(model.get("seq_length"), int):  # a rule says so
        return shards
    on_cpu, fewer = config.device.kind == "cpu", (shards >> n for n in range(shards.bit_length()))
    return next((n for n in fewer if not (_splits_parts(config, n) or (on_cpu and any(_unfilled(config, n))))), shards)


def _unread(config: RunConfig) -> Iterator[Problem]:
    """Yield what Megatron's own numerics would ignore."""
    numerics, no = config.numerics, f"numerics={config.numerics.mode} has no"
    if not numerics.adjust:
        yield Problem("numerics.adjust=false", f"numerics={numerics.mode} adjusts nothing", "leave it out")
    if numerics.data_shards not in (None, config.parallel.data_parallel_size):
        yield Problem(f"numerics.data_shards={numerics.data_shards}", f"{no} data shards", "leave it out")
    if numerics.expert_groups is not None:
        yield Problem("numerics.expert_groups", f"{no} expert groups", "leave it out")
    if numerics.context_shards not in (None, config.layout.cp):
        yield Problem(f"numerics.context_shards={numerics.context_shards}", f"{no} context shards", "leave it out")


def _is_power(count: Any) -> TypeGuard[int]:
    return isinstance(count, int) and count > 0 and not count & (count - 1)


def _no_power(key: str, count: Any) -> Problem:
    return Problem(f"{key}={count}", "must be a power of two")


def _largest(size: int) -> int:
    """Return the largest power of two that divides a size."""
    return size & -size


def _virtual_shards(config: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with V.

    The rules of the layout say that tp does not divide the model; a program has none.
    """
    key, shards, tp = "numerics.virtual_shards", config.numerics.virtual_shards, config.layout.tp
    if not _is_power(shards):
        yield _no_power(key, shards)
        return
    sizes = {n: config.model[n] for n in SHARDED if config.model.get(n) is not None} | delta_net.sharded(config.model)
    wrong = [f"model.{name}={size}" for name, size in sizes.items() if size % shards]
    if wrong:
        fits = f"the largest that fits is {key}={_largest(math.gcd(*sizes.values()))}"
        yield Problem("", f"{key}={shards} does not divide {', '.join(wrong)}", fits)
    elif shards % tp == 0:
        yield from _ragged(config)
    elif not (config.train and run_config.splits_unevenly(config)):
        yield _too_few(tp, shards, sizes)


def _too_few(tp: int, shards: int, sizes: dict[str, int]) -> Problem:
    """Return why tp is not for these virtual shards, and what to change. sizes: of SHARDED, which V divides."""
    key, text = "numerics.virtual_shards", f"tp={tp} does not divide numerics.virtual_shards={shards}"
    if not _is_power(tp):
        fits = ", ".join(str(1 << n) for n in range(shards.bit_length()))
        return Problem("", f"{text}, a power of two", f"tp can be {fits}")
    if limits := [f"model.{name}" for name, size in sizes.items() if size % tp]:
        named = ", ".join(limits)
        return Problem("", f"{text}, and {named} allows no larger one", f"change {named}, or lower tp")
    return Problem("", text, f"raise {key} or lower tp")


def _data_shards(config: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with D and dp."""
    key, shards, dp = "numerics.data_shards", config.numerics.data_shards, config.parallel.data_parallel_size
    sequences = config.train.get("global_batch_size") or 0  # 0: a program of its own
    if not _is_power(dp):
        largest = f"the largest that fits gbs={sequences} is dp={_largest(sequences)}" if sequences else "dp=1, 2, 4 …"
        yield Problem(f"dp={dp}", "the tree over data-parallel ranks needs a power of two", largest)
        return
    if shards is None:
        return
    if not _is_power(shards):
        yield _no_power(key, shards)
        return
    if shards % dp:
        yield Problem("", f"dp={dp} does not divide {key}={shards}", f"raise {key} or lower dp")
    evaluated = "validation.eval_global_batch_size"
    for name, size in {"gbs": sequences, evaluated: config.at(evaluated) or 0}.items():
        if size % shards:
            fits = f"the largest that fits is {key}={_largest(size)}"
            yield Problem("", f"{key}={shards} does not divide {name}={size}", fits)


def _context_shards(config: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with C and cp."""
    key, shards, cp = "numerics.context_shards", config.numerics.context_shards, config.layout.cp
    virtual, tp = config.numerics.virtual_shards or 1, config.layout.tp
    if shards is None:
        if config.numerics.data_shards is not None:
            yield Problem("", f"{key} must be a number", "leave it out")
        return
    if not _is_power(shards):
        yield _no_power("cp" if shards == cp else key, shards)  # C follows cp where nobody has typed it
        return
    if shards == cp == 1 or not isinstance(virtual, int) or virtual < 1:
        return
    if shards % cp:
        yield Problem("", f"cp={cp} does not divide {key}={shards}", f"raise {key} or lower cp")
    if _is_power(cp) and virtual % tp == 0 and virtual % (tp * cp):
        text = f"tp={tp} * cp={cp} does not divide numerics.virtual_shards={virtual}, whose heads the ranks share"
        yield Problem("", text, f"the largest that fits is cp={virtual // tp}")
    if _splits_parts(config, virtual):
        parts, length = max(2, virtual), config.shape.sequence
        text = f"{key}={shards} of {parts} parts each do not divide seq={length}"
        yield Problem("", text, f"the largest that fits is {key}={max(1, _largest(length) // parts)}")


def _splits_parts(config: RunConfig, virtual: int) -> bool:
    """Whether C context shards end within chunks: each is two, and V of the norms' gradients. virtual: V."""
    contexts = config.numerics.context_shards
    if not isinstance(contexts, int) or contexts < 2:
        return False
    return config.shape.sequence % (contexts * max(2, virtual)) != 0


def _expert_groups(config: RunConfig) -> Problem | None:
    """Return what is wrong with X, where D and C are right."""
    if any((*_data_shards(config), *_context_shards(config))):
        return None
    key, groups, wanted = "numerics.expert_groups", expert_groups.groups(config), config.numerics.expert_groups
    if groups is None:
        return None if wanted is None else Problem(f"{key}={wanted}", "the model has no experts", "leave it out")
    if wanted is None:
        stated = config.numerics.data_shards is not None
        return Problem("", f"{key} must be a number", "leave it out") if stated else None
    most = groups.data * groups.contexts
    if not _is_power(wanted):
        return _no_power(key, wanted)
    if wanted > most:
        text = f"numerics.data_shards * numerics.context_shards are {most}"
        return Problem(f"{key}={wanted}", text, f"{key}={most}")
    least = replace(groups, groups=None).least
    if not groups.fits:
        more = f", or ep={max(groups.tp, groups.ep) * least // wanted}" if groups.places[1] == 1 else ""
        degrees = f"tp={groups.tp} cp={groups.cp} dp={groups.dp} ep={groups.ep}"
        text = f"at {degrees} a run adds an expert's gradient in {math.prod(groups.places)} places"
        return Problem(f"{key}={wanted}", text, f"{key}={least}{more}")
    several = expert_groups.adds_several_times(config)
    if wanted < groups.data and several:
        text = f"with {several} a backward pass adds to an expert's gradient several times"
        return Problem(f"{key}={wanted}", text, f"{key}={groups.data}, or {several}=false")
    return None


def _ragged(config: RunConfig) -> list[Problem]:
    """Return what a CPU rounds in another way at the end of a row that fills no whole vector, with the V that avoids
    it.
    """
    if config.device.kind != "cpu":
        return []
    shards, tp = config.numerics.virtual_shards or 1, config.layout.tp
    problems = [*_unfilled(config, shards)]
    fewer = (1 << power for power in reversed(range(shards.bit_length() - 1)))
    fits = next((count for count in fewer if count % tp == 0 and not any(_unfilled(config, count))), None)
    if fits is None:
        return problems
    return [replace(problem, solve=f"numerics.virtual_shards={fits} fits") for problem in problems]


def _unfilled(config: RunConfig, shards: int) -> Iterator[Problem]:
    width, must = VECTORS * shards, f"must be a multiple of {VECTORS}"
    for field in ACTIVATED:
        if (config.model.get(field) or 0) % width:
            yield Problem(f"model.{field}={config.model[field]}", f"on a CPU it must be a multiple of {width}")
    gated = delta_net.gated_numbers(config.model) // (shards * (config.numerics.context_shards or 1))
    if gated % VECTORS:
        numbers = "seq * model.num_attention_heads * model.kv_channels / numerics.virtual_shards"
        yield Problem(f"model.{delta_net.ATTENTION_GATE}=true", f"on a CPU {numbers} {must}")
    if model_rules.routed(config, shards) % VECTORS:
        numbers = "seq / numerics.virtual_shards / numerics.context_shards * model.num_moe_experts"
        yield Problem(f"numerics={config.numerics.mode}", f"on a CPU {numbers} {must}")


RULES: tuple[Rule[RunConfig], ...] = (
    *(
        Rule[RunConfig](test, needs=lambda t: t.numerics.invariant, stock=True)
        for test in (_virtual_shards, _data_shards, _context_shards, _expert_groups)
    ),
    Rule(_unread, needs=lambda t: not t.numerics.invariant),
)
