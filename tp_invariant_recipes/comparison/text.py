# SPDX-License-Identifier: Apache-2.0
"""A comparison in words."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tp_invariant_recipes.comparison.comparability import across_machines, other_gemms
from tp_invariant_recipes.comparison.compare import Comparison, Verdict
from tp_invariant_recipes.comparison.explanation import LABELS, is_packed, run_name
from tp_invariant_recipes.comparison.magnitude import DUMPED, magnitude_line
from tp_invariant_recipes.comparison.step_order import FIELD, FIELDS, INITIAL, parameter_of
from tp_invariant_recipes.comparison.tally import Coverage, ParameterDifference
from tp_invariant_recipes.ledger.reader import same_file
from tp_invariant_recipes.ledger.run_files import changes, spans_in_words
from tp_invariant_recipes.ledger.schema import DIGESTED, EVALUATED, FLOATS, SHARDS
from tp_invariant_recipes.numerics.mode import MEGATRONS, STOCK
from tp_invariant_recipes.text import abbreviated, plural

_OF_STATE = ("clipped", "moments")  # which only every `ledger.state_digests`th step has
_FIELDS_IN_LINE = 3  # the table below the line has the other fields
_NOT_SET = "not set"
# Kinds of first difference that a trace would narrow down, unless a trace found them.
_COARSE = (FIELD, *DIGESTED)


# Columns of the table of parameters -> the kinds of digest that they are about.
_COLUMNS = {"gradients": ("gradients", "clipped"), "moments": ("moments",), "weights": ("masters", "weights")}


@dataclass(frozen=True)
class ParameterRow:
    """A differing parameter: the number of differing steps, and the first of them (None: no step).

    gradient: of its gradient, before or after clipping. moments: in the optimizer. weight: master weight or weight.
    """

    name: str
    gradient: int | None
    moments: int | None
    weight: int | None
    steps: int


def verdict_line(comparison: Comparison) -> str:
    """Return the whole result in one line."""
    return f"{comparison.verdict.value}{_LINES[comparison.verdict](comparison)}"


def compared_values(comparison: Comparison) -> str:
    """Return what was compared, such as "loss, gradient norm and gradients and weights of 27 parameters"."""
    there = (field for field in FIELDS if field.is_float and comparison.tally.coverage[field.name].both)
    items = [f"{field.label}{_at(comparison, field.name)}" for field in there]
    kinds: dict[str, list[str]] = {}
    for kind in DIGESTED:
        count = len({parameter_of(kind, name) for name in comparison.tally.tensors.get(kind, ())})
        if count:
            kinds.setdefault(f"{plural(count, 'parameter')}{_at(comparison, kind)}", []).append(LABELS[kind])
    items += [f"{_series(labels)} of {count}" for count, labels in kinds.items()]
    items += [f"{LABELS[data]}{_at(comparison, data)}" for data in EVALUATED if comparison.tally.coverage[data].both]
    if comparison.tally.trace.compared:
        items.append(f"{plural(comparison.tally.trace.compared, 'tensor')} of the trace{_at(comparison, 'trace')}")
    return _series(items)


def remarks(comparison: Comparison) -> tuple[str, ...]:
    """Facts that a reader needs to judge the verdict, and the next step; one sentence each."""
    a, b = comparison.a, comparison.b
    sentences = [
        f"{run_name(ledger)}: the last line is torn; the run was killed, or is writing it now."
        for ledger in (a, b)
        if ledger.torn
    ]
    layouts = [(ledger, changes(ledger.header)) for ledger in (a, b)]
    sentences += [f"{run_name(ledger)}: {spans_in_words(changed)}." for ledger, changed in layouts if changed]
    if same_file(a.path, b.path):
        sentences.append("Both are the same file, so this proves nothing.")
    distance = magnitude_line(comparison)
    if comparison.first and distance:
        sentences.append(f"{comparison.first.name}: {distance}.")
    if comparison.unmatched and comparison.verdict is Verdict.DIFFERENT:
        sentences.append(f"Not compared: {_alone(comparison)}.")
    if comparison.verdict is not Verdict.NOT_COMPARABLE:
        sentences += [*machine_remark(comparison), *_later_replicas(comparison)]
        sentences += [*_undigested(comparison), *_partly_compared(comparison), *_untraced(comparison)]
        sentences += _next_command(comparison, dumped=distance is not None)
    return (*sentences, *stock_remark(comparison))


def stock_remark(comparison: Comparison) -> list[str]:
    """Say what Megatron's own numerics do not promise where two of its runs differ; nothing for other runs."""
    headers = comparison.a.header, comparison.b.header
    modes = {str(header.numerics.get("mode")) for header in headers}
    if comparison.verdict is not Verdict.DIFFERENT or not modes <= {*MEGATRONS}:
        return []
    named = " and ".join(f"numerics={name}" for name in sorted(modes))
    if headers[0].layout != headers[1].layout:
        return [f"help: {named} adds in another order in every layout; docs/audit.md tells rounding from a fault."]
    if STOCK not in modes:
        return []
    return ["help: numerics=stock need not repeat its bits, so this is no fault; numerics=deterministic repeats them."]


