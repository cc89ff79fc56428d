# SPDX-License-Identifier: Apache-2.0
"""Compute a traced and dumped step of one module again, on a CPU, for `tpi check` and `tpi bisect --referee`.

The run has dumped the module's input, the gradient that arrives at its output, its weight before the step, and what it
made of them. numerics=portable states every bit of that, so a CPU can tell whether a GPU computed it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, override

from tp_invariant_recipes.comparison.compare import EXIT_STATUS, Verdict
from tp_invariant_recipes.errors import LedgerError, RunError, TpiError
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.ledger.dumps import Distance, Dumped
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import NumericsSettings
from tp_invariant_recipes.text import plural

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers.formats import Format

# Last parts of a module's name -> Megatron's name of how its weight is split, and the segments of its output features.
LINEAR = {
    "self_attention.linear_qkv": ("column", 1),
    "self_attention.linear_proj": ("row", 1),
    "mlp.linear_fc1": ("column", 2),
    "mlp.linear_fc2": ("row", 1),
}


@dataclass(frozen=True)
class Checked:
    """A tensor that was computed again. distance: between the run's dump and this CPU's result."""

    name: str
    distance: Distance

    @property
    def identical(self) -> bool:
        """Return whether every bit is equal."""
        return self.distance.differing == 0

    def __str__(self) -> str:
        distance = self.distance
        if self.identical:
            return f"{self.name}: identical, {plural(distance.total, 'element')}"
        largest = f", by at most {distance.max_ulp} ULP" if distance.max_ulp is not None else ""
        differing = f"{distance.differing} of {plural(distance.total, 'element')}"
        return f"{self.name}: different, {differing}{largest}, the first at {distance.first}"


@dataclass(frozen=True)
class CheckResult(Result):
    """The results of a module at a step, computed again."""

    step: int
    module: str
    tensors: tuple[Checked, ...]

    @property
    @override
    def exit_status(self) -> int:
        return EXIT_STATUS[Verdict.IDENTICAL if all(tensor.identical for tensor in self.tensors) else Verdict.DIFFERENT]

    @override
    def lines(self) -> Iterator[str]:
        yield from map(str, self.tensors)
        word = "different" if self.exit_status else "identical"
        yield f"{word}: step {self.step} of {self.module}, computed again on this CPU"

    @override
    def as_json(self) -> dict[str, Any]:
        tensors = [{"name": t.name, "identical": t.identical, **asdict(t.distance)} for t in self.tensors]
        return {"exit_status": self.exit_status, "tensors": tensors}


@dataclass(frozen=True)
class Arbitration:
    """Which of two runs is right: "a", "b", both, or none, since it is not known or neither is."""

    right: tuple[str, ...]
    text: str


class Names(NamedTuple):
    """The tensors of a module that a check reads. weight: after the step before.

    operands: the input, and the gradient of the output. results: the output, the gradients of input and weight.
    """

    operands: tuple[str, str]
    results: tuple[str, str, str]
    weight: str


def names_of(module: str) -> Names:
    """Return the tensors of a module by their names in a dump."""
    forward, backward, weight = f"forward/{module}", f"backward/{module}", f"{module}.weight"
    results = (f"{forward}/output", f"{backward}/output", f"gradients/{weight}")
    return Names((f"{forward}/input", f"{backward}/input"), results, f"weights/{weight}")


def check(run: Path, step: int, module: str) -> CheckResult:
    """Compare output and gradients of a linear layer with those that a CPU computes.

    RunError: numerics or module are not covered. LedgerError: a tensor was not dumped.
    """
    kind, segments = require_linear(module, step)
    config = RunDir(run).read_run_config()
    numerics = config.numerics
    named, arithmetic = numerics.mode, numerics.arithmetic
    if arithmetic is None or not arithmetic.any_machine:
        stated = " or ".join(mode.named(lambda candidate: candidate.any_machine))
        raise RunError(f"{run} is a run of numerics={named}, whose bits no CPU can compute; {stated} specifies them")
    names = names_of(module)
    wanted = [(step - 1, names.weight), *((step, name) for name in (*names.operands, *names.results))]
    there = {number: dumps.read_step(run, number) for number in (step - 1, step) if number in dumps.steps(run)}
    missing = [name for number, name in wanted if number not in there or name not in there[number].parts]
    if missing:
        every = ",".join(name for _, name in wanted)
        raise LedgerError(
            f"{run} did not dump {', '.join(missing)}; train it with "
            f"ledger.trace={step - 1}:{step} 'ledger.dump=[{every}]'"
        )
    dumped = {name: there[number].read(name) for number, name in wanted}
    results = _computed(dumped, names, kind, segments, numerics, _operands(config, module))
    tensors = (
        Checked(name, dumps.distance(dumped[name], _as_dumped(result, dumped[name])))
        for name, result in zip(names.results, results, strict=True)
    )
    return CheckResult(step, module, tuple(tensors))


def _operands(config: RunConfig, module: str) -> "Format":
    """Return what a layer computes with: FP8, or what the run's mode has."""
    layers, arithmetic = low_precision.fp8_layers(config), mode.named_mode(config.numerics.mode)
    if layers is not None and layers.contains(int(module.split(".")[2]), config.shape.layers):
        from tp_invariant_recipes.numerics.megatron.base import operands_of

        return operands_of(layers, arithmetic, None)
    return arithmetic.operands()


