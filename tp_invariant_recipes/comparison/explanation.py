# SPDX-License-Identifier: Apache-2.0
"""The first difference of two runs in words: the differing value, and whether the inputs of its computation matched."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tp_invariant_recipes import saved_names
from tp_invariant_recipes.comparison.step_order import (
    FIELDS,
    INITIAL,
    MODEL,
    REPLICAS,
    Field,
    ValueDifference,
    digest,
    is_float,
    tensors,
)
from tp_invariant_recipes.ledger.bits import readable, ulp_distance
from tp_invariant_recipes.ledger.digests import Traced
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.schema import EVALUATED, StepRecord
from tp_invariant_recipes.text import plural

_NORMS = (saved_names.ATTENTION, saved_names.DENSE, saved_names.LATENT_ATTENTION, saved_names.DELTA_NET)
# A module's name -> the different name of its parameters in checkpoints: norms, and a tied output layer, which has the
# embedding's weight.
SAVED_AS = (
    *((f".{module.removesuffix('.')}", f".{name}") for names in _NORMS for module, name in names.items()),
    ("output_layer", "embedding.word_embeddings."),
)


Pair = tuple[StepRecord, StepRecord]


@dataclass(frozen=True)
class Scene:
    """The place of the first difference. order: the parameters in forward order.

    records: both runs' of this step and the one before it; empty before the first step.
    """

    difference: ValueDifference
    step: int
    a: Ledger
    b: Ledger
    records: Mapping[int, Pair]
    order: Sequence[str]

    def pairs(self, kind: str, step: int | None = None) -> dict[str, tuple[str | None, str | None]]:
        """Return the digests of a step's tensors that both runs have, in the order of execution.

        step: None: the scene's step; 0: before the first step, when only weights and their master weights exist.
        """
        in_a, in_b = self.tensors(kind, self.step if step is None else step)
        return {name: (digest(in_a[name]), digest(in_b[name])) for name in in_a if name in in_b}

    def tensors(self, kind: str, step: int) -> tuple[Mapping[str, Traced | str], Mapping[str, Traced | str]]:
        """Name -> entry of the trace, or digest, of either run; step 0: as for `pairs`."""
        if step:
            record, other = self.records[step]
            return tensors(record, kind, self.order), tensors(other, kind, self.order)
        # Master weights are made of the initial weights.
        initial = (run.header.initial or {} for run in (self.a, self.b))
        in_a, in_b = ({f"{kind}/{name}": text for name, text in texts.items()} for texts in initial)
        return in_a, in_b

    def matched(self, kind: str, step: int | None = None) -> list[str]:
        """Names of the tensors with equal digests."""
        return [name for name, (a, b) in self.pairs(kind, step).items() if a is not None and a == b]

    def recorded(self, kind: str, step: int | None = None) -> bool:
        """Whether both runs have all digests of a kind, and at least one."""
        pairs = self.pairs(kind, step)
        return bool(pairs) and all(None not in pair for pair in pairs.values())


# Kind of digest -> its name for people.
LABELS = {
    "gradients": "gradients",
    "clipped": "clipped gradients",
    "moments": "optimizer moments",
    "masters": "master weights",
    "weights": "weights",
    **{data: f"{data.replace('_', ' ')} loss" for data in EVALUATED},
}

InputsMatch = tuple[bool | None, str]  # whether the inputs matched (None: unknown), and the clause of the explanation


def explain(scene: Scene) -> InputsMatch:
    """Explain a first difference, before which all matches or was not recorded."""
    difference = scene.difference
    return _EXPLAINED[difference.kind if difference.kind in _EXPLAINED else difference.name](scene)


def run_name(ledger: Ledger) -> str:
    """Return the name of a ledger for people: its run directory, or the file if that has another name."""
    return str(ledger.run_directory or ledger.path)


def is_packed(ledger: Ledger) -> bool:
    """Whether a row of the run is several sequences. It has no trace, which calls each module once."""
    return bool(ledger.header.identity.get("dataset.enable_offline_packing"))


def _model(scene: Scene) -> InputsMatch:
    name, a, b = scene.difference.name, scene.difference.a, scene.difference.b
    if a is None or b is None:
        has, lacks = (scene.a, scene.b) if b is None else (scene.b, scene.a)
        return None, f"{name} is in {run_name(has)} and not in {run_name(lacks)}"
    return None, f"{name} has {a} and {str(b).removeprefix('shape ')}"


def _replicas(scene: Scene) -> InputsMatch:
    """Get the inputs matched if those of the tensor itself did: replicas that disagreed before would be found first."""
    kind, _, name = scene.difference.name.partition("/")
    words = _of_runs(scene, f"ranks disagree on {LABELS.get(kind, kind)} {name}: ranks")
    listed = scene.difference.name in scene.pairs(kind)
    tensor = replace(scene, difference=replace(scene.difference, kind=kind))
    return _EXPLAINED[kind](tensor)[0] if listed else None, words


def _traced(scene: Scene) -> InputsMatch:
    direction, module, tensor = _split(scene.difference.name)
    start = f"{direction} of {module}: {tensor} differs{_other_shape(scene)}"
    if tensor.startswith("input"):
        return None, start + _since(scene, direction, module)
    inputs, why = _inputs(scene, direction, module)
    if inputs is not True:
        return inputs, f"{start}, {why}"
    weights = _own_weights(scene, module)
    matched = "its inputs and weights matched" if weights == "matched" else "its inputs matched"
    inside = f"{direction}/{module}."
    if any(name.startswith(inside) for name in scene.matched(direction)):
        matched += ", and so did what was traced inside it"
    return True, f"{start}, {matched}" + (f" ({weights})" if weights not in (None, "matched") else "")


def _split(name: str) -> tuple[str, str, str]:
    direction, _, rest = name.partition("/")
    module, _, tensor = rest.rpartition("/")
    return direction, module, tensor


def _other_shape(scene: Scene) -> str:
    direction = scene.difference.kind
    both = []
    for there in scene.tensors(direction, scene.step):
        entry = there[scene.difference.name]
        assert isinstance(entry, Traced)  # for a direction, `tensors` returns entries of the trace
        both.append(f"{entry.dtype} {list(entry.shape)}")
    return "" if both[0] == both[1] else f" ({both[0]} and {both[1]})"


def _since(scene: Scene, direction: str, module: str) -> str:
    """Get the tensor after which an input's difference must have arisen: the last one before it of another module."""
    names = list(scene.pairs(direction))
    matched = set(scene.matched(direction))
    before = [name for name in names[: names.index(scene.difference.name)] if name in matched]
    others = [name for name in before if _split(name)[1] != module]
    if not others:
        return ", and nothing was compared before it: the difference is in what enters the model"
    _, last, tensor = _split(others[-1])
    return f", all before it matched: the difference arises after {tensor} of {last}, outside traced modules"


