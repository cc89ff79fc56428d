# SPDX-License-Identifier: Apache-2.0
"""What mkdocs.yml cannot say: which files are pages, and the page of the API reference."""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import tp_invariant_recipes as tpi

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tp_invariant_recipes"
REFERENCE = "api-reference.md"
PAGES = ("*.md", "slurm/*.md", "docs/**/*.md", "docs/images/*", "docs/data/*", "examples/**/*.py", "examples/*.[yi]*")


def reference() -> str:
    """The page of the API reference: every public name, from its docstring."""
    parts = [f"## `tpi.{name}`\n\n::: {PACKAGE}.{tpi._HOME[name]}.{name}\n" for name in tpi.__all__]
    return "\n".join(["# API reference\n", *parts])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give the pages their paths in the repository, so that links between README and docs/ work in both places."""
    theme = [file for file in files if file.generated_by or not file.src_uri.endswith((".md", ".png"))]
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern) if path.is_file()})
    written = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in pages]
    return Files([*theme, *written, File.generated(config, REFERENCE, content=reference())])


def on_post_build(config: MkDocsConfig) -> None:
    """Let a search find a name of the API by its title, and explanations on pages that people wrote."""
    file = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(file.read_text())
    for entry in index["docs"]:
        if entry["location"].startswith(Path(REFERENCE).stem):
            entry["text"] = ""
    file.write_text(json.dumps(index))