def require_linear(module: str, step: int) -> tuple[str, int]:
    """Return how a module's weight is split, and the segments of its output features. RunError: it is not covered."""
    if step < 2:
        raise RunError("--step must be 2 or more: the weight is the one that the step before has left")
    for ending, kind in LINEAR.items():
        if module.startswith("decoder.layers.") and module.endswith(f".{ending}"):
            return kind
    covered = ", ".join(f"decoder.layers.N.{ending}" for ending in LINEAR)
    raise RunError(f"--module {module} is not covered; these are: {covered}")


def _computed(
    dumped: dict[str, Dumped], names: Names, kind: str, segments: int, numerics: NumericsSettings,
    operands: "Format",
) -> Any:  # fmt: skip
    """Output and gradients, as the run of one rank computes them: sequence by sequence, data shard by data shard."""
    import torch

    from tp_invariant_recipes.numerics.layers import linear
    from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
    from tp_invariant_recipes.numerics.sums.tree import tree_sum

    x, dy = (_tensor(dumped[name]) for name in names.operands)
    weight: Any = _tensor(dumped[names.weight]).requires_grad_()
    if not (
        weight.dim() == 2 and all(weight.shape) and x.dim() == 3 and all(x.shape)
        and x.shape[2] == weight.shape[1] and dy.shape == (*x.shape[:2], weight.shape[0])
    ):  # fmt: skip
        shapes = ", ".join(f"{name} {[*dumped[name].shape]}" for name in (*names.operands, names.weight))
        raise LedgerError(f"the dumps are not of a linear layer: {shapes}")
    mesh = VirtualMesh(numerics.virtual_shards or 1, 1, 0)
    shards = numerics.data_shards or 1
    outputs, slopes = [], []
    gradients = torch.zeros(shards, *weight.shape)
    for number in range(x.shape[1]):
        weight.main_grad = gradients[number * shards // x.shape[1]]
        mine = x[:, number : number + 1].contiguous().requires_grad_()
        if kind == "row":
            out = linear.row_parallel(mine, weight, mesh, False, operands)
        else:
            out = linear.column_parallel(mine, weight, mesh, segments, False, operands)
        out.backward(dy[:, number : number + 1].contiguous())
        outputs.append(out.detach())
        slopes.append(mine.grad)
    return torch.cat(outputs, 1), torch.cat(slopes, 1), tree_sum(gradients)


def _tensor(dumped: Dumped) -> Any:
    import torch

    if dumped.dtype != "bfloat16":
        raise LedgerError(f"a tensor of {dumped.dtype} was dumped where numerics=portable has bfloat16")
    return torch.from_numpy(dumped.bits.view("int16").copy()).view(torch.bfloat16).view(dumped.shape)


def _as_dumped(result: Any, like: Dumped) -> Dumped:
    import torch

    name = str(result.dtype).removeprefix("torch.")
    word = {"bfloat16": (torch.int16, "uint16"), "float32": (torch.int32, "uint32")}[name]
    bits = result.detach().contiguous().view(word[0]).numpy().view(word[1])
    return Dumped(name, tuple(result.shape), bits.reshape(like.bits.shape))


def referee(
    names: Sequence[str],
    repeats: Sequence[bool],
    module: str | None,
    operation: str | None,
    step: int,
    train: Callable[[tuple[str, ...], int], Sequence[Path]],
) -> Arbitration:
    """Tell which of two runs is right.

    names:   of both runs. repeats: whether each computed its recorded bits again: the first judge.
    module, operation: where the runs first differ; None: not known. Where both runs repeat, a CPU computes it.
    train:   trains both again, up to `step`, and dumps tensors from another step on; returns the run directories.
    """
    correct: list[int] = []
    if repeats[0] != repeats[1]:
        correct = [repeats.index(True)]
        text = f"{names[correct[0]]} is right: it repeats its bits here, and {names[1 - correct[0]]} does not"
    elif module is None or operation is None:
        text = "no operation is known at which the runs part with equal operands: nothing to judge"
    else:
        try:
            wanted = names_of(module)
            require_linear(module, step)
            dumped = train((*wanted.operands, *wanted.results, wanted.weight), step - 1)
            correct = [n for n, run in enumerate(dumped) if not check(run, step, module).exit_status]
        except TpiError as error:
            text = f"it cannot tell: {error}"
        else:
            who = "both runs are right" if correct else "neither run is right"
            if len(correct) == 1:
                who = f"{names[correct[0]]} is right, and {names[1 - correct[0]]} is wrong"
            text = f"{who}, by the definition of {module}, computed on this CPU"
    return Arbitration(tuple("ab"[n] for n in correct), f"referee: {text}")
