# SPDX-License-Identifier: Apache-2.0
"""FP8 products that cuBLAS gave on Hopper (tests/data/README.md), as operands and bits."""

from pathlib import Path

import numpy as np
import torch

from tp_invariant_recipes.kernels.cpu.tensor_core_cpu import rounded
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2, Quantized

RECORDED = dict(np.load(Path(__file__).parent / "data" / "fp8_hopper.npz"))
CASES = sorted({name.split("/")[0] for name in RECORDED})
SPLIT = [case for case in CASES if not case.endswith("_fast")]
BLOCKS = ("tensor", "1x128", "128x128")


def recorded(case):
    """a, b and what was recorded: form of output -> its bits."""
    part = {name.split("/")[1]: value for name, value in RECORDED.items() if name.startswith(f"{case}/")}
    a_is_e5m2, b_is_e5m2, code = part["kind"]
    blocks = BLOCKS[code]
    a, b = (
        Quantized(torch.from_numpy(part[x]).view(E5M2 if is_e5m2 else E4M3), torch.from_numpy(part[f"s{x}"]), kind)
        for x, is_e5m2, kind in (("a", a_is_e5m2, "1x128" if code else blocks), ("b", b_is_e5m2, blocks))
    )
    return a, b, {form: part[form] for form in ("fp32", "bf16", "fast", "added", "main") if form in part}


def bits(x):
    words = {torch.float32: np.uint32, torch.bfloat16: np.uint16}
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()]).numpy().view(words[x.dtype])


def same_as_recorded(total, forms):
    """total: [m, n] fp32 of a product. Which forms of output have the recorded bits."""
    total = torch.from_numpy(total) if isinstance(total, np.ndarray) else total
    results = {"fp32": total, "bf16": rounded(total)}
    if "added" in forms:
        results["added"] = torch.from_numpy(forms["main"]) + total
    return {form: bool((bits(results[form]) == forms[form]).all()) for form in forms if form in results}
