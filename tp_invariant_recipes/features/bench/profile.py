"""Reads a profiler's trace: time and launches of a step by kernel and by kind of kernel; differences of two traces.

Read from the profiler's Chrome trace, so a trace written elsewhere can be read too. On a GPU what counts are kernels,
copies and fills, wherever they run; kernels of several streams run at once, so their sum may exceed the step. On a CPU
it is each operator's own time, without the operators it calls.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "tpi step"  # the mark around a step in a trace
TRACED = 2  # steps of a trace
LARGEST = 10  # kernels to name
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
OTHER = "other"
COLLECTIVES = "collectives"
HOST_BOUND = 0.1  # of a step: while the GPU idles for longer, the host is what limits it

# Pattern -> category, on the name of a kernel or operator; the first that is found decides. ^_NAME$: our own kernels.
_ARITHMETIC = (
    "abs|add|addcdiv|addcmul|all|amax|any|bitwise_\\w+|clamp|cos|div|eq|exp|frexp|ge|gelu|gt|isnan|ldexp|le|lerp|log|lt|max"
    "|maximum|mean|min|mul|ne|neg|norm|linalg_vector_norm|pow|reciprocal|rsqrt|rsub|sigmoid|silu|silu_backward|sin|sqrt"
    "|sub|sum|where"
)
_VIEWS = (
    "alias|as_strided|chunk|detach|empty\\w*|expand\\w*|narrow|new_empty|permute|reshape|_reshape_alias|resize|select|slice"
    "|split|squeeze|t|unsqueeze|_unsafe_view|view|resolve_conj"
)
CATEGORIES = tuple(
    (re.compile(pattern, re.IGNORECASE), category)
    for pattern, category in (
        (r"tree_?(add|sum|fold|reduce)|token_sum|folding", "tree adds"),
        (r"nccl|gloo|c10d|record_param_comms", COLLECTIVES),
        (r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", COLLECTIVES),
        (r"cross_?entropy|nll_loss|log_?softmax", "cross entropy"),
        (r"flash|fmha|sdpa|attention|attn|softmax|cudnn::fusion", "attention"),
        (r"rope|rotary", "rotary embedding"),
        (r"grad_?norm|l2_?norm|^_(largest|square_limbs)$", "gradient norm"),
        (r"adam|multi_?tensor|optimizer|foreach", "optimizer"),
        (r"(rms|layer)_?norm|norm_?(fwd|bwd|forward|backward)", "normalisation"),
        (
            r"gemm|gemv|cutlass|cublas|xmma|nvjet|split_?k|^_(product|restarting_product|weight_gradient)$",
            "matrix products",
        ),
        (r"::_?(mm|addmm|bmm|baddbmm|matmul|linear|dot)$", "matrix products"),
        (r"memset|fillfunctor|::(zero_?|zeros|fill_|new_zeros|zeros_like)$", "memset"),
        (r"memcpy|copy|catarray|transpose|::_?(cat|contiguous|clone|to_copy|to|stack)$", "copies, concatenation"),
        (r"embedding|index|gather|scatter|mask|arange|sort|topk|one_hot", "embedding, indexing"),
        (r"elementwise|reduce_kernel|unrolled|vectorized|triton", "elementwise, reductions"),
        (rf"::({_ARITHMETIC})_?$", "elementwise, reductions"),
        (rf"::({_VIEWS})_?$", "allocations, views"),
        (r"^autograd::|^torch::autograd::|(?-i:^_?[A-Z]\w*$)", "autograd functions"),
    )
)


@dataclass(frozen=True)
class KernelTime:
    """One kernel or operator in one step, on average."""

    name: str
    category: str
    milliseconds: float
    launches: float


@dataclass(frozen=True)
class Trace:
    """A step on average.

    milliseconds: how long it took while traced.
    idle:         how long nothing ran in it.
    kernels:      what ran, the longest first.
    waiting:      on a GPU, how long nothing but collectives ran: they move data, or wait for other ranks.
    """

    milliseconds: float
    idle: float
    kernels: tuple[KernelTime, ...]
    waiting: float | None = None

    @property
    def idle_share(self) -> float:
        """The part of the step in which nothing ran."""
        return self.idle / self.milliseconds if self.milliseconds else 0.0

    @property
    def limit(self) -> str | None:
        """ "host": a shorter step needs fewer launches and less Python; "gpu": shorter kernels. None on a CPU."""
        if self.waiting is None:
            return None
        return "host" if self.idle_share > HOST_BOUND else "gpu"


def category(name: str) -> str:
    """Return the kind of a kernel or operator."""
    return next((kind for pattern, kind in CATEGORIES if pattern.search(name)), OTHER)


def read(file: Path) -> Trace:
    """Return a trace's step. Raises OSError or ValueError when the file cannot be read."""
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        return step(json.load(stream)["traceEvents"])


