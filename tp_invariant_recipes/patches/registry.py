# SPDX-License-Identifier: Apache-2.0
"""The patches, one row each. `applied` applies those that the installed packages and the run need, for a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tp_invariant_recipes import replacement
from tp_invariant_recipes.errors import ConfigError, Problem, lines
from tp_invariant_recipes.patches import bridge, core, te_grouped
from tp_invariant_recipes.patches.patch import Patch, PatchVerdict
from tp_invariant_recipes.start import lazy_imports

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig

PATCHES: tuple[Patch, ...] = (
    *core.CHECKPOINTS, *core.GRADIENTS, *bridge.PATCHES, te_grouped.PATCH, *te_grouped.PATCHES,
)  # fmt: skip


def verdicts(off: Sequence[str] = ()) -> list[tuple[Patch, PatchVerdict]]:
    """Every patch with its verdict on this machine. Imports none of the patched packages."""
    return [(patch, patch.verdict(patch.name in off)) for patch in PATCHES]


def problems(config: RunConfig | None = None) -> list[Problem]:
    """Return the patch problems of a run: unknown names in `patches.off`, and refused patches that the run needs.

    config: of the run; None: it is unknown, and the run counts as using all installed code.
    """
    off = config.patches.off if config else []
    known = [patch.name for patch in PATCHES]
    unknown = [
        Problem(f"patches.off={name}", "no such patch", f"the patches are {', '.join(known)}")
        for name in off
        if name not in known
    ]
    return unknown + [
        Problem(
            "",
            f"{verdict.reason} and needs patch {patch.name} ({patch.why}): install a version that docs/patches.md "
            f"lists, or train without the patch: patches.off=[{patch.name}]",
        )
        for patch, verdict in verdicts(off)
        if verdict.state == "refused" and patch.concerns(config)
    ]


@contextmanager
def applied(config: RunConfig | None = None, unused: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Apply the patches that the installed packages and the run need; yield their names.

    config: as in `problems`. unused: beginnings of modules that this process never uses, and that are not imported.
    Raises ConfigError, and applies none, when the run needs a refused patch or `patches.off` has an unknown name.
    """
    if wrong := lines(problems(config)):
        raise ConfigError("\n".join(wrong), wrong)
    off = config.patches.off if config else []
    chosen = [patch for patch, verdict in verdicts(off) if verdict.state == "applies" and patch.concerns(config)]
    with lazy_imports.in_parts("megatron.bridge"):  # a target lies in a family of models: no need for the others
        restore = replacement.apply(
            r for patch in chosen for r in patch.replacements if not r.target.startswith(unused)
        )
    try:
        yield [patch.name for patch in chosen]
    finally:
        restore()
