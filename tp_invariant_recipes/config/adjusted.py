# SPDX-License-Identifier: Apache-2.0
"""What a recipe says of how a model is computed and the invariant numerics compute otherwise: one row a field.

A row costs no part of the result: the model, the data and the optimizer stay what they are. `numerics.adjust=true` sets
these fields right and says so; `false` refuses them. A field that the command line sets is refused in any case.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.check import cuda_graphs as graph_rules
from tp_invariant_recipes.check import layout, relations
from tp_invariant_recipes.check.invariant import invariance, shards
from tp_invariant_recipes.check.invariant import model as model_rules
from tp_invariant_recipes.check.invariant import modes as mode_rules
from tp_invariant_recipes.check.rule import Rule, broken_rules
from tp_invariant_recipes.fields.catalogue import adjustable
from tp_invariant_recipes.fields.field import NOT_SET, BridgeField, as_text
from tp_invariant_recipes.settings import (
    cuda_graphs,
    delta_net,
    environment,
    expert_groups,
    finetuning,
    muon,
    run_config,
)
from tp_invariant_recipes.settings.run_config import RunConfig

KEY = "numerics.adjust"
PRECISION = "mixed_precision"
_VARIABLES = "cluster.environment"

_GRAPHS = "the invariant layers cannot be captured so"
_CPU = "it needs a GPU"
_CONTEXT = "so many ranks have whole heads, or whole sequences where nothing cuts them"
_STAGES = "pp does not divide the layers"


@dataclass(frozen=True)
class Adjustment:
    """paths: of fields. value: what they become, or a function of the run. why: the reason; empty: the problem's.
    wrong: of the run and a field's value, whether it is to be adjusted, or the problems. unset: whether a field that
    the recipe does not set may be wrong, too. objects: whether an object there is wrong, which no tree holds.
    """

    value: Any
    why: str
    paths: tuple[str, ...]
    wrong: Callable[[RunConfig, Any], Any]
    unset: bool = False
    objects: bool = False


def _row(
    value: Any,
    why: str,
    paths: str,
    wrong: Callable[[RunConfig, Any], Any] | None = None,
    *,
    unset: bool = False,
    objects: bool = False,
) -> Adjustment:
    """Return a row of fields whose other values are refused."""
    wrong = wrong or (lambda t, was: (was or None) != (value or None))
    return Adjustment(value, why, tuple(paths.split()), wrong, unset, objects)


def _of_field(path: str, field: BridgeField) -> Adjustment:
    """Return the adjustment of a field whose row in the catalogue says what other values become."""
    return Adjustment(field.adjust_to, field.why, (path,), lambda t, was: not field.allowed.accepts(was), objects=True)


def _of_rule(rule: Rule[RunConfig]) -> list[Adjustment]:
    """Return the adjustments of a rule that says what a recipe gets in place of what it refuses."""
    return [Adjustment(to.value, to.why, (to.path,), lambda t, was: rule.problems(t), to.unset) for to in rule.adjust]


def _variable(variable: environment.Variable) -> Adjustment:
    value = next((value for value in (variable.value, *variable.accepted) if value is not None), NOT_SET)

    def wrong(config: RunConfig, was: Any) -> bool:
        return config.device.kind in variable.devices and was not in (variable.value, *variable.accepted)

    return Adjustment(value, variable.why, (f"{_VARIABLES}.{variable.name}",), wrong)


def _recomputed(config: RunConfig) -> list[str]:
    """Return what is computed again of what a recipe names: not within a CPU's experts, nor in gated delta nets."""
    kept = {delta_net.RECOMPUTED} | ({"moe_act"} if config.device.kind == "cpu" else set())
    return [module for module in config.model.get("recompute_modules") or () if module not in kept]


def _capturable(config: RunConfig) -> list[str]:
    """Return the modules that a recipe captures and the invariant numerics can; all that they can where it names
    objects.
    """
    modules = config.model.get("cuda_graph_modules") or cuda_graphs.graphed_modules(config.model, invariant=True)
    return [module for module in modules if module not in cuda_graphs.NOT_INVARIANT]


def _cannot_capture(config: RunConfig, was: Any) -> bool:
    return cuda_graphs.requested(config.model) and bool(
        finetuning.adapts(config)
        or finetuning.packing(config) is not None
        or config.model.get(model_rules.MULTI_TOKEN)
        or config.model.get(model_rules.LATENT)
        or config.model.get("moe_router_load_balancing_type") == model_rules.GLOBAL
        or broken_rules(config, graph_rules.RULES)
        or any(limit.broken(config) for limit in mode_rules.GRAPH_LIMITS)
    )


