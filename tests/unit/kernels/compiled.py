# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for a GPU that this machine does not have."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def ptx(kernel: Any, types: dict[str, str], constants: dict[str, Any], architecture: int = 90, **options: Any) -> str:
    """The code of a kernel. types: of its other arguments. options: Triton's; multiples_of_16: these arguments are."""
    names = kernel.arg_names
    places = {(names.index(name),): [["tt.divisibility", 16]] for name in options.pop("multiples_of_16", ())}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), values, places)
    return triton.compile(source, GPUTarget("cuda", architecture, 32), options).asm["ptx"]