def _inputs(scene: Scene, direction: str, module: str) -> InputsMatch:
    prefix = f"{direction}/{module}/input"
    pairs = [pair for name, pair in scene.pairs(direction).items() if name.startswith(prefix)]
    if not pairs:
        return None, "its inputs were not traced"
    if any(None not in (a, b) and a != b for a, b in pairs):
        return False, "and so do its inputs"
    if any(None in pair for pair in pairs):
        return None, "and not all its inputs have digests"
    return True, ""


def _own_weights(scene: Scene, module: str) -> str | None:
    """Return "matched", or the reason why that is unknown; None: the module has no weights."""
    module = module.partition(" #")[0]  # a later call has " #2"
    prefixes = [f"{module}.", *(module.removesuffix(end) + name for end, name in SAVED_AS if module.endswith(end))]
    own = {name for name in scene.order if name.startswith(tuple(prefixes))}
    if not own and scene.order:
        return None
    before = scene.step - 1
    known = {name.partition("/")[2] for kind in ("weights", "masters") for name in scene.matched(kind, before)}
    # Differing weights would themselves be the first difference.
    return "matched" if own and own <= known else f"{_weights_before(scene)} are not recorded by both"


def _weights_before(scene: Scene) -> str:
    return f"weights after step {scene.step - 1}" if scene.step > 1 else "initial weights"


def _gradient(scene: Scene) -> InputsMatch:
    name = scene.difference.name.partition("/")[2]
    start = f"gradient of {name} differs"
    matched = {direction: scene.matched(direction) for direction in ("forward", "backward")}
    traced = {_split(name)[1] for name in scene.pairs("forward")}
    for module in modules_of(name, traced):
        if all(f"{direction}/{module}/input" in names for direction, names in matched.items()):
            return True, f"{start}, the inputs of {module} and the gradient that arrives at it matched"
    count = sum(map(len, matched.values()))
    if count:
        return None, f"{start}, all {plural(count, 'tensor')} of the trace matched"
    return None, f"{start}, loss matched"


def modules_of(parameter: str, traced: Container[str]) -> list[str]:
    """Return the traced modules that may hold a parameter, the most likely first."""
    saved = [
        parameter[: parameter.index(name)] + end for end, name in SAVED_AS if name in parameter and name.startswith(".")
    ]
    return [module for module in (*saved, parameter.rpartition(".")[0]) if module in traced]


