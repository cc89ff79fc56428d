# SPDX-License-Identifier: Apache-2.0
"""Check and convert one value against the type hint of the field it is for."""

import functools
import json
import re
import types
import typing
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_WORD = re.compile(r"(?!(true|false|null|nan|inf)$)[a-z_][\w./-]*", re.IGNORECASE | re.ASCII)


# The short names of types, beside torch's own and those with "torch." before them.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"}
# Type -> a value of it as one types it.
EXAMPLES = {
    "builtins.int": "4",
    "builtins.float": "1e-4",
    "builtins.bool": "true",
    "builtins.str": "text",
    "builtins.list": "[1,2]",
    "builtins.tuple": "[1,2]",
    "builtins.dict": "'{KEY: 1}'",
    "torch.dtype": "bfloat16 (or bf16)",
}


class WrongType(ValueError):
    """The value does not fit; the message says what is expected."""


def convert(value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it.

    Names become what they name: an Enum member, a torch.dtype, a function by its dotted path.
    Raises WrongType.
    """
    if type(value) is hint and hint in (bool, int, float, str):
        return value
    from pydantic import ValidationError  # here and below: `tpi --help` checks no types
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

    if isinstance(value, str):
        value = _named(value, hint)
    if isinstance(value, bool) and not _mentions(hint, bool) and _mentions(hint, int, float):
        raise WrongType(_expected(hint))
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError:
        raise WrongType(_expected(hint)) from None
    except OSError as error:  # of a class of Bridge that looks for a file which the value names
        raise WrongType(str(error)) from None
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value  # a hint that says nothing checkable; Bridge's own validation has the last word


def _expected(hint: Any) -> str:
    """Return what a hint takes, with an example that can be typed, unless its values are listed."""
    example = next((EXAMPLES[name] for leaf in _leaves(hint) if (name := _qualified(leaf)) in EXAMPLES), None)
    return f"expected {describe(hint)}{f', such as {example}' if example else ''}"


def named(path: str) -> Any:
    """Return what a dotted path names; None when it names nothing that can be imported."""
    import pydoc

    try:
        return pydoc.locate(path)
    except pydoc.ErrorDuringImport:
        return None


def describe(hint: Any) -> str:
    """Return a type hint in words: "int", "bool or null", "one of 'a', 'b'"."""
    if isinstance(hint, str):
        return hint
    args = [a for a in typing.get_args(hint) if a is not type(None)]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return f"one of {', '.join(repr(a) for a in typing.get_args(hint))}"
    if origin in (typing.Union, types.UnionType):
        words = [describe(a) for a in args]
        return " or ".join([*words, "null"] if len(args) < len(typing.get_args(hint)) else words)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(hint.__members__)}"
    return re.sub(r"\b(typing|collections\.abc)\.", "", getattr(hint, "__name__", None) or str(hint))


def is_text(hint: Any) -> bool:
    """Whether a hint takes text and, beside null, nothing else."""
    return str in _leaves(hint) and {*_leaves(hint)} <= {str, types.NoneType}


def _named(text: str, hint: Any) -> Any:
    for enum in _leaves(hint):
        if isinstance(enum, type) and issubclass(enum, Enum) and text in enum.__members__:
            return enum[text]
    if "torch.dtype" in map(_qualified, _leaves(hint)):
        import torch  # only here: a command that needs no tensor should not wait seconds for it

        name = text.removeprefix("torch.")
        dtype = getattr(torch, DTYPES.get(name, name), None)
        return dtype if isinstance(dtype, torch.dtype) else text
    if _mentions_callable(hint) and "." in text:
        function = named(text)
        if not callable(function):
            raise WrongType("expected the dotted path of a function, such as torch.nn.functional.silu")
        return function
    return text


def _leaves(hint: Any) -> list[Any]:
    args = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()
    return [leaf for a in args for leaf in _leaves(a)] or [hint]


def _qualified(leaf: Any) -> str:
    leaf = typing.get_origin(leaf) or leaf
    return f"{getattr(leaf, '__module__', '')}.{getattr(leaf, '__name__', '')}"


def _mentions(hint: Any, *wanted: type) -> bool:
    return any(leaf in wanted for leaf in _leaves(hint))


def _mentions_callable(hint: Any) -> bool:
    import collections.abc

    return any(leaf is typing.Callable or typing.get_origin(leaf) is collections.abc.Callable for leaf in _leaves(hint))


def _adapter(hint: Any) -> "TypeAdapter":
    try:
        return _cached_adapter(hint, repr(hint))
    except TypeError:  # an unhashable hint
        return _new_adapter(hint)


@functools.cache
def _cached_adapter(hint: Any, text: str) -> "TypeAdapter":
    """text: the hint's. Two unions of the same types are equal, but the first type that fits counts."""
    return _new_adapter(hint)


def _new_adapter(hint: Any) -> "TypeAdapter":
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError as error:
        if error.code != "type-adapter-config-unused":
            raise
        return TypeAdapter(hint)


# A string that Hydra's grammar reads as itself.


def value_text(value: Any) -> str:
    """Return a value in Hydra's grammar, with quotes where needed: "1,0,0" without quotes would be a sweep."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else json.dumps(value, ensure_ascii=False)
