"""The shards of the invariant numerics: V of the model, D of the batch, C of a sequence, X of experts' gradients."""

import math
from dataclasses import replace

from tp_invariant_recipes.check.invariant import experts, fp8
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.cpu_host.vectors import VECTORS
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings import delta_net, expert_groups, layout
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
    return next((n for n in fewer if not (_splits_parts(config, n) or (on_cpu and _unfilled(config, n)))), shards)


def _unread(config: RunConfig) -> list[Problem]:
    """Return what stock numerics would ignore."""
    of_data, of_context = config.numerics.data_shards, config.numerics.context_shards
    problems = []
    if not config.numerics.adjust:
        problems.append(Problem("numerics.adjust=false", "numerics=stock adjusts nothing", "leave it out"))
    if of_data not in (None, config.parallel.data_parallel_size):
        problems.append(Problem(f"numerics.data_shards={of_data}", "numerics=stock has no data shards", "leave it out"))
    if config.numerics.expert_groups is not None:
        problems.append(Problem("numerics.expert_groups", "numerics=stock has no expert groups", "leave it out"))
    if of_context not in (None, config.layout.cp):
        problems.append(
            Problem(f"numerics.context_shards={of_context}", "numerics=stock has no context shards", "leave it out")
        )
    return problems


def _shards(config: RunConfig) -> list[Problem]:
    shards = config.numerics.virtual_shards
    if not isinstance(shards, int) or shards < 1 or shards & (shards - 1):
        return [Problem(f"numerics.virtual_shards={shards}", "must be a power of two")]
    sizes = {n: config.model[n] for n in SHARDED if config.model.get(n) is not None} | delta_net.sharded(config.model)
    totals = {f"model.{name}": size for name, size in sizes.items()}
    wrong = [f"{field}={total}" for field, total in totals.items() if total % shards]
    if wrong:
        common = math.gcd(*totals.values())
        return [
            Problem(
                "",
                f"numerics.virtual_shards={shards} does not divide {', '.join(wrong)}",
                f"the largest that fits is numerics.virtual_shards={common & -common}",
            )
        ]
    return []


def _ranks(config: RunConfig) -> list[Problem]:
    shards, tp = config.numerics.virtual_shards or 1, config.layout.tp
    if not isinstance(shards, int) or shards % tp == 0:
        return []
    return [
        Problem(
            "",
            f"tp={tp} does not divide numerics.virtual_shards={shards}",
            "raise numerics.virtual_shards or change tp",
        )
    ]


_EVALUATED = "validation.eval_global_batch_size"


def _data_shards(config: RunConfig) -> list[Problem]:
    """Return what is wrong with D and dp."""
    shards, dp = config.numerics.data_shards, config.parallel.data_parallel_size
    sequences = config.train.get("global_batch_size") or 0  # 0: a program of its own
    if dp & (dp - 1):
        return [Problem(f"dp={dp}", "the tree over data-parallel ranks needs a power of two", f"{_powers(sequences)}")]
    if shards is None:
        return []
    if not isinstance(shards, int) or shards < 1 or shards & (shards - 1):
        return [Problem(f"numerics.data_shards={shards}", "must be a power of two")]
    problems = []
    if shards % dp:
        problems.append(
            Problem(
                "", f"dp={dp} does not divide numerics.data_shards={shards}", "raise numerics.data_shards or lower dp"
            )
        )
    batches = {"gbs": sequences, _EVALUATED: config.section("validation").get("eval_global_batch_size") or 0}
    for name, size in batches.items():
        if size % shards:
            problems.append(
                Problem(
                    "",
                    f"numerics.data_shards={shards} does not divide {name}={size}",
                    f"the largest that fits is numerics.data_shards={size & -size}",
                )
            )
    return problems


