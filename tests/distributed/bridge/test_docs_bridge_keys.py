"""Bridge's fields that the documents name are fields of the installed Bridge."""

import re
from functools import cache

import pytest

from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.settings.sections import OWN_KEYS

pytestmark = pytest.mark.usefixtures("bridge")

NAMED = re.compile(rf"(?<![\w./@-])({'|'.join(schema.BRIDGE_SECTIONS)})\.([a-z]\w*)(?![\w/(.])")  # no file, no call
MODELS = ("qwen3_toy", "nemotron3_nano_toy", "moonlight_toy")  # of each provider one


def named(text: str) -> set[tuple[str, str]]:
    others = ("py", "md", "json", "jsonl", "yaml", "step")  # endings of files; torch's optimizer.step
    return {(section, field) for section, field in NAMED.findall(text) if field not in others}


@cache
def known() -> frozenset[tuple[str, str]]:
    """Every `section` and `field` of some model's configuration."""
    results = set()
    trees = [compose(model, device="gpu").config.sections for model in MODELS]
    trees.append(compose("qwen3_toy", parse_all(["peft=lora", "weights=folder"]), device="gpu").config.sections)
    for tree in trees:
        for section in schema.BRIDGE_SECTIONS.keys() & tree.keys():
            results |= {(section, name) for name in schema.fields(schema.section_class(section, tree))}
    results |= {("dataset", name) for name in schema.fields(schema.bridge_class(schema.SFT_DATASET))}
    return frozenset(results)


def unknown(keys: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of `section` and `field` that no model's configuration has."""
    return {(section, name) for section, name in keys - known() if f"{section}.{name}" not in OWN_KEYS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_key_of_bridges_exists(document):
    assert unknown(named("\n".join((*document.spans, *document.code)))) == set()


def test_a_key_that_does_not_exist_is_seen():
    keys = named("`model.num_layer=3 optimizer.clip_grad=1.0` tokenizer.vocab_includes_eod and model.yaml")
    assert unknown(keys) == {("model", "num_layer")}
