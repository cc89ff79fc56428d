"""The limits of a ledger's recording: one row per rule, so that tpi refuses an unsupported run before it starts."""

import re
from collections.abc import Callable
from typing import Any

Tree = dict[str, Any]
_STEPS = re.compile(r"(\d+):(\d+)")
_TENSOR = re.compile(r"(forward|backward)/.+/(input|output)(\.\d+)?|(gradients|weights)/.+")


def steps(trace: str) -> range:
    """The steps of `ledger.trace`, counted from 1. ValueError: it is not FIRST:LAST."""
    match = _STEPS.fullmatch(trace)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"ledger.trace={trace}: must be FIRST:LAST, steps counted from 1, as in ledger.trace=1:3")
    return range(int(match[1]), int(match[2]) + 1)


def problems(tree: Tree) -> list[str]:
    """All reasons why the ledger cannot record the requested values."""
    found = [problem for rule in RULES if (problem := rule(tree))]
    if tree["ledger"]["digests"]:
        found += [f"{why}; or record none: ledger.digests=0" for wrong, why in UNDIGESTED if wrong(tree)]
    return found


def _digests(tree: Tree) -> str | None:
    every = tree["ledger"]["digests"]
    if type(every) is int and every >= 0:
        return None
    return f"ledger.digests={every}: must be 0 (never) or a number of steps"


def _trace(tree: Tree) -> str | None:
    trace = tree["ledger"]["trace"]
    if trace is None:
        return None
    try:
        last = steps(str(trace))[-1]
    except ValueError as error:
        return str(error)
    iters = tree["train"]["train_iters"]
    return None if last <= iters else f"ledger.trace={trace}: the run ends at step {iters}; raise iters or trace less"


def _graphs(tree: Tree) -> str | None:
    implementation = tree["model"].get("cuda_graph_impl")
    if tree["ledger"]["trace"] is None or implementation in (None, "none"):
        return None
    asked = f"model.cuda_graph_impl={implementation}"
    return f"ledger.trace: a replayed CUDA graph calls no module, and {asked}; cuda_graph=off"


def _dump(tree: Tree) -> str | None:
    dump = tree["ledger"]["dump"]
    wrong = [name for name in dump if not _TENSOR.fullmatch(name)]
    if wrong:
        return (
            f"ledger.dump: {', '.join(wrong)}: a tensor is forward/MODULE/output, backward/MODULE/input, "
            f"gradients/PARAMETER or weights/PARAMETER"
        )
    return "ledger.dump: at which steps? set ledger.trace=FIRST:LAST" if dump and not tree["ledger"]["trace"] else None


RULES: tuple[Callable[[Tree], str | None], ...] = (_digests, _trace, _graphs, _dump)

# Configurations without digests of gradients and weights, and the reason.
UNDIGESTED: tuple[tuple[Callable[[Tree], bool], str], ...] = (
    (
        lambda t: bool(t["ddp"]["overlap_param_gather"] or t["optimizer"]["overlap_param_gather"]),
        "digests: weights are not all gathered when the step ends; ddp.overlap_param_gather=false, "
        "optimizer.overlap_param_gather=false",
    ),
    (
        lambda t: bool(t["ddp"].get("use_megatron_fsdp") or t["ddp"].get("use_custom_fsdp")),
        "digests: FSDP keeps gradients in buffers of its own; ddp.use_megatron_fsdp=false",
    ),
    (
        lambda t: (t["model"].get("gtp_weight_remat_size") or 1) > 1,
        "digests: weights spread over more ranks are not covered; model.gtp_weight_remat_size=1",
    ),
)