def _context_shards(config: RunConfig) -> list[Problem]:
    """Return what is wrong with C and cp."""
    shards, cp = config.numerics.context_shards, config.layout.cp
    virtual, tp = config.numerics.virtual_shards or 1, config.layout.tp
    if shards is None:
        return (
            []
            if config.numerics.data_shards is None
            else [Problem("", "numerics.context_shards must be a number", "leave it out")]
        )
    if not isinstance(shards, int) or shards < 1 or shards & (shards - 1):
        return [Problem(f"numerics.context_shards={shards}", "must be a power of two")]
    if shards == cp == 1 or not isinstance(virtual, int) or virtual < 1:
        return []
    problems = []
    if shards % cp:
        problems.append(
            Problem(
                "",
                f"cp={cp} does not divide numerics.context_shards={shards}",
                "raise numerics.context_shards or lower cp",
            )
        )
    if cp & (cp - 1) == 0 and virtual % tp == 0 and virtual % (tp * cp):
        problems.append(
            Problem(
                "",
                f"tp={tp} * cp={cp} does not divide numerics.virtual_shards={virtual}, whose heads the ranks share",
                f"the largest that fits is cp={virtual // tp}",
            )
        )
    if _splits_parts(config, virtual):
        parts, length = max(2, virtual), config.shape.sequence
        largest = max(1, (length & -length) // parts)
        problems.append(
            Problem(
                "",
                f"numerics.context_shards={shards} of {parts} parts each do not divide seq={length}",
                f"the largest that fits is numerics.context_shards={largest}",
            )
        )
    return problems


def _splits_parts(config: RunConfig, virtual: int) -> bool:
    """Whether C context shards end within chunks: each is two, and V of the norms' gradients. virtual: V."""
    contexts = config.numerics.context_shards
    if not isinstance(contexts, int) or contexts < 2:
        return False
    return config.shape.sequence % (contexts * max(2, virtual)) != 0


def _expert_groups(config: RunConfig) -> list[Problem]:
    """Return what is wrong with X, where D and C are right."""
    if _data_shards(config) or _context_shards(config):
        return []
    key, groups = "numerics.expert_groups", expert_groups.groups(config)
    wanted = config.numerics.expert_groups
    if groups is None:
        return [] if wanted is None else [Problem(f"{key}={wanted}", "the model has no experts", "leave it out")]
    if wanted is None:
        return [] if config.numerics.data_shards is None else [Problem("", f"{key} must be a number", "leave it out")]
    most = groups.data * groups.contexts
    if not isinstance(wanted, int) or wanted < 1 or wanted & (wanted - 1):
        return [Problem(f"{key}={wanted}", "must be a power of two")]
    if wanted > most:
        return [
            Problem(f"{key}={wanted}", f"numerics.data_shards * numerics.context_shards are {most}", f"{key}={most}")
        ]
    least = replace(groups, groups=None).least
    if not groups.fits:
        more = f", or ep={max(groups.tp, groups.ep) * least // wanted}" if groups.places[1] == 1 else ""
        return [
            Problem(
                f"{key}={wanted}",
                f"at tp={groups.tp} cp={groups.cp} dp={groups.dp} ep={groups.ep} a run adds an expert's "
                f"gradient in {math.prod(groups.places)} places",
                f"{key}={least}{more}",
            )
        ]
    several = expert_groups.adds_several_times(config)
    if wanted < groups.data and several:
        return [
            Problem(
                f"{key}={wanted}",
                f"with {several} a backward pass adds to an expert's gradient several times",
                f"{key}={groups.data}, or {several}=false",
            )
        ]
    return []


def _powers(sequences: int) -> str:
    largest = sequences & -sequences
    return f"the largest that fits gbs={sequences} is dp={largest}" if sequences else "dp=1, 2, 4 …"


def _virtual_shards(config: RunConfig) -> list[Problem]:
    """Return what is wrong with V.

    The rules of the layout say that tp does not divide the model; a program has none.
    """
    if wrong := _shards(config):
        return wrong
    if wrong := _ranks(config):
        return [] if config.train and layout.splits_unevenly(config) else wrong
    return _ragged(config)


def _ragged(config: RunConfig) -> list[Problem]:
    """Return what a CPU rounds in another way at the end of a row that fills no whole vector, with the V that avoids
    it.
    """
    if config.device.kind != "cpu":
        return []
    shards, tp = config.numerics.virtual_shards or 1, config.layout.tp
    problems = _unfilled(config, shards)
    fewer = (1 << power for power in reversed(range(shards.bit_length() - 1)))
    fits = next((count for count in fewer if count % tp == 0 and not _unfilled(config, count)), None)
    if fits is None:
        return problems
    return [replace(problem, solve=f"numerics.virtual_shards={fits} fits") for problem in problems]


def _unfilled(config: RunConfig, shards: int) -> list[Problem]:
    width = VECTORS * shards
    problems = [
        Problem(f"model.{field}={config.model[field]}", f"on a CPU it must be a multiple of {width}")
        for field in ACTIVATED
        if (config.model.get(field) or 0) % width
    ]
    gated = delta_net.gated_numbers(config.model) // (shards * (config.numerics.context_shards or 1))
    if gated % VECTORS:
        problems.append(
            Problem(
                f"model.{delta_net.ATTENTION_GATE}=true",
                "on a CPU seq * model.num_attention_heads * model.kv_channels / numerics.virtual_shards "
                f"must be a multiple of {VECTORS}",
            )
        )
    if experts.routed(config, shards) % VECTORS:
        problems.append(
            Problem(
                f"numerics={config.numerics.mode}",
                "on a CPU seq / numerics.virtual_shards / numerics.context_shards * "
                f"model.num_moe_experts must be a multiple of {VECTORS}",
            )
        )
    return problems


RULES = (
    *(
        Rule(test, needs=lambda t: t.numerics.invariant, stock=True)
        for test in (_virtual_shards, _data_shards, _context_shards, _expert_groups)
    ),
    Rule(_unread, needs=lambda t: not t.numerics.invariant),
)
