"""The patches, one row each. `applied` applies those that the installed packages and the run need, for a block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tp_invariant_recipes import replacement
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.patches import bridge_helpers, core_save, te_grouped_linear, te_grouped_wgrad
from tp_invariant_recipes.patches.patch import Patch, PatchVerdict

PATCHES: tuple[Patch, ...] = (
    core_save.PATCH,
    bridge_helpers.PATCH,
    te_grouped_linear.PATCH,
    *te_grouped_wgrad.PATCHES,
)


def verdicts(off: Sequence[str] = ()) -> list[tuple[Patch, PatchVerdict]]:
    """Every patch with its verdict on this machine. Imports none of the patched packages."""
    return [(patch, patch.verdict(patch.name in off)) for patch in PATCHES]


def problems(tree: dict[str, Any] | None = None) -> list[str]:
    """The patch problems of a run: unknown names in `patches.off`, and refused patches that the run needs.

    tree: the run's configuration; None: it is unknown, and the run counts as using all installed code.
    """
    off = _off(tree)
    known = [patch.name for patch in PATCHES]
    unknown = [
        f"patches.off={name}: no such patch; the patches are {', '.join(known)}" for name in off if name not in known
    ]
    return unknown + [
        f"{verdict.reason} and needs patch {patch.name} ({patch.why}): install a version that docs/patches.md lists, "
        f"or train without the patch: patches.off=[{patch.name}]"
        for patch, verdict in verdicts(off)
        if verdict.state == "refused" and patch.concerns(tree)
    ]


@contextmanager
def applied(tree: dict[str, Any] | None = None) -> Iterator[list[str]]:
    """Apply the patches that the installed packages and the run need; yield their names.

    tree: as in `problems`.
    Raises ConfigError, and applies none, when the run needs a refused patch or `patches.off` has an unknown name.
    """
    if wrong := problems(tree):
        raise ConfigError("\n".join(wrong), wrong)
    chosen = [patch for patch, verdict in verdicts(_off(tree)) if verdict.state == "applies" and patch.concerns(tree)]
    with replacement.applied(r for patch in chosen for r in patch.replacements):
        yield [patch.name for patch in chosen]


def _off(tree: dict[str, Any] | None) -> list[str]:
    return list((tree or {}).get("patches", {}).get("off") or ())
