"""What mkdocs.yml cannot say: which files are pages, the list of API pages, and the lines of our docstrings."""

import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tp_invariant_recipes"
PAGES = ("*.md", "slurm/*.md", "docs/**/*.md", "docs/images/*", "examples/**/*.py", "examples/*.yaml")


def modules() -> list[str]:
    """The dotted names of all modules, without the package itself."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)
    return [name for name in names if name != PACKAGE and not name.rpartition(".")[2].startswith("_")]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the API reference to the navigation, one section for each folder of the package."""
    sections: dict[str, list[dict[str, str]]] = {}
    for name in modules():
        folder, _, title = name.removeprefix(f"{PACKAGE}.").partition(".")
        sections.setdefault(folder, []).append({title or folder: f"api/{name}.md"})
    config.nav.append({"API": [{folder: pages} for folder, pages in sections.items()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give the pages their paths in the repository, so that links between README and docs/ work in both places."""
    theme = [file for file in files if file.generated_by or not file.src_uri.endswith((".md", ".png"))]
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern) if path.is_file()})
    written = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in pages]
    api = [File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {name}\n") for name in modules()]
    return Files([*theme, *written, *api])


def on_post_build(config: MkDocsConfig) -> None:
    """Let a search find a module by its name and its members', and explanations on pages that people wrote."""
    file = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(file.read_text())
    written = [entry for entry in index["docs"] if not entry["location"].startswith("api/")]
    members: dict[str, list[str]] = {}
    for entry in index["docs"]:
        page, _, anchor = entry["location"].partition("#")
        if page.startswith("api/"):
            members.setdefault(page, []).extend([entry["title"]] if "." in anchor else [])
    titles = {page: page.removeprefix("api/").removesuffix(".html") for page in members}
    reference = [{"location": page, "title": titles[page], "text": " ".join(names)} for page, names in members.items()]
    file.write_text(json.dumps({**index, "docs": [*written, *reference]}))


class Lines(griffe.Extension):
    """A line `tokens: [rows, features], fp32` of a docstring stays a line of its own; its links are as in docs/."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"(?<!\n)\n(?=[\w, ]+: )", "  \n", obj.docstring.value)
            obj.docstring.value = re.sub(r"\]\((?=[\w-]+\.md)", "](../docs/", text)