def _weight(scene: Scene) -> InputsMatch:
    kind, _, name = scene.difference.name.partition("/")
    start = f"{'master weight' if kind == 'masters' else 'weight'} of {name} differs after the step"
    if not _read(scene, name):
        return None, f"{start} (digests of its gradient are not recorded by both)"
    if scene.difference.name not in scene.matched(kind, scene.step - 1):
        return None, f"{start}, its gradient matched ({_weights_before(scene)} are not recorded by both)"
    moments = [moment for moment in scene.matched("moments") if moment.endswith(f"/{name}")]
    if moments:
        return True, f"{start}, its gradient, its moments and its value before matched: the update differs"
    return True, f"{start}, its gradient and its value before matched: the update or the optimizer's state differs"


def _read(scene: Scene, name: str) -> bool:
    """Whether the gradient of a parameter matched, as late as both runs recorded it."""
    kind = "clipped" if scene.recorded("clipped") else "gradients"
    return f"{kind}/{name}" in scene.matched(kind)


def _clipped(scene: Scene) -> InputsMatch:
    name = scene.difference.name.partition("/")[2]
    start = f"gradient of {name} differs as the optimizer reads it"
    if not scene.recorded("gradients"):
        return None, f"{start} (digests before clipping are not recorded by both)"
    return True, f"{start}, it matched before clipping, and so did the gradient norm"


def _moment(scene: Scene) -> InputsMatch:
    _, state, name = scene.difference.name.split("/", 2)
    start = f"{state} of {name} in the optimizer differs after the step"
    if not _read(scene, name):
        return None, f"{start} (digests of its gradient are not recorded by both)"
    if scene.step == 1 or scene.difference.name in scene.matched("moments", scene.step - 1):
        return True, f"{start}, its gradient and its value before matched: the update differs"
    return None, f"{start}, its gradient matched (moments after step {scene.step - 1} are not recorded by both)"


def _copies(scene: Scene) -> InputsMatch:
    name = scene.difference.name.partition("/")[2]
    return None, _of_runs(scene, f"weights of {name} are not its master weights rounded, on ranks")


def _of_runs(scene: Scene, what: str) -> str:
    """Return a clause for each run in which ranks differ, with these ranks."""
    both = ((scene.a, scene.difference.a), (scene.b, scene.difference.b))
    return "; ".join(f"{run_name(run)}: {what} {ranks}" for run, ranks in both if ranks is not None)


def _loss(scene: Scene) -> InputsMatch:
    names, matched = list(scene.pairs("forward")), scene.matched("forward")
    if not matched:
        return None, _values(scene)
    words = f"{_values(scene)}, all {len(matched)} traced tensors of the forward pass matched"
    return (True if names[-1] in matched else None), words


def _norm(scene: Scene) -> InputsMatch:
    if not scene.recorded("gradients"):
        return None, _values(scene)
    return True, f"{_values(scene)}, all {len(scene.pairs('gradients'))} gradients matched"


def _evaluation(scene: Scene) -> InputsMatch:
    weights = [LABELS[kind] for kind in ("masters", "weights") if scene.recorded(kind)]
    return (True, f"{_values(scene)}, all {weights[0]} matched") if weights else (None, _values(scene))


def _values(scene: Scene) -> str:
    """Such as "gradient norm (norm) f32:3fa00000 1.25 vs f32:3fa00001 1.2500001, 1 ULP"."""
    a, b, name, kind = scene.difference.a, scene.difference.b, scene.difference.name, scene.difference.kind
    bits = is_float(kind, name)
    field = next((field for field in FIELDS if field.name == name), Field(name, LABELS.get(kind, ""), name))
    label = field.label if field.label == field.phase else f"{field.label} ({field.phase})"
    words = f"{label} {shown(a, bits)} vs {shown(b, bits)}"
    ulp = ulp_distance(str(a), str(b)) if bits and a is not None and b is not None else None
    return words if ulp is None else f"{words}, {ulp} ULP"


def shown(value: Any, bits: bool) -> str:
    """Return a value of a record for people: bits with the number that they encode."""
    if value is None:
        return "none"
    return f"{value} {readable(value)}" if bits else str(value).lower()


# Kind of difference, or name of a field -> its explanation.
_EXPLAINED: dict[str, Callable[[Scene], InputsMatch]] = {
    MODEL: _model,
    INITIAL: lambda scene: (None, f"initial weight of {scene.difference.name} differs"),
    REPLICAS: _replicas,
    "forward": _traced,
    "backward": _traced,
    "gradients": _gradient,
    "clipped": _clipped,
    "moments": _moment,
    "masters": _weight,
    "copies": _copies,
    "weights": _weight,
    "loss": _loss,
    "grad_norm": _norm,
    **dict.fromkeys(("samples", "tokens", "skipped", "learning_rate"), lambda scene: (None, _values(scene))),
    **dict.fromkeys(EVALUATED, _evaluation),
}
