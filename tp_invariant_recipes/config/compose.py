"""Compose `conf/` and the command line's overrides into a RunConfig, with every mistake in one message."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.check import functions, relations, switched_off
from tp_invariant_recipes.check.configuration import check
from tp_invariant_recipes.config import adjusted, graph_choice, hydra_tree
from tp_invariant_recipes.config.identity import flat
from tp_invariant_recipes.config.override_rules import sound_overrides
from tp_invariant_recipes.config.overrides import Override, of_two_keys, parse, parse_all
from tp_invariant_recipes.config.recipe_question import question, read_recipe
from tp_invariant_recipes.config.sections import RECIPES_OWN, checked_sections
from tp_invariant_recipes.errors import OR_STOCK, ConfigError, lines, refuse
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.nearest import nearest
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing import room
from tp_invariant_recipes.sources import recipe_answers, recipe_process, recipe_source


@dataclass(frozen=True)
class Composed:
    """A run as composed.

    model:     the model's name.
    overrides: as requested.
    config:    plain dicts and lists, interpolations resolved.
    graphs:    the option that cuda_graph=auto has become, and for off the reason; None: the run names one.
    """

    model: str
    overrides: tuple[Override, ...]
    config: RunConfig
    graphs: str | None = None


def compose(
    model: str,
    overrides: Sequence[str | Override] = (),
    *,
    device: str | None = None,
    numerics: str | None = None,
    also: Callable[[RunConfig], list[str]] | None = None,
) -> Composed:
    """Compose a run of `model`: one of ours, or `recipe=…` (sources/recipe_source.py), which imports Bridge.

    overrides: `key=value` with short keys, Hydra groups, or the dotted path of any field of Bridge's; `cluster=FILE` of
               YAML is a cluster that lies anywhere.
    device, numerics: the options of these groups where the overrides name none, such as "cpu" and "stock".
    also: lists what else is wrong with the configuration, such as files that are missing on this machine.
    Raises ConfigError listing every problem that can be found without building the model.
    """
    if recipe_source.is_recipe(model):
        model = recipe_source.absolute(model) or model
        with suppress(ConfigError):  # `_compose` lists it with the other problems
            if recipe_process.forks():
                asked = question(model, parse_all(overrides))
                recipe_answers.prepare(model, *asked, hf_folder=asked[1])
    return recipe_process.run(model, lambda: _compose(model, overrides, device, numerics, also))


def _compose(
    model: str,
    overrides: Sequence[str | Override],
    device: str | None,
    numerics: str | None,
    also: Callable[[RunConfig], list[str]] | None,
) -> Composed:
    """As `compose`, in a process that may call the recipe."""
    problems = conf_files.problems()
    requested = parse_all(overrides)
    known = _is_known(model, requested, problems)
    problems += of_two_keys(requested)
    sound = sound_overrides(model, requested, problems)
    defaults = {"device": device, "numerics": numerics}
    sound += [
        parse(f"{group}={option}")
        for group, option in defaults.items()
        if option is not None and not any(o.path == group for o in sound)
    ]
    if known:
        sections, accepted = checked_sections(model, sound, problems)
        composed = RunConfig(sections)
        with _covered(model, problems):
            config = _adjusted(model, sound, composed)
            problems += lines(check(config))
            typed = [override.path for override in accepted]
            of_typed = (relations.unpadded, switched_off.idle, functions.unknown)
            problems += lines(problem for rule in of_typed for problem in rule(config, typed))
            problems += also(config) if also else []
    if OR_STOCK in problems and not _stock_takes(model, sound, problems):
        problems.remove(OR_STOCK)
    refuse(problems)
    chosen = None
    if graph_choice.decides(sound, recipe=recipe_source.is_recipe(model)):
        config, chosen = _with_graphs(model, sound, composed, config)
    return Composed(model, tuple(requested), config, chosen)


def _stock_takes(model: str, sound: Sequence[Override], problems: Collection[str]) -> bool:
    """Whether numerics=stock meets no problem of its own: one that is not among these."""
    others = [override for override in sound if override.path.partition(".")[0] != "numerics"]
    wrong: list[str] = []
    with suppress(ConfigError):  # which has its problems in `wrong` already
        sections, _ = checked_sections(model, [*others, parse(f"numerics={STOCK}")], wrong)
        wrong += lines(check(RunConfig(sections)))
    return not {*wrong} - {*problems}


def _is_known(model: str, overrides: Sequence[Override], problems: list[str]) -> bool:
    """Whether there is such a model, or a recipe can be read. Why not is added to `problems`."""
    if recipe_source.is_recipe(model):
        try:
            read_recipe(model, overrides)
        except ConfigError as error:
            problems += error.problems
            return False
        return True
    models = conf_files.options("model")
    if model in models:
        return True
    first = f"; the model comes first: MODEL {model}" if "=" in model else nearest(model, models)
    problems.append(_folder(model) or f"unknown model '{model}'{first or '; tpi models lists all'}")
    return False


def _folder(model: str) -> str | None:
    """Say what takes a folder that was typed as a model; None: it is no run and has no weights."""
    if RunDir(Path(model)).run.is_file():
        return (
            f"{model} is a run, not a model: tpi report {model} shows it, tpi train --resume {model} continues it, "
            f"tpi show --from {model} prints its configuration"
        )
    weights = f"{model} is a folder of weights, not a model: type weights={model} in the model's place"
    return weights if (Path(model) / "config.json").is_file() else None


def _with_graphs(model: str, sound: Sequence[Override], composed: RunConfig, eager: RunConfig) -> tuple[RunConfig, str]:
    """Return the run with the first kind of CUDA graphs that it allows, and which that is.

    composed: without graphs, as Hydra has it. eager: the same, adjusted.
    """
    why = graph_choice.why_eager(eager)
    if why is None:
        refused: list[str] = []
        unwanted: list[str] = []
        for option in graph_choice.OPTIONS:
            wrong: list[str] = []
            with suppress(ConfigError):  # which has its problems in `wrong` already
                config = _adjusted(model, sound, _captured(model, sound, composed, option, wrong))
                wrong += lines(check(config))
                beyond = graph_choice.beyond(config, option)
                if not wrong and not beyond:
                    if (need := room.tight(config, here=True)) is None:
                        return config, option
                    why = why or f"memory is tight: with graphs this run needs {need}"
                unwanted += beyond
            refused += wrong
        # What solves a later problem may name an option that was refused before.
        why = why or next(iter([*refused, *reversed(unwanted)]), "no kind can be composed")
    return eager, f"{graph_choice.OFF}: {why}"


def _captured(
    model: str, sound: Sequence[Override], composed: RunConfig, option: str, problems: list[str]
) -> RunConfig:
    """Return the run with an option of `cuda_graph`.

    Hydra composes again only where other files may set the same fields.
    """
    others = [override for override in sound if override.path != graph_choice.GROUP]
    if not (recipe_source.is_recipe(model) or graph_choice.files_may_set_graphs(sound)):
        return graph_choice.captured(composed, option, {path for override in others for path in _types(override)})
    sections, _ = checked_sections(model, [*others, parse(f"{graph_choice.GROUP}={option}")], problems)
    return RunConfig(sections)


def _adjusted(model: str, sound: Sequence[Override], config: RunConfig) -> RunConfig:
    """Return the run of a recipe with what the invariant numerics set otherwise (config/adjusted.py)."""
    if not (recipe_source.is_recipe(model) and config.numerics.invariant and config.numerics.adjust):
        return config
    recipe = read_recipe(model, sound)
    typed = {path for override in sound for path in _types(override)}
    config, changes = adjusted.adjust(config, typed, recipe.variables, recipe.preset)
    return RunConfig({**config.sections, "recipe": {**config.section("recipe"), "adjusted": changes}})


def _types(override: Override) -> tuple[str, ...]:
    """Return the paths that an override sets.

    A numerics' name leaves its other fields, such as V and C, as they are.
    """
    if override.group and override.path == "numerics":
        return ("numerics.mode",)
    if not (override.group and override.path in RECIPES_OWN):
        return (override.path,)
    return (override.path, *flat(hydra_tree.written(override.path, override.value)))


@contextmanager
def _covered(model: str, problems: list[str]) -> Iterator[None]:
    """Add a problem where a recipe lacks a field that the rules need."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if not recipe_source.is_recipe(model):
            raise
        problems.append(
            f"{model}: unsupported recipe: it lacks a field that tpi's rules need ({type(error).__name__}: {error}); "
            f"tpi does not cover this recipe"
        )
