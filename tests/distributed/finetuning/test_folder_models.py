"""The model that `tpi score FOLDER` composes from a folder's config.json. Some of the fields are Bridge's."""

import json

import pytest

from tests import hf_folders
from tp_invariant_recipes.sources import hf_models, weights


@pytest.mark.parametrize("family", hf_models.FAMILIES, ids=lambda family: family.architecture)
def test_it_has_the_sizes_of_the_folder(tmp_path, family):
    """Here twice the layers, and half the vocabulary, of the model that it is like."""
    like = hf_folders.model_section(family.like, *family.without)
    assert hf_models.family_of(like) == family
    config = hf_models.config_of(family, like, "bfloat16")
    changed = {"num_hidden_layers": 2 * config["num_hidden_layers"], "vocab_size": config["vocab_size"] // 2}
    if "layer_types" in config:
        changed["layer_types"] = config["layer_types"] * 2
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    (tmp_path / "model.safetensors").write_bytes(hf_folders.file({}))
    name, sizes = hf_models.model_of(weights.read(tmp_path))
    result = hf_folders.model_section(name, *sizes)
    assert hf_models.family_of(result) == family
    read = family.sizes(result)
    assert {key: read[key] for key in ("num_hidden_layers", "vocab_size")} == {
        key: changed[key] for key in ("num_hidden_layers", "vocab_size")
    }
    assert read == hf_models._sizes(family, hf_models._config(tmp_path))
