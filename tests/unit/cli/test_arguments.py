"""Arguments that several commands share."""

import pytest

from tp_invariant_recipes.cli.arguments import of_model


def test_a_recipe_has_the_whole_path_of_its_file(tmp_path, monkeypatch):
    """A job reads it in another directory."""
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert of_model("recipe=mine.py:small") == f"recipe={tmp_path / 'mine.py'}:small"


@pytest.mark.parametrize("model", (None, "qwen3_toy", "weights=folder"))
def test_another_model_is_as_typed(model):
    assert of_model(model) == model
