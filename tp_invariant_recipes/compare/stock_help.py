"""Why two runs of stock numerics differ, whether that is rounding as far as their ledgers show, and what to do next."""

import math
import shlex

from tp_invariant_recipes.compare.compare import Comparison, Verdict
from tp_invariant_recipes.errors import TpiError
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.layouts import ranks, words
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.reading import checked, parse_json, read_limited

# Field of a step -> how far two layouts of bf16 that start from one state are apart at the first step, relatively.
ROUNDING = {"loss": 2.0**-9, "grad_norm": 2.0**-5}
_LARGEST = 1 << 24  # bytes of a run.json
# Overrides that say where and how long a run trained, and in which mode.
_NOT_OF_THE_MODEL = ("run.", "save", "iters", "name", "project", "numerics", "ledger.", "train.train_iters", "logging")


def stock_help(comparison: Comparison) -> tuple[str, ...]:
    """Sentences after "help:"; none unless both runs are stock and differ."""
    headers = comparison.a.header, comparison.b.header
    if comparison.verdict is not Verdict.DIFFERENT or any(h.numerics.get("mode") != mode.STOCK for h in headers):
        return ()
    layouts = [words(header.layout) for header in headers]
    if layouts[0] == layouts[1]:
        return ()
    where = " and ".join(layouts)
    sentences = [
        f"numerics=stock adds in another order in every layout ({where}), so other bits are no defect by themselves; "
        "numerics=tree has equal ones (docs/numerics.md)."
    ]
    drawn = weights_drawn(comparison)
    if drawn:
        sentences.append(drawn)
    elif (size := _size(comparison)) is not None:
        sentences.append(size)
    sentences.append(f"Whether a layout is wrong or only rounds otherwise: {_command(comparison)}")
    return tuple(sentences)


def weights_drawn(comparison: Comparison) -> str | None:
    """One sentence where two stock runs start from weights that Megatron draws for each layout; None: they do not."""
    headers = comparison.a.header, comparison.b.header
    if any(header.numerics.get("mode") != mode.STOCK for header in headers):
        return None
    drawn = all(header.numerics.get("initial_weights") == "megatron" for header in headers)
    if not comparison.initial and not (drawn and headers[0].layout != headers[1].layout):
        return None
    return (
        "Megatron draws initial weights per rank, so these are two models; numerics.initial_weights=invariant starts "
        "all of them from the same weights."
    )


def _size(comparison: Comparison) -> str | None:
    """How far loss and norm of the first common step are apart, and whether rounding does that."""
    pair = next(iter(zip(comparison.a.steps, comparison.b.steps, strict=False)), None)
    if pair is None or pair[0].step != 1:
        return None
    far = {name: _relative_distance(getattr(pair[0], name), getattr(pair[1], name)) for name in ROUNDING}
    known = {name: value for name, value in far.items() if value is not None}
    if not known:
        return None
    labels = {"loss": "loss", "grad_norm": "gradient norm"}
    named = " and ".join(f"{labels[name]} by {value:.1e}" for name, value in known.items())
    within = all(value <= ROUNDING[name] for name, value in known.items())
    verdict = "no more than rounding in bf16 does, as far as the ledgers show" if within else "more than rounding does"
    return f"At step 1 they differ relatively in {named}: {verdict}."


def _relative_distance(a: str | None, b: str | None) -> float | None:
    if a is None or b is None:
        return None
    in_a, in_b = bits_float(a), bits_float(b)
    return abs(in_a - in_b) / abs(in_a) if in_a and math.isfinite(in_a) and math.isfinite(in_b) else None


def _command(comparison: Comparison) -> str:
    """`tpi audit` of the run with more ranks."""
    run = max((comparison.a, comparison.b), key=lambda ledger: ranks(ledger.header.layout))
    described = _described(run)
    if described is None:
        return f"tpi audit MODEL {words(run.header.layout)}"
    own = [text for text in described.overrides if not text.lstrip("+~").startswith(_NOT_OF_THE_MODEL)]
    return shlex.join(["tpi", "audit", described.model, *own])


def _described(run: Ledger) -> RunFile | None:
    directory = run.run_directory
    if directory is None:
        return None
    try:
        return checked(RunFile, parse_json(read_limited(directory / "run.json", _LARGEST)))
    except (OSError, ValueError, TpiError):
        return None
