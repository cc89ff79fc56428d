# SPDX-License-Identifier: Apache-2.0
"""What comparisons say, case by case: verdict, first difference and remarks, as the files of sentences/ have them.

A case is a name and two ledgers. To change a sentence: `pytest --regen-all` on this file, then read the difference.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.comparison.ledgers import (
    BARE,
    EVERY_SECOND,
    FC1,
    FC2,
    HEADER,
    LOSS,
    NAMES,
    NONE,
    OTHER,
    PARAMETERS,
    A,
    evaluated,
    ledger,
    record,
    trace,
    value,
    with_other,
    with_trace,
)
from tests.unit.comparison.test_compare_state import STATES, ledger_with_state
from tests.unit.comparison.test_ledger_compare import HEADER as PLAIN
from tests.unit.comparison.test_ledger_compare import plain_ledger
from tp_invariant_recipes.comparison.compare import Comparison, compare
from tp_invariant_recipes.comparison.explanation import run_name
from tp_invariant_recipes.comparison.text import parameter_line, remarks, verdict_line
from tp_invariant_recipes.ledger.reader import Ledger

EXPECTED = Path(__file__).parent / "sentences"
Cases = Iterator[tuple[str, Ledger, Ledger]]


def content(comparison: Comparison) -> dict:
    """All that a comparison says, and what its first difference is."""
    first, coverage = comparison.first, comparison.tally.trace
    return {
        "verdict": f"{verdict_line(comparison)} (exit status {comparison.exit_status})",
        "steps": f"{comparison.tally.compared} compared, {comparison.tally.differing} differ, "
        f"{comparison.tally.skipped} skipped",
        "first": first
        and {"step": first.step, "phase": first.phase, "kind": first.kind, "name": first.name, "ulp": first.ulp}
        | {"inputs_matched": first.inputs_matched, "explanation": first.explanation},
        "parameters": parameter_line(comparison),
        "trace": [coverage.compared, coverage.only_a, coverage.only_b, coverage.undigested],
        "unmatched": [f"{item.name} of {run_name(item.run)}, step {item.step}" for item in comparison.unmatched[:3]],
        "informed": [item.field for item in comparison.informed],
        "remarks": list(remarks(comparison)),
    }


def numbers() -> Cases:
    a = plain_ledger()
    yield "equal", a, plain_ledger(name="b")
    for name, first, other in (
        ("the same NaN", "f32:7fc00001", "f32:7fc00001"),
        ("another NaN", "f32:7fc00001", "f32:7fc00002"),
        ("a quiet and a signalling NaN", "f32:7fc00001", "f32:7f800001"),
        ("zeros of both signs", "f32:00000000", "f32:80000000"),
        ("3 ULP", "f32:3f800000", "f32:3f800003"),
        ("of two widths", "f32:3f800000", "f64:3ff0000000000000"),
    ):
        yield name, plain_ledger(loss=first), plain_ledger(name="b", loss=other)
    gone = dict(loss=None, grad_norm=None, skipped=True)
    yield "a step that both skip", plain_ledger(**gone), plain_ledger(name="b", **gone)
    yield "a step that one skips", a, plain_ledger(name="b", **gone)
    for lengths in ((5, 3), (3, 5), (0, 5), (5, 0), (0, 0)):
        yield f"runs of {lengths[0]} and {lengths[1]} steps", plain_ledger(lengths[0]), plain_ledger(lengths[1], "b")
    yield "a difference after the last step of the other", plain_ledger(2), plain_ledger(5, "b", loss="f32:00000000")
    yield "a difference at the last step of the other", plain_ledger(3), plain_ledger(5, "b", loss="f32:00000000")
    for part in ("numerics", "layout", "versions", "device", "environment", "notes"):
        yield f"another {part}", a, plain_ledger(name="b", header=replace(PLAIN, **{part: {"k": "x"}}))
    for name in ("loss", "grad_norm"):
        # The schema asks for both; a kind of value that a later one adds may be missing.
        lacking = ledger("b")
        object.__setattr__(lacking.steps[2], name, None)
        yield f"{name} that one run lacks", A, lacking
    one, two = (replace(PLAIN, layout={"tp": tp}, numerics={"mode": "stock"}) for tp in (1, 2))
    for title, layout, loss in (
        ("other layouts", two, OTHER),
        ("one layout", one, OTHER),
        ("equal layouts", two, LOSS),
    ):
        yield f"stock in {title}", plain_ledger(header=one), plain_ledger(name="b", header=layout, loss=loss)


def digests() -> Cases:
    yield "equal", A, ledger()
    gradient, weight = with_other(3, gradients=f"{FC1}.weight"), with_other(3, weights=f"{FC1}.weight")
    yield "a gradient", A, ledger(**gradient)
    yield "a gradient of traced steps", ledger("a", traced=(2, 3)), ledger(traced=(2, 3), **gradient)
    for name in ("linear_proj.weight", "linear_qkv.layer_norm_weight"):
        changes = with_other(3, gradients=f"decoder.layers.1.self_attention.{name}")
        yield f"a gradient of {name}", ledger("a", traced=(3,)), ledger(traced=(3,), **changes)
    yield "a weight", A, ledger(**weight)
    yield "a weight of step 1", A, ledger(at=1, **with_other(1, weights=f"{FC1}.weight"))
    yield (
        "a weight after a step without",
        *(ledger(name, digested=lambda step: step != 2, **changes) for name, changes in (("a", {}), ("b", weight))),
    )
    yield "a weight without a gradient", ledger("a", gradients=None), ledger(gradients=None, **weight)
    yield "the norm", A, ledger(grad_norm="f32:3fa00001")
    yield "the norm of unknown gradients", A, ledger(grad_norm="f32:3fa00001", gradients=None)
    yield "the loss", A, ledger(loss="f32:40c80001")
    yield "the loss of a traced step", ledger("a", traced=(3,)), ledger(traced=(3,), loss="f32:40c80001")
    gone = dict(skipped=True, loss=None, grad_norm=None)
    yield "a step that one skips", A, ledger(**gone)
    yield "a step that both skip", ledger("a", **gone), ledger(**gone)
    every = tuple(replace(step, **gone) for step in A.steps)
    yield "only skipped steps", replace(A, steps=every), replace(ledger(), steps=every)
    yield "every second step", A, ledger(digested=lambda step: step % 2 == 0)
    yield (
        "never the same step",
        *(ledger(name, digested=lambda step, n=n: step % 2 == n) for n, name in enumerate("ab")),
    )
    yield (
        "a step that one did not record",
        *(
            ledger(name, digested=lambda step, n=n: step % 2 == 0 or n, **changes)
            for n, (name, changes) in enumerate((("a", {}), ("b", with_other(3, weights=NAMES[0]))))
        ),
    )
    for who in ("a", "b", "both"):
        pair = (ledger("a", BARE, digested=NONE) if who != "b" else A, ledger())
        yield f"no digests in {who}", pair[0], ledger("b", BARE, digested=NONE) if who != "a" else pair[1]
    frozen = replace(HEADER, parameters=tuple(replace(p, gradient=None) if "norm" in p.name else p for p in PARAMETERS))
    gradients = {p.name: value(p.name) for p in frozen.parameters if p.gradient}
    yield "frozen parameters", *(ledger(name, frozen, at=1, steps=1, gradients=gradients) for name in "ab")


def models() -> Cases:
    yield "another order", A, ledger(header=replace(HEADER, parameters=PARAMETERS[::-1]))
    for change in ({"shape": (16, 8)}, {"gradient": "bfloat16"}, {"gradient": None}, {"weight": "float32"}):
        parameters = tuple(replace(p, **change) if p.name == f"{FC2}.weight" else p for p in PARAMETERS)
        yield f"another {next(iter(change.items()))}", A, ledger(header=replace(HEADER, parameters=parameters))
    gradients = {name: digest for name, digest in record(3).gradients.items() if name != NAMES[-1]}
    fewer = ledger(header=replace(HEADER, parameters=PARAMETERS[:-1]), gradients=gradients)
    yield "a missing parameter", A, fewer
    yield "a missing parameter of the first run", fewer, A
    yield "several", A, ledger(header=replace(HEADER, parameters=PARAMETERS[3:]))
    unfinished = ledger(header=replace(HEADER, parameters=PARAMETERS[:-1]))
    yield "of a run without steps", ledger("a", steps=0), unfinished


def replicas() -> Cases:
    for kind in ("weights", "gradients"):
        changes = {"diverged": ((kind, f"{FC1}.weight", ((0, 2), (1,))),)}
        yield f"{kind} in a", ledger("a", **changes), ledger()
        yield f"{kind} in b", A, ledger(**changes)
        yield f"{kind} in both", ledger("a", **changes), ledger(**changes)
    embedding = {"diverged": (("gradients", "embedding.word_embeddings.weight", ((0,), (1,))),)}
    yield "after a gradient nearer to the loss", A, ledger(**embedding, **with_other(3, gradients=f"{FC1}.weight"))
    yield "before a weight", A, ledger(**embedding, **with_other(3, weights=NAMES[0]))
    traced = ledger(traced=(3,), diverged=(("forward", f"{FC1}/output", ((0,), (1,))),))
    yield "of a traced tensor", ledger("a", traced=(3,)), traced
    yield "of what neither run lists", A, ledger(diverged=(("weights", "unknown", ((0,), (1,))),))
    later = ledger(at=5, diverged=(("weights", NAMES[0], ((0,), (1,))),))
    yield "beyond the common steps", ledger("a", steps=3), later


TRACED = {"traced": (1, 2, 3)}
STARTED = replace(HEADER, initial={name: value("initial", name) for name in NAMES})
OUTPUT, NORM = f"forward/{FC2}/output", "decoder.layers.1.pre_mlp_layernorm"


def traces() -> Cases:
    a = ledger("a", **TRACED)
    for title, names in {
        "an output": (OUTPUT,),
        "an output of the backward pass": (f"backward/{FC2}/output",),
        "a module without weights": ("forward/decoder.layers.1.self_attention.core_attention/output",),
        "a tied output layer": ("forward/output_layer/output",),
        "a container": ("forward/decoder.layers.0/output",),
        "an input, and an output after it": (f"forward/{NORM}/input", f"forward/{FC1}/output"),
        "the first input of all": ("forward/embedding.word_embeddings/input",),
        "an output with its input": (f"forward/{FC2}/input", OUTPUT),
    }.items():
        yield title, a, ledger(**TRACED, **with_trace(3, *names))
    yield "step 1 without initial weights", a, ledger(**TRACED, at=1, **with_trace(1, OUTPUT))
    yield "step 1", ledger("a", STARTED, traced=(1,)), ledger("b", STARTED, traced=(1,), at=1, **with_trace(1, OUTPUT))
    never = dict(digested=lambda step: step != 2)
    yield "unknown weights", ledger("a", **TRACED, **never), ledger(**TRACED, **never, **with_trace(3, OUTPUT))
    yield "one run alone", ledger("a", traced=(2, 3)), ledger()
    yield "initial weights of one run alone", ledger("a", STARTED), ledger()
    yield "initial weights of a run without digests", ledger("a", STARTED), ledger("b", BARE, digested=NONE)


def entries() -> Cases:
    """Traces that have other entries, or the same in another way."""
    whole = trace(3)
    a = ledger("a", traced=(3,))

    def b(*entries, header=HEADER, **changes) -> Ledger:
        return ledger("b", header, traced=(3,), trace=entries, **changes)

    def changed(*names: str, **fields) -> tuple:
        return tuple(replace(entry, **fields) if entry.name in names else entry for entry in whole)

    core = "decoder.layers.0.self_attention.core_attention"
    place = next(n for n, entry in enumerate(whole) if entry.module == core) + 1
    second = [
        (*whole[:place], replace(whole[place - 1], tensor="input.1", digest=digest * 32), *whole[place:])
        for digest in "01"
    ]
    yield "a second input", replace(b(*second[0]), path=a.path), b(*second[1])
    turned = sorted(whole, key=lambda entry: entry.name == f"forward/{FC2}/input")
    both = ledger(traced=(3,), **with_trace(3, f"forward/{FC2}/input", OUTPUT))
    yield "an input listed after the output", replace(b(*turned), path=a.path), both
    unknown = tuple(replace(entry, digest="0" * 32) if entry.name == OUTPUT else entry
                    for entry in changed(f"forward/{FC2}/input", digest=None))  # fmt: skip
    yield "an input without a digest", a, b(*unknown)
    yield "another dtype, shape and digest", a, b(*changed(OUTPUT, dtype="float32", shape=(8, 2, 8), digest="0" * 32))
    yield "another dtype alone", a, b(*changed(OUTPUT, dtype="float32"))
    yield "another shape alone", a, b(*changed(OUTPUT, shape=(8, 1, 8)))
    fewer = b(*(entry for entry in whole if entry.name != f"backward/{FC2}/output"))
    renamed = b(*changed(f"backward/{FC2}/output", module="x"))
    for title, other in (("missing", fewer), ("renamed", renamed)):
        yield f"an entry is {title}", a, other
        yield f"an entry is {title} in the first run", replace(other, path=a.path), replace(a, path=other.path)
    yield "an entry is missing beside a difference", a, b(*fewer.steps[2].trace, loss="f32:40c80001")
    lacks = changed(OUTPUT, digest=None)
    yield "a digest is missing", a, b(*lacks)
    yield "a digest is missing in another layout", a, b(*lacks, header=replace(HEADER, layout={"tp": 2}))
    notes = {"resumed": [{"after_step": 1, "changed": {"layout.tp": 2}}]}
    yield "a digest is missing in a layout that changed", a, b(*lacks, header=replace(HEADER, notes=notes))
    without = [entry for entry in whole if entry.module != FC2]
    yield "other modules", a, b(*without, header=replace(HEADER, device={"name": "GPU"}))
    last = [replace(entry, digest="0" * 32) if entry.module == "output_layer" else entry for entry in without]
    yield "a difference in what both have", a, b(*last)
    calls = [entry for entry in whole if entry.module == FC2]
    twice = (*whole, *calls)
    other = (*twice[:-1], replace(twice[-1], digest="0" * 32))
    yield "a second call", replace(b(*twice), path=a.path), b(*other)
    named = (*twice, *(replace(entry, module=f"{FC2}#2") for entry in calls))
    other = (*whole, replace(calls[0], digest="0" * 32), *named[len(whole) + 1 :])
    yield "a second call beside a module of its name", replace(b(*named), path=a.path), b(*other)


def states() -> Cases:
    a, weight = ledger_with_state("a"), f"{FC1}.weight"
    yield "equal", a, ledger_with_state()
    yield "never", ledger_with_state("a", state=()), ledger_with_state(state=())
    yield "in one run alone", ledger_with_state("a", state=(2,)), ledger_with_state(state=())
    yield "never at the same step", ledger_with_state("a", state=(2,)), ledger_with_state(state=(3,))
    kinds = {"masters": (weight,), "moments": (f"step/{weight}",), "clipped": (weight,)}
    for kind, names in list(kinds.items()):
        yield kind, a, ledger_with_state(**{kind: names})
        yield f"{kind} and what is recorded before", a, ledger_with_state(**kinds)
        del kinds[kind]
    wrong = {"diverged": (("copies", weight, ((1, 3),)),)}
    yield "weights that do not follow", a, ledger_with_state(**wrong)
    yield "weights that do not follow in both", ledger_with_state("a", **wrong), ledger_with_state(**wrong)
    yield "a run without master weights", a, ledger_with_state(bare=True)
    parameters = a.header.parameters
    header = replace(a.header, parameters=(replace(parameters[0], master="bfloat16"), *parameters[1:]))
    yield "another dtype of master weights", a, replace(ledger_with_state(), header=header)
    every = {f"{state}/{name}" for state in STATES for name in NAMES}
    for title, names in {
        "no moments": set(),
        "moments of another name": every - {f"step/{weight}"} | {f"steps/{weight}"},
        "some moments": every - {f"exp_avg/{weight}", f"exp_avg/{NAMES[0]}"},
        "more moments": every | {f"exp_avg/{name}x" for name in NAMES[:3]},
    }.items():
        moments = {name: a.steps[4].moments.get(name, "f" * 32) for name in sorted(names)}
        b = ledger_with_state()
        b = replace(b, steps=(*b.steps[:4], replace(b.steps[4], moments=moments)))
        yield title, a, b
        yield f"{title} beside a difference", a, replace(b, steps=(replace(b.steps[0], loss=OTHER), *b.steps[1:]))
    for kind in ("moments", "clipped", "masters", "gradients"):
        steps = ledger_with_state().steps
        b = replace(ledger_with_state(), steps=(steps[0], replace(steps[1], **{kind: None}), *steps[2:]))
        yield f"a step without {kind}", a, b
        yield f"a step without {kind} in the first run", replace(b, path=a.path), ledger_with_state()


def evaluations() -> Cases:
    a = evaluated("a", EVERY_SECOND)
    yield "equal", a, evaluated("b", EVERY_SECOND)
    for step, name in ((4, "validation/8:16"), (5, "final_validation/16:24"), (5, "test/0:8")):
        yield name, a, evaluated("b", EVERY_SECOND | {step: EVERY_SECOND[step] | {name: OTHER}})
    other = evaluated("b", {2: {"validation/0:8": OTHER}})
    steps = tuple(replace(step, loss=OTHER) if step.step == 2 else step for step in other.steps)
    yield "after a loss of the same step", a, replace(other, steps=steps)
    yield "of other sequences", a, evaluated("b", {2: {"validation/0:8": LOSS}, 4: {"validation/16:24": OTHER}})


GROUPS = (numbers, digests, models, replicas, traces, entries, states, evaluations)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_a_comparison_says_what_is_expected(group, data_regression):
    sentences = {title: content(compare(a, b)) for title, a, b in group()}
    assert len(sentences) == sum(1 for _ in group())  # no title twice
    data_regression.check(sentences, fullpath=EXPECTED / f"{group.__name__}.yml")
