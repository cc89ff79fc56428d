# SPDX-License-Identifier: Apache-2.0
"""Keys and groups: each that the documents name exists, and each of our own is documented."""

import dataclasses
import json
import re

from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.sections import OWN_KEYS, OWN_SECTIONS

# A section and a field, at the beginning of a word.
NAMED = re.compile(rf"(?<![\w./@-])({'|'.join(OWN_SECTIONS)})\.([a-z_]+(?:[.-][\w.-]+)?)")
FILES = re.compile(r"\.(?:md|py|ya?ml|jsonl?|png|html|gz|log|conf|sbatch)$|^(?:conf|py|md|jsonl?|ya?ml|html)$")
ALTERNATIVES = re.compile(r"(\w+)=(\w+(?:\|\w+)+)")  # data=mock|text
# A field that its group chooses, so that the documents say `device=cpu`.
CHOSEN = {"device.kind", "launcher.kind", "logging.kind", "data.kind", "numerics.mode", "cluster.name", "guard.kind"}
KEYS = [f"{section}.{field.name}" for section, cls in OWN_SECTIONS.items() for field in dataclasses.fields(cls)]
GROUPS = {group: options for group, options in conf_files.groups().items() if group != "model"}


def code(document) -> str:
    return "\n".join((*document.spans, *document.code))


EVERYTHING = "\n".join(map(code, DOCUMENTS))


def keys_named(text: str) -> set[str]:
    """Our own keys that a text names, without what follows a mapping's key."""
    results = {(section, rest) for section, rest in NAMED.findall(text) if not FILES.search(rest)}
    return {f"{section}.{re.split('[.-]', rest)[0]}" for section, rest in results}


def test_a_key_of_tpi_exists():
    for document in DOCUMENTS:
        messages = [row[0] for header, rows in document.tables if header[0] == "message" for row in rows]  # of mistakes
        named = keys_named(code(document)) - keys_named("\n".join(messages))
        assert named - {*KEYS, *OWN_KEYS} == set(), document.name
    text = "`slurm.tires=3 cluster.environment.NCCL_DEBUG=x` run.json docs/numerics.md ledger.replaced-1.jsonl"
    assert keys_named(text) == {"slurm.tires", "cluster.environment"}


def test_a_key_of_tpi_is_documented():
    patterns = {
        key: rf"{key.partition('.')[0]}=" if key in CHOSEN else rf"(?<![\w.]){re.escape(key)}(?!\w)"
        for key in (*KEYS, *OWN_KEYS)
    } | {key: rf"(?<![\w.-]){key}(?![\w.-])" for key in SHORT_KEYS}
    assert [key for key, pattern in patterns.items() if not re.search(pattern, EVERYTHING)] == []


def test_a_group_and_its_options_are_documented():
    listed = {group: set() for group in GROUPS}
    for group, options in ALTERNATIVES.findall(EVERYTHING):
        listed[group].update(options.split("|"))
    assert listed == {group: set(options) for group, options in GROUPS.items()}


TABLES = [table for document in DOCUMENTS if document.name == "docs/configuration.md" for table in document.tables]
DEFAULTS = [
    (key, row[1].strip("`"))
    for header, rows in TABLES
    for row in rows
    for key in re.findall(r"`([a-z_]+\.[a-z_]+)`", row[0])
    if header[0] == "key" and re.fullmatch(r"`?(?:null|true|false|\d+|\[\]|\{\})`?", row[1])
]


def test_a_documented_default_is_the_codes():
    assert len(DEFAULTS) > 10
    for key, default in DEFAULTS:
        section, _, name = key.partition(".")
        (field,) = (field for field in dataclasses.fields(OWN_SECTIONS[section]) if field.name == name)
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert default == (str(value) if isinstance(value, list | dict) else json.dumps(value)), key
