# SPDX-License-Identifier: Apache-2.0
"""Files for GitHub parse, and each workflow says in its head what has not been run."""

from pathlib import Path

import pytest
import yaml

GITHUB = Path(__file__).resolve().parents[3] / ".github"


@pytest.mark.parametrize("file", sorted(GITHUB.rglob("*.yml")), ids=lambda file: file.name)
def test_it_parses(file):
    text = file.read_text()
    parsed = yaml.safe_load(text)
    if file.parent.name == "workflows":
        assert all(job["steps"] for job in parsed["jobs"].values())
        assert "run" in text.partition("\nname:")[0]
