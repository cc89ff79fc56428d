"""Versions: pyproject.toml, the locks and the documents name the same ones, and `tpi doctor` asks for no other."""

import re
import tomllib

from tests.unit.docs.markdown import DOCUMENTS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = {
    name: version
    for file in sorted((ROOT / "scripts" / "lock" / "x86_64").glob("*.txt"))
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE)
}

# As documents call them -> distribution. What follows the name there, if it is a version, is the pinned one.
CALLED = {
    "Megatron-Bridge": "megatron-bridge",
    "Bridge": "megatron-bridge",
    "megatron-bridge": "megatron-bridge",
    "Megatron-Core": "megatron-core",
    "torchvision": "torchvision",
    "nvidia-resiliency-ext": "nvidia-resiliency-ext",
    "PyTorch": "torch",
    "Transformer Engine": "transformer-engine",
}
NAMED = re.compile(rf"\b({'|'.join(CALLED)})\b(?:\*\*|`)?:? ?(?:==)?\s?(\d+\.\d+\.\d+)")


def versions_named(text: str) -> list[tuple[str, str]]:
    """Distributions and versions that a text names."""
    return [(CALLED[name], version) for name, version in NAMED.findall(text)]


def test_a_version_in_the_documents_is_the_locked_one():
    for document in DOCUMENTS:
        if document.name in ("README.md", "docs/install.md"):
            assert [(n, v) for n, v in versions_named(document.text) if LOCKED[n] != v] == [], document.name


def test_one_python():
    (version,) = re.findall(r">=(3\.\d+)", PROJECT["requires-python"])
    tools = (ROOT / "pyproject.toml").read_text()
    assert f'python_version = "{version}"' in tools
    assert f'target-version = "py{version.replace(".", "")}"' in tools
    bootstrap = (ROOT / "scripts" / "bootstrap").read_text()
    assert set(re.findall(r"\bpython(3\.\d+)", bootstrap)) == {version}
    for document in DOCUMENTS:
        assert set(re.findall(r"\bPython (3\.\d+)", document.text)) <= {version}, document.name