def machine_remark(comparison: Comparison) -> list[str]:
    """Why these two runs were not promised equal bits, or that they were although their machines differ."""
    a, b = comparison.a.header, comparison.b.header
    step = comparison.first.step if comparison.first else None
    remark = across_machines(a, b, comparison.verdict is Verdict.DIFFERENT) or other_gemms(a, b, step)
    return [remark] if remark else []


def _undigested(comparison: Comparison) -> list[str]:
    both = zip((comparison.a, comparison.b), comparison.tally.digested, strict=True)
    lacking = [run_name(ledger) for ledger, has in both if not has]
    if not lacking:
        return []
    who = "neither run has any" if len(lacking) == 2 else f"{lacking[0]} has no"
    return [f"Gradients and weights themselves are not compared: {who} digests (ledger.digests=1 records them)."]


def _partly_compared(comparison: Comparison) -> list[str]:
    """Return what both runs have at some common steps alone; for the state, `compared_values` names the rule."""
    covered: dict[Coverage, list[str]] = {}
    for kind in (*(DIGESTED if all(comparison.tally.digested) else ()), "trace", *EVALUATED):
        coverage = comparison.tally.coverage[kind]
        if kind in _OF_STATE:
            partial = not coverage.both
        else:
            partial = kind in DIGESTED and 0 < coverage.both < comparison.tally.compared
        if partial or coverage.only_a or coverage.only_b:
            label = f"{LABELS[kind]}es" if kind in EVALUATED else LABELS.get(kind, "traces")
            covered.setdefault(coverage, []).append(label)
    sentences = (f"{_series(labels)} are compared at {_both(comparison, at)}." for at, labels in covered.items())
    return [f"{sentence[0].upper()}{sentence[1:]}" for sentence in sentences]


def _untraced(comparison: Comparison) -> list[str]:
    trace, sentences = comparison.tally.trace, []
    for count, has, lacks in ((trace.only_a, comparison.a, comparison.b), (trace.only_b, comparison.b, comparison.a)):
        if count:
            tensors = f"{plural(count, 'traced tensor')} of {run_name(has)}"
            verb = "is" if count == 1 else "are"
            sentences.append(f"{tensors} {verb} not in the trace of {run_name(lacks)}: not compared.")
    if trace.undigested:
        tensors = plural(trace.undigested, "traced tensor")
        sentences.append(f"Not compared: {tensors} without a digest that two layouts share.")
    return sentences


def _both(comparison: Comparison, coverage: Coverage) -> str:
    """Such as "2 of 50 steps; a alone has them at 3, b alone at 1"."""
    alone = [
        f"{run_name(ledger)} alone has them at {count}"
        for ledger, count in ((comparison.a, coverage.only_a), (comparison.b, coverage.only_b))
        if count
    ]
    return "; ".join([f"{coverage.both} of {plural(comparison.tally.compared, 'step')}", *alone])


def _later_replicas(comparison: Comparison) -> list[str]:
    return [
        f"{run_name(ledger)}: ranks disagree at step {step}, which is not compared."
        for ledger, step in zip((comparison.a, comparison.b), comparison.tally.later, strict=True)
        if step is not None
    ]


def _next_command(comparison: Comparison, dumped: bool) -> list[str]:
    first, both = comparison.first, (comparison.a, comparison.b)
    directories = [ledger.run_directory for ledger in both]
    if first is None or first.step == 0 or first.phase == "data" or None in directories or is_packed(comparison.a):
        return []
    command = "tpi bisect " + shlex.join(map(str, directories))
    if first.kind in _COARSE and not comparison.tally.traced:
        return [f"To find the module and the operation: {command}"]
    if first.kind in DUMPED and not dumped:
        return [f"To see how far apart the values are: {command}"]
    return []


def parameter_rows(comparison: Comparison) -> tuple[ParameterRow, ...]:
    """Return the differing parameters, by first step, then in the order of execution."""
    differences: dict[str, dict[str, ParameterDifference]] = {}
    for difference in comparison.tally.parameters:
        differences.setdefault(difference.name, {})[difference.kind] = difference
    rows = []
    for name, kinds in differences.items():
        gradient, moments, weight = (
            min((kinds[kind].first_step for kind in column if kind in kinds), default=None)
            for column in _COLUMNS.values()
        )
        # Mostly those of all kinds are equal.
        spans = {span for difference in kinds.values() for span in difference.spans}
        rows.append(ParameterRow(name, gradient, moments, weight, len(set[int]().union(*spans))))
    return tuple(rows)


