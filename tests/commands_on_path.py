# SPDX-License-Identifier: Apache-2.0
"""Small programs of bash that stand for commands on PATH, and note how they are called."""

import os
from pathlib import Path

import pytest


class CommandsOnPath:
    """folder: holds them; it comes before all others on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(self, name: str, body: str = "") -> None:
        """body: what it does, in bash."""
        file = self.folder / name
        file.write_text(f'#!/bin/bash\necho "$*" >>{self.folder}/{name}.said\n{body}\n')
        file.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        """The arguments of each call of a command."""
        file = self.folder / f"{name}.said"
        return file.read_text().splitlines() if file.exists() else []
