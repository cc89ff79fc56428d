# SPDX-License-Identifier: Apache-2.0
"""Every two features meet: a pair trains a step, or is refused before the start with the key to change."""

import contextlib
import io
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from tests import hf_folders
from tests.distributed.features import AXES, Pair, pairs
from tests.forks import Tpi
from tp_invariant_recipes.config import container
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError, TpiError

ALL = [*pairs()]
FEW = ALL[::181]  # of `make test`
GROUPS = [(row, later) for axis, later in combinations(AXES, 2) for row in AXES[axis]]
KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*=|leave |unset |model\.[a-z_]+|MODEL |needs ")


def folder_of(pair: Pair, home: Path) -> str:
    """A checkpoint of the pair's model; of another's where its family has none, which is refused by its name."""
    folder = home / pair.model
    if pair.needs_weights and not folder.exists():
        try:
            hf_folders.make(folder, hf_folders.model_section(pair.model, *pair.sizes))
        except (AssertionError, TpiError, KeyError):
            hf_folders.make(folder, hf_folders.model_section("qwen3_toy"))
    return str(folder)


def refusal(pair: Pair, weights: str) -> str | None:
    """What `tpi train --dry-run` refuses a pair for, Bridge's validation included; None: it may start."""
    overrides = pair.overrides(weights)
    device = "gpu" if "device=gpu" in overrides else "cpu"
    try:
        composed = compose(pair.model, overrides, device=device)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            made = container.build(composed.config.with_fields("checkpoint", save=weights))  # as a run has it
            typed = {override.path for override in composed.overrides}
            container.validate(made, composed.config.layout.world, here=device == "cpu", typed=typed)
    except ConfigError as error:
        return str(error)
    return None


def outcome(tpi: Tpi, pair: Pair, weights: str) -> str:
    """`trained` or `refused`, or what failed in a rank."""
    run = tpi.folder / f"run-{tpi.count}"
    done = tpi("train", pair.model, *pair.overrides(weights), f"run.dir={run}")
    if done.status == 0:
        return "trained"
    if done.status == 2 and not run.exists() and "defect of tpi" not in done.stderr:
        return "refused"
    logs = "\n".join(log.read_text()[-1500:] for log in sorted(run.glob("logs/rank-*.log")))
    return f"failed: {pair}\n{done.stderr[-1500:]}\n{logs}"


@pytest.mark.parametrize("pair", FEW, ids=str)
def test_a_pair_of_features_is_taken_or_refused_with_a_key(bridge, pair, tmp_path):
    message = refusal(pair, folder_of(pair, tmp_path))
    assert message is None or KEY.search(message), message


@pytest.mark.release
def test_each_pair_is_taken_or_refused_with_a_key(bridge, tmp_path_factory):
    home, wrong, taken = tmp_path_factory.mktemp("weights"), [], 0
    for pair in ALL:
        message = refusal(pair, folder_of(pair, home))
        taken += message is None
        if message is not None and not KEY.search(message):
            wrong.append(f"{pair}: {message}")
    assert not wrong, "\n".join(wrong)
    assert 0 < taken < len(ALL)


@pytest.mark.release
@pytest.mark.parametrize("first, axis", GROUPS)
def test_each_pair_trains_a_step_or_is_refused_before_the_start(families, shared, first, axis):
    """In groups, each of which takes minutes. `-rP` prints how many trained."""
    group = [pair for pair in ALL if pair.first == first and pair.second in AXES[axis]]
    ended = Counter(outcome(shared, pair, folder_of(pair, shared.folder)) for pair in group)
    failed = [text for text in ended if text.startswith("failed")]
    print(f"{first}  x  {axis}: {ended['trained']} trained, {ended['refused']} refused, {len(failed)} failed")
    assert not failed, "\n\n".join(failed)