def parameter_line(comparison: Comparison) -> str | None:
    """Return the number of differing parameters, in one line. None: no parameter differs."""
    rows = parameter_rows(comparison)
    if not rows:
        return None
    listed = _listed_by_both(comparison)
    who = f"all {len(listed)}" if len(rows) == len(listed) else f"{len(rows)} of {len(listed)}"
    starts = {(row.gradient, row.moments, row.weight) for row in rows}
    if len(starts) > 1:
        return f"{who} parameters differ, the first at step {comparison.tally.parameters[0].first_step}"
    kinds = zip(_COLUMNS, next(iter(starts)), strict=True)
    return f"{who} parameters differ: " + ", ".join(f"{kind} from step {step}" for kind, step in kinds if step)


def parameters_alike(comparison: Comparison) -> bool:
    """Whether all parameters differ in the same way, so that a table of them would repeat `parameter_line`."""
    rows = parameter_rows(comparison)
    alike = len({(row.gradient, row.moments, row.weight, row.steps) for row in rows}) == 1
    return alike and len(rows) == len(_listed_by_both(comparison))


def _listed_by_both(comparison: Comparison) -> set[str]:
    in_a, in_b = ({p.name for p in ledger.header.parameters} for ledger in (comparison.a, comparison.b))
    return in_a & in_b


def header_rows(comparison: Comparison) -> tuple[tuple[str, str, str], ...]:
    """Name and both values of the differing header fields; those that make the runs incomparable come first."""
    differences = dict.fromkeys(comparison.refused + comparison.informed)  # the identity has some of the numerics' too
    return tuple((d.field, d.a or _NOT_SET, d.b or _NOT_SET) for d in differences)


def _identical(comparison: Comparison) -> str:
    compared, total = comparison.tally.compared, comparison.steps_total
    steps = plural(compared, "step") if compared == total else f"{compared} of {plural(total, 'step')}"
    skipped = f"; {comparison.tally.skipped} of them skipped by both" if comparison.tally.skipped else ""
    return f": {steps}, {compared_values(comparison)} equal bit for bit{skipped}{_ending(comparison)}"


def _different(comparison: Comparison) -> str:
    first = comparison.first
    assert first is not None  # the verdict "different" comes from a first difference
    where = f" at step {first.step}" if first.step else ""
    parts = [f"{where}: {first.explanation}"]
    if len(comparison.model) > 1:
        parts.append(f"{len(comparison.model) - 1} more such differences of the models")
    if first.kind == INITIAL and len(comparison.initial) > 1:
        parts[0] += f", and of {len(comparison.initial) - 1} more parameters"
    parts.append(
        f"{comparison.tally.differing} of {plural(comparison.tally.compared, 'step')} differ{_ending(comparison)}"
    )
    return "; ".join(parts)


def _not_comparable(comparison: Comparison) -> str:
    rows = [(d.field, d.a or _NOT_SET, d.b or _NOT_SET) for d in comparison.refused]
    if comparison.unmatched:
        return f": {_alone(comparison)}"
    if not rows:
        empty = " and ".join(run_name(run) for run in (comparison.a, comparison.b) if not run.steps)
        return f": no common step, none recorded in {empty}"
    text = ": " + abbreviated([f"{name} is {a} and {b}" for name, a, b in rows], _FIELDS_IN_LINE)
    numbers = [(name, max(int(a), int(b))) for name, a, b in rows if name in SHARDS and a.isdigit() and b.isdigit()]
    return text + "".join(f"; train both with {name}={most}" for name, most in numbers)


def _alone(comparison: Comparison) -> str:
    """Return what only one run has, such as "only runs/a has moments/exp_avg/PARAMETER, at step 10; and 17 more"."""
    first, *more = comparison.unmatched
    name = "digests of the initial weights" if first.name == INITIAL else LABELS.get(first.name, first.name)
    where = f", at step {first.step}" if first.step else ""
    return f"only {run_name(first.run)} has {name}{where}" + (f"; and {len(more)} more" if more else "")


_LINES = {Verdict.IDENTICAL: _identical, Verdict.DIFFERENT: _different, Verdict.NOT_COMPARABLE: _not_comparable}


def _ending(comparison: Comparison) -> str:
    if len(comparison.a.steps) == len(comparison.b.steps):
        return ""
    shorter = min(comparison.a, comparison.b, key=lambda ledger: len(ledger.steps))
    return f"; {run_name(shorter)} ends at step {len(shorter.steps)}"


def _at(comparison: Comparison, name: str) -> str:
    """Return the number of steps in words, unless it is all of them."""
    both, compared = comparison.tally.coverage[name].both, comparison.tally.compared
    if both == compared or (name in FLOATS and both == compared - comparison.tally.skipped):
        return ""
    return f" (at {both} of {plural(compared, 'step')})"


def _series(items: Sequence[str]) -> str:
    return " and ".join((", ".join(items[:-1]), items[-1])) if len(items) > 1 else items[0]
