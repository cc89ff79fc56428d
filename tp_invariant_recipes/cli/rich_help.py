"""Loads the module with which typer prints help, without two parts of rich that our help never uses.

`typer.rich_utils` imports rich's Markdown and Traceback at its top, which is a third of the time of `tpi --help`. Our
help is written in rich's markup, and `main.py` prints tracebacks itself.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

RENDERER = "typer.rich_utils"
UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}  # module -> the class that typer takes from it


def prepare() -> None:
    """Import `typer.rich_utils`, and the modules of UNUSED only once it uses their classes. Idempotent."""
    if RENDERER in sys.modules:
        return
    stand_ins = {module: _stand_in(module, name) for module, name in UNUSED.items() if module not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        import_module(RENDERER)
    except ImportError:  # this version takes another name from one of them: print help without haste
        sys.modules.pop(RENDERER, None)
    finally:
        for module in stand_ins:
            del sys.modules[module]


def _stand_in(module: str, name: str) -> ModuleType:
    stand_in = ModuleType(module)
    setattr(stand_in, name, _Later(name, (), {"__module__": module}))
    return stand_in


class _Later(type):
    """A class that is imported when it is called or an attribute of it is asked for."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(cls.__module__), cls.__name__)(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(getattr(import_module(cls.__module__), cls.__name__), name)
