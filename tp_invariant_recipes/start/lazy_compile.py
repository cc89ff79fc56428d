"""torch.compile as a decorator that compiles at the first call.

torch.compile imports torch's compiler, 730 modules, when it decorates a function. Megatron decorates 40 at its import,
and most runs call none of them.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def at_the_first_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch.compile: of a function, the result asks `original` when it is first called."""

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if not inspect.isfunction(model):
            return original(model, **options)
        compiled = functools.cache(lambda: original(model, **options))

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        # As torch.compile has it: a function that is compiled itself, and calls this one, contains the original.
        call._torchdynamo_inline = model  # type: ignore[attr-defined]
        return call

    return compile
