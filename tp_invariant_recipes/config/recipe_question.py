"""What a run asks of its recipe, and the answer."""

from collections.abc import Sequence
from pathlib import Path

from tp_invariant_recipes.config.overrides import Override, given
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.sources import recipe_layer


def read_recipe(model: str, overrides: Sequence[Override]) -> recipe_layer.RecipeAnswer:
    """Return the lowest layer of the configuration, and more. Raises ConfigError."""
    return recipe_layer.read_recipe(*question(model, overrides))


def question(model: str, overrides: Sequence[Override]) -> tuple[str, str | None, bool]:
    """Return the arguments of `recipe_layer.read_recipe`. Raises ConfigError."""
    data = given(overrides, "data")
    return model, hf_folder(overrides), data is not None and data.value == "text"


def hf_folder(overrides: Sequence[Override]) -> str | None:
    """Return the absolute path of `recipe.hf_folder`. Raises ConfigError: there is no configuration."""
    requested = given(overrides, "recipe.hf_folder")
    if requested is None or not requested.single or requested.data is None:
        return None
    folder = Path(str(requested.data)).expanduser().absolute()
    if not (folder / "config.json").is_file():
        why = "no config.json there" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{requested.text}: {why}")
    return str(folder)