def _kernel_times(times: Iterable[tuple[str, float]], steps: int) -> tuple[KernelTime, ...]:
    """Return the kernels of a step, those that take longest first. times: name and microseconds of each launch."""
    microseconds: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for name, duration in times:
        microseconds[name] += duration
        launches[name] += 1
    kernels = (
        KernelTime(name, category(name), microseconds[name] / 1000 / steps, launches[name] / steps) for name in launches
    )
    return tuple(sorted(kernels, key=lambda k: (-k.milliseconds, k.name)))


def step(events: Iterable[dict[str, Any]]) -> Trace:
    """Return the mean step of a trace, of what starts inside marked steps. Raises ValueError: no step is marked."""
    steps, inside = _marked_steps([e for e in events if e.get("ph") == "X"])
    counted = [e for e in inside if e.get("cat") in ON_GPU]
    times = [(e["name"], e["dur"]) for e in counted]
    on_gpu = bool(counted)
    if not counted:
        counted = [e for e in inside if e.get("cat") == "cpu_op"]
        times = list(_own_times(counted))
    wall = sum(end - start for start, end in steps)
    busy = _covered(counted)
    computing = _covered([e for e in counted if category(e["name"]) != COLLECTIVES]) if on_gpu else busy
    return Trace(
        milliseconds=wall / 1000 / len(steps),
        idle=max(wall - busy, 0.0) / 1000 / len(steps),
        kernels=_kernel_times(times, len(steps)),
        waiting=(busy - computing) / 1000 / len(steps) if on_gpu else None,
    )


def _marked_steps(spans: list[dict[str, Any]]) -> tuple[list[tuple[float, float]], list[dict[str, Any]]]:
    """Return the marked steps, each from start to end in microseconds, and the spans that start inside them."""
    # The GPU has a copy of each mark, a little shorter: its clock starts with the first kernel.
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == STEP and e.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError(f"no step is marked in the trace: no '{STEP}'")
    return steps, [e for e in spans if any(start <= e["ts"] < end for start, end in steps)]


def by_category(kernels: Iterable[KernelTime]) -> dict[str, KernelTime]:
    """Sum the kernels of each category, under the category's name."""
    return _summed((kernel.category, kernel) for kernel in kernels)


def difference(first: Iterable[KernelTime], other: Iterable[KernelTime]) -> tuple[KernelTime, ...]:
    """Subtract the kernels of `first` from those of `other`, by name, the most additional time first."""
    less = (KernelTime(k.name, k.category, -k.milliseconds, -k.launches) for k in first)
    by_name = _summed((kernel.name, kernel) for kernel in (*less, *other))
    return tuple(sorted(by_name.values(), key=lambda k: (-k.milliseconds, k.name)))


def _summed(named: Iterable[tuple[str, KernelTime]]) -> dict[str, KernelTime]:
    sums: dict[str, KernelTime] = {}
    for name, kernel in named:
        so_far = sums.get(name, KernelTime(name, kernel.category, 0.0, 0.0))
        milliseconds, launches = so_far.milliseconds + kernel.milliseconds, so_far.launches + kernel.launches
        sums[name] = KernelTime(name, so_far.category, milliseconds, launches)
    return sums


def _covered(events: Iterable[dict[str, Any]]) -> float:
    """Microseconds during which at least one of the events runs."""
    covered, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        covered += max(end - max(event["ts"], until), 0.0)
        until = max(until, end)
    return covered


def _own_times(operators: Iterable[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """(name, microseconds) of each operator, less the operators that run inside it on its thread."""
    threads = defaultdict(list)
    for event in operators:
        threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        open_: list[list] = []  # [end, name, own time], outermost first
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_ and open_[-1][0] <= event["ts"]:
                yield _name_and_time(open_.pop())
            if open_:
                open_[-1][2] -= event["dur"]
            open_.append([event["ts"] + event["dur"], event["name"], event["dur"]])
        yield from map(_name_and_time, open_)


def _name_and_time(operator: list) -> tuple[str, float]:
    return operator[1], max(operator[2], 0.0)  # clocks are read to a nanosecond and rounded
