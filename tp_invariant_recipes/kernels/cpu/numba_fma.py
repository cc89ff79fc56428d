"""A fused multiply-add of fp32 numbers for loops that numba compiles."""

from typing import Any

from numba import types
from numba.extending import intrinsic


@intrinsic
def fma(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of fp32 numbers, rounded once: by the processor or, where it cannot, the C library."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), code