def _largest_cp(config: RunConfig) -> int:
    """Return the largest cp, up to the recipe's, for which V shards share the heads; 1 where a model has no context
    shards.
    """
    cp, shards = config.layout.cp, config.numerics.virtual_shards
    whole = config.with_fields("model", context_parallel_size=1).with_fields("numerics", context_shards=1)
    limits = (
        limit for limit in invariance.LIMITS if limit not in mode_rules.GRAPH_LIMITS
    )  # graphs are left out instead
    if any(limit.broken(config) and not limit.broken(whole) for limit in limits):
        return 1
    return min(cp, max(1, shards // config.layout.tp)) if isinstance(shards, int) else cp


def _lists_other_stages(config: RunConfig, was: Any) -> bool:
    return bool(was) and any(problem.rule == "layers" for problem in broken_rules(config, layout.RULES))


def _of_stage(end: int) -> Callable[[RunConfig], int | None]:
    """Return the layers of the first (0) or the last stage (1); None: the recipe says it, or pp divides the layers."""
    return lambda t: (run_config.uneven_ends(t) or (None, None))[end]


def _is_unsaid(end: int) -> Callable[[RunConfig, Any], bool]:
    def unsaid(config: RunConfig, was: Any) -> bool:
        return was in (None, NOT_SET) and _of_stage(end)(config) is not None

    return unsaid


def _is_above(config: RunConfig, cp: Any) -> bool:
    return cp not in (None, 1) and cp > _largest_cp(config)


def _is_old_layer_wise(config: RunConfig, was: Any) -> bool:
    """Whether the optimizer's old name alone says that it is layer-wise, and it can be."""
    named = config.section("optimizer").get("optimizer") == muon.OLD_NAME
    return named and not was and not muon.owns_copies(config)


def _graphed(config: RunConfig) -> list[str] | None:
    """Return the modules that Transformer Engine's graphs capture."""
    te = config.model.get("cuda_graph_impl") == cuda_graphs.TE
    return cuda_graphs.graphed_modules(config.model, config.numerics.invariant) if te else None


def _vocabulary(config: RunConfig) -> int | None:
    """Return the vocabulary of a model that has its tokenizer's: as Bridge pads it under stock, and otherwise as at
    tp=1.
    """
    size, multiple = config.at("tokenizer.vocab_size"), config.model.get("make_vocab_size_divisible_by") or 1
    if not isinstance(size, int):
        return None
    multiple *= 1 if config.numerics.invariant else config.layout.tp
    return -(-size // multiple) * multiple


ROWS: tuple[Adjustment, ...] = (
    *(_of_field(path, field) for path, field in adjustable()),
    # Without FSDP the optimizer is as sharded as the recipe says.
    _row(False, "DistributedDataParallel computes the same bits, for any numerics.data_shards", "ddp.use_megatron_fsdp "
         "dist.use_megatron_fsdp"),
    _row("torch_dist", "only FSDP has that format", "checkpoint.ckpt_format",
         lambda t, was: was == run_config.FSDP_FORMAT and not t.fsdp),
    # The flag first: the new name does not say it.
    _row(True, "the old name has it", f"optimizer.{muon.LAYER_WISE}", _is_old_layer_wise, unset=True),
    _row(muon.MUON, "Megatron-Core's new name", "optimizer.optimizer", lambda t, was: was == muon.OLD_NAME),
    *(row for rule in (*relations.RULES, *invariance.RULES) for row in _of_rule(rule)),
    _row("float32", "only that Adam has other moments", "optimizer.exp_avg_dtype optimizer.exp_avg_sq_dtype",
         lambda t, was: (was or "float32") != "float32"
         and not t.section("optimizer").get("use_precision_aware_optimizer")),
    _row(False, "attention is causal, and nobody reads the data's mask", "dataset.create_attention_mask"),
    _row("fp32", "Megatron-Core's name of it", "model.moe_router_dtype", lambda t, was: was == "float32"),
    _row(False, "whether it is faster depends on the machine", f"model.{run_config.COMBINED} "
         f"{run_config.OVERLAPS}.{run_config.COMBINED}", lambda t, was: was),
    _row(True, "two interleaved stages would take each other's messages", "model.overlap_p2p_comm",
         lambda t, was: not was and (t.model.get("virtual_pipeline_model_parallel_size") or 1) > 1),
    _row(False, "messages that overlap are not in a batch", "model.batch_p2p_comm",
         lambda t, was: was and t.model.get("overlap_p2p_comm")),
    # The result is the same for any cp. C first: it follows cp where nobody has typed it.
    _row(_largest_cp, _CONTEXT, "numerics.context_shards", lambda t, was: was == t.layout.cp and _is_above(t, was)),
    _row(_largest_cp, _CONTEXT, "model.context_parallel_size", _is_above),
    # So it is for any pp.
    _row(None, "it lists the stages of another pp", "model.pipeline_model_parallel_layout", _lists_other_stages),
    *(_row(_of_stage(end), _STAGES, f"model.{field}", _is_unsaid(end), unset=True)
      for end, field in enumerate(run_config.UNEVEN)),
    _row(expert_groups.groups_of_run, "it follows the layout", "numerics.expert_groups",
         lambda t, was: was not in (None, expert_groups.groups_of_run(t))),
    _row(_recomputed, "the layers of this run keep it", "model.recompute_modules",
         lambda t, was: bool(was) and _recomputed(t) != [*was]),
    _row(_capturable, _GRAPHS, "model.cuda_graph_modules",
         lambda t, was: t.model.get("cuda_graph_impl") == cuda_graphs.TE and _capturable(t) not in (was, []),
         objects=True),
    _row("none", _GRAPHS, "model.cuda_graph_impl", _cannot_capture),
    _row(False, _CPU, "model.use_te_rng_tracker rng.te_rng_tracker", lambda t, was: was and t.device.kind == "cpu"),
    *map(_variable, environment.VARIABLES),
)  # fmt: skip


# Settings that follow others where nobody sets them -> what they are then, of a run that needs them; None: none.
FOLLOWING: dict[str, Callable[[RunConfig], Any]] = {
    "numerics.virtual_shards": lambda t: shards.default_shards(t) if t.numerics.invariant else None,
    "numerics.expert_groups": expert_groups.groups_of_run,
    "model.cuda_graph_modules": _graphed,
    "model.vocab_size": _vocabulary,
}


def complete(config: RunConfig) -> RunConfig:
    """Return the run with the settings of FOLLOWING where its files have null."""
    for path, follows in FOLLOWING.items():
        section, _, name = path.partition(".")
        if config.section(section).get(name, NOT_SET) is None and (value := follows(config)) is not None:
            config = config.with_fields(section, **{name: value})
    return config


def adjust(
    config: RunConfig, typed: Collection[str], variables: Mapping[str, str], preset: str | None
) -> tuple[RunConfig, list[str]]:
    """Return the run of a recipe with the fields of ROWS set right, and a line for each: field, before, after, why.

    typed: the paths that the command line sets. variables: those of the environment that the recipe sets; another
    value is not the recipe's. preset: the name of the recipe's precision once its gradients are added in fp32.
    """
    lines: list[str] = []
    for row, path in ((adjustment, path) for adjustment in ROWS for path in adjustment.paths):
        kept, was = path in config.recipe.kept, _at(config.sections, path.split("."))
        name = path.removeprefix(f"{_VARIABLES}.")
        recipes = name == path or (was is not NOT_SET and was == variables.get(name))
        given = None if was is NOT_SET and row.unset else was
        wrong: Any = row.objects if kept else given is not NOT_SET and row.wrong(config, given)
        if not (recipes and wrong) or any(f"{path}.".startswith(f"{t}.") or t.startswith(f"{path}.") for t in typed):
            continue
        now = row.value(config) if callable(row.value) else row.value
        if now == was and not kept:
            continue
        config = _set(config, path.split("."), now)
        if path == f"{PRECISION}.grad_reduce_in_fp32" and preset is not None:
            config = RunConfig({**config.sections, PRECISION: preset})
        why = row.why or wrong[0].text
        lines.append(f"{path}: {'an object' if kept else _text(was)} -> {_text(now)}: {why}")
    return config, lines


def _text(value: Any) -> str:
    return "not set" if value is NOT_SET else as_text(value)


def _at(tree: Any, names: list[str]) -> Any:
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return NOT_SET
        tree = tree[name]
    return tree


def _set(config: RunConfig, names: list[str], value: Any) -> RunConfig:
    sections = _changed(config.sections, names, value)
    path = ".".join(names)
    if path in config.recipe.kept:
        kept = [other for other in config.recipe.kept if other != path]
        sections = {**sections, "recipe": {**sections["recipe"], "kept": kept}}
    return RunConfig(sections)


def _changed(tree: Mapping[str, Any], names: list[str], value: Any) -> dict[str, Any]:
    name, *rest = names
    if rest:
        return {**tree, name: _changed(tree.get(name) or {}, rest, value)}
    others = {key: value for key, value in tree.items() if key != name}
    return others if value is NOT_SET else {**tree, name: value}
