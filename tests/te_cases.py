# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's Linear and LayerNormLinear, forward and backward, on the ranks of a tensor-parallel group.

    python -m tests.te_cases FOLDER SWITCH BACKEND   # one rank on a GPU; RANK and WORLD_SIZE as torchrun sets them

writes what this rank holds of every case to FOLDER. tests/te_standin.py stands for Transformer Engine on a CPU.
"""

import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.numerics.module_runs import Parameters, set_weights
from tests.distributed.ranks import Split, sliced, together, unequal
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

SHARDS, POSITIONS, BATCH, INPUTS, OUTPUTS = 4, 16, 2, 128, 320


@dataclass(frozen=True)
class Case:
    """One module.

    segments: of the weight: 2 for gate and up. named: by parameters_split, not by partition_stride.
    norm:     of LayerNormLinear. returned: whether it returns the norm's result too.
    """

    module: str
    mode: str | None
    segments: int = 1
    norm: str = "RMSNorm"
    returned: bool = False
    named: bool = False
    bias: bool = False
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        words = [self.module, str(self.mode), f"{self.segments} segments"]
        words += [self.norm] if self.norm != "RMSNorm" else []
        words += [name for name in ("returned", "named", "bias", "sequence_parallel") if getattr(self, name)]
        return ", ".join([*words, str(self.dtype).removeprefix("torch.")])


KINDS = (
    {"module": "Linear", "mode": "column"},
    {"module": "Linear", "mode": "column", "segments": 2, "bias": True},
    {"module": "Linear", "mode": "row"},
    {"module": "Linear", "mode": "row", "bias": True},
    {"module": "LayerNormLinear", "mode": "column", "bias": True},
    {"module": "LayerNormLinear", "mode": "column", "segments": 2},
    {"module": "LayerNormLinear", "mode": "column", "segments": 2, "named": True},
    {"module": "LayerNormLinear", "mode": "column", "segments": 2, "norm": "LayerNorm", "returned": True},
)
# In fp32 only those whose stock sums differ on a CPU as well: the others' control could not fail there.
IN_FP32 = (KINDS[1], KINDS[3], KINDS[5], KINDS[7])
CASES = tuple(
    Case(**kind, sequence_parallel=sequence_parallel, dtype=dtype)
    for dtype, kinds in ((torch.bfloat16, KINDS), (torch.float32, IN_FP32))
    for kind in kinds
    for sequence_parallel in (False, True)
)


def unsplit(case: Case) -> Case:
    """The module without parallel_mode, on one rank: what Transformer Engine's own test compares with."""
    return replace(case, mode=None, sequence_parallel=False)


UNSPLIT = tuple(dict.fromkeys(map(unsplit, CASES)))


def unlike_unsplit(alone: dict, results: dict, case: Case) -> list[str]:
    """Of what must have the bits of the module without parallel_mode on one rank, what has not."""
    names = results[case].keys() - ({"output"} if case.module == "Linear" else set())
    names = {"output"} if case.mode == "row" else names
    return unequal(*({name: each[name] for name in names} for each in (results[case], alone[unsplit(case)])))


def assert_near(result: dict[str, Tensor], stock: dict[str, Tensor], case: Case) -> None:
    """Whether it computes what stock computes."""
    close = 2.0**-6 if case.dtype == torch.bfloat16 else 2.0**-18
    for name, tensor in stock.items():
        assert (result[name].double() - tensor.double()).norm() < close * tensor.double().norm(), name


def built(te: Any, case: Case, mesh: VirtualMesh, device: str) -> Any:
    """The module, as a program builds it."""
    arguments = {
        "bias": case.bias, "sequence_parallel": case.sequence_parallel, "tp_group": mesh.group, "tp_size": mesh.size,
        "params_dtype": case.dtype, "parallel_mode": case.mode, "device": device,
    }  # fmt: skip
    if case.module == "LayerNormLinear":
        arguments |= {"normalization": case.norm, "return_layernorm_output": case.returned}
    if case.named:
        arguments["parameters_split"] = ("gate", "up")
    module = getattr(te, case.module)(INPUTS, OUTPUTS, **arguments)
    if case.segments > 1 and not case.named:
        module.weight.partition_stride = case.segments
    return module


def parameters(module: Any, case: Case) -> Parameters:
    """The module's by name, each with its split."""
    result: Parameters = {}
    for name, parameter in module.named_parameters():
        split: tuple[int, list[int]] | None = None
        segments = 1 if case.named else case.segments
        if case.mode == "column" and "layer_norm" not in name:
            split = 0, [parameter.shape[0] // segments] * segments
        elif case.mode == "row" and name == "weight":
            split = 1, [parameter.shape[1]]
        result[name] = parameter, split
    return result


def ran(te: Any, case: Case, mesh: VirtualMesh, device: str) -> dict[str, tuple[Tensor, Split]]:
    """Output, input gradient and gradients of parameters, of this rank, for `together`."""
    module = built(te, case, mesh, device)
    held = parameters(module, case)
    set_weights(held, mesh, 0.1, case.dtype)
    generator = torch.Generator().manual_seed(7)
    x, dy, dnormal = (
        torch.randn((POSITIONS, BATCH, size), generator=generator).to(case.dtype) for size in (INPUTS, OUTPUTS, INPUTS)
    )
    along, row = 0 if case.sequence_parallel else None, case.mode == "row"
    features = (2, [(INPUTS if row else OUTPUTS) // mesh.size // (n := 1 if row else case.segments)] * n)

    def mine(whole: Tensor, split: Split) -> Tensor:
        if split is None:
            return whole
        return sliced(whole, 0, mesh) if split == 0 else sliced(whole, 2, mesh, len(features[1]))

    of_x, of_y = (features, along) if row else (along, features)
    x, dy, dnormal = mine(x, of_x).to(device).requires_grad_(), mine(dy, of_y), mine(dnormal, along)
    y, *normal = module(x) if case.returned else [module(x)]
    torch.autograd.backward([y, *normal], [dy.to(device), dnormal.to(device)][: 1 + len(normal)])
    results: dict[str, tuple[Tensor, Split]] = {"norm": (normal[0].detach().cpu(), along)} if normal else {}
    for name, (parameter, split) in held.items():
        if split is None and case.sequence_parallel and mesh.size > 1:
            dist.all_reduce(parameter.grad, group=mesh.group)  # as a program does for what every rank holds whole
        results[name] = parameter.grad.cpu(), split
    return results | {"output": (y.detach().cpu(), of_y), "input gradient": (x.grad.cpu(), of_x)}


def whole(ranks: Sequence[dict]) -> dict[Any, dict[str, Tensor]]:
    """What ranks hold of every case, put together."""
    return {case: together([rank[case] for rank in ranks]) for case in ranks[0]}


def main() -> None:
    """See the top."""
    folder, switch, backend = Path(sys.argv[1]), *sys.argv[2:]
    os.environ |= {"NVTE_TP_INVARIANT_MODE": switch, "TPI_SHARDS": str(SHARDS)}
    import tp_invariant_recipes.patch_mode  # noqa: F401

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    size, rank = dist.get_world_size(), dist.get_rank()
    import transformer_engine.pytorch as te

    mesh = VirtualMesh(SHARDS, size, rank, dist.group.WORLD if size > 1 else None)
    results = {str(case): ran(te, case, mesh, "cuda") for case in (*CASES, *(UNSPLIT if size == 1 else ()))}
    (folder / f"{switch}-{size}-{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
