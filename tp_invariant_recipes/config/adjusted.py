# SPDX-License-Identifier: Apache-2.0
"""What a recipe says of how a model is computed and the invariant numerics compute otherwise: one row a field.

A row costs no part of the result: the model, the data and the optimizer stay what they are. `numerics.adjust=true` sets
these fields right and says so; `false` refuses them. A field that the command line sets is refused in any case.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.check import cuda_graphs as graph_rules
from tp_invariant_recipes.check.invariant import invariance, shards
from tp_invariant_recipes.check.invariant import model as model_rules
from tp_invariant_recipes.check.invariant import modes as mode_rules
from tp_invariant_recipes.check.invariant import training as training_rules
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.fields.catalogue import adjustable
from tp_invariant_recipes.fields.field import NOT_SET, BridgeField, as_text
from tp_invariant_recipes.numerics.layers.experts import expert_placement
from tp_invariant_recipes.settings import (
    cuda_graphs,
    delta_net,
    environment,
    expert_groups,
    finetuning,
    low_precision,
    muon,
    run_config,
)
from tp_invariant_recipes.settings.run_config import RunConfig

KEY = "numerics.adjust"
PRECISION = "mixed_precision"
_VARIABLES = "cluster.environment"

_MASK = "attention is causal, and nobody reads the data's mask"
_GRAPHS = "the invariant layers cannot be captured so"
_PADDED = "the vocabulary is padded as at tp=1, in every layout"
_CPU = "it needs a GPU"
_CONTEXT = "so many ranks have whole heads, or whole sequences where nothing cuts them"
_PACKING = f"dataset.{finetuning.PACKING}"
_STAGES = "pp does not divide the layers"
_WHOLE = "one rank computes an expert, and as many ranks share them all"


@dataclass(frozen=True)
class Adjustment:
    """paths: of fields. value: what they become, or a function of the run. why: the reason. wrong: of
    the run and a field's value, whether it is to be adjusted. unset: whether a field that the recipe does not set may
    be wrong, too.
    """

    value: Any
    why: str
    paths: tuple[str, ...]
    wrong: Callable[[RunConfig, Any], Any]
    unset: bool = False


def _row(
    value: Any,
    why: str,
    paths: str,
    wrong: Callable[[RunConfig, Any], Any] | None = None,
    *,
    unset: bool = False,
) -> Adjustment:
    """Return a row of fields whose other values are refused."""
    wrong = wrong or (lambda t, was: (was or None) != (value or None))
    return Adjustment(value, why, tuple(paths.split()), wrong, unset)


def _by_row(path: str, field: BridgeField) -> Adjustment:
    """Return the adjustment of a field whose row in the catalogue says what other values become."""
    return Adjustment(field.adjust_to, field.why, (path,), lambda t, was: not field.allowed.accepts(was))


def _variable(variable: environment.Variable) -> Adjustment:
    value = next((value for value in (variable.value, *variable.accepted) if value is not None), NOT_SET)

    def wrong(config: RunConfig, was: Any) -> bool:
        return config.device.kind in variable.devices and was not in (variable.value, *variable.accepted)

    return Adjustment(value, variable.why, (f"{_VARIABLES}.{variable.name}",), wrong)


def _examples(key: str, refused: Callable[[Any], bool]) -> Callable[[RunConfig, Any], bool]:
    """Whether an option of a dataset of examples has a refused value, or none."""
    return lambda t, was: finetuning.is_sft(t.section("dataset")) and refused((was or {}).get(key))


def _with(key: str) -> Callable[[RunConfig], dict[str, Any]]:
    return lambda t: {**(t.section("dataset").get("dataset_kwargs") or {}), key: True}


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


def _packs(key: str, wrong: Callable[[RunConfig, Mapping[str, Any]], Any]) -> Callable[[RunConfig, Any], bool]:
    """Whether a run packs examples, and one of its settings is wrong."""
    return lambda t, was: finetuning.packing(t) is not None and bool(wrong(t, {key: was}))


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


def _of_stage(end: int) -> Callable[[RunConfig], int | None]:
    """Return the layers of the first (0) or the last stage (1); None: the recipe says it, or pp divides the layers."""
    return lambda t: (run_config.uneven_ends(t) or (None, None))[end]


def _is_unsaid(end: int) -> Callable[[RunConfig, Any], bool]:
    def unsaid(config: RunConfig, was: Any) -> bool:
        return was in (None, NOT_SET) and _of_stage(end)(config) is not None

    return unsaid


def _shared_by(config: RunConfig) -> int:
    """ep * etp ranks, where they can share whole experts."""
    ep, experts = config.layout.ep, config.shape.experts
    more = ep * config.layout.etp
    return more if expert_placement.fits(experts, config.layout.tp, more) else ep


def _splits_experts(config: RunConfig, was: Any) -> bool:
    return bool(config.shape.experts) and config.layout.etp > 1


def _is_above(config: RunConfig, cp: Any) -> bool:
    return cp not in (None, 1) and cp > _largest_cp(config)


def _fuses_bias(config: RunConfig) -> bool:
    """Whether an ungated activation adds the bias of the layer before it."""
    fused = config.shape.biased and config.model.get("bias_activation_fusion")
    return bool(fused) and not config.shape.gated


def _padded_size(config: RunConfig) -> int:
    multiple = config.model.get("make_vocab_size_divisible_by") or 128  # Megatron's default
    return -(-config.shape.vocabulary // multiple) * multiple


def _alone(config: RunConfig, was: Any) -> bool:
    """Whether an optimizer that has to be distributed and on GPUs is not."""
    distributed = config.section("optimizer").get("use_distributed_optimizer")
    return bool(was) and (config.device.kind == "cpu" or not distributed)


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
    *(_by_row(path, field) for path, field in adjustable()),
    # Without FSDP the optimizer is as sharded as the recipe says, and a model has memory from the beginning.
    _row(False, "only FSDP gives it memory later", "model.init_model_with_meta_device"),
    _row(False, "DistributedDataParallel computes the same bits, for any numerics.data_shards", "ddp.use_megatron_fsdp "
         "dist.use_megatron_fsdp"),
    _row("no_shard", "only FSDP reads it", "ddp.data_parallel_sharding_strategy",
         lambda t, was: was not in (None, "no_shard") and not t.fsdp),
    _row("torch_dist", "only FSDP has that format", "checkpoint.ckpt_format",
         lambda t, was: was == run_config.FSDP_FORMAT and not t.fsdp),
    # The flag first: the new name does not say it.
    _row(True, "the old name has it", f"optimizer.{muon.LAYER_WISE}", _is_old_layer_wise, unset=True),
    _row(muon.MUON, "Megatron-Core's new name", "optimizer.optimizer", lambda t, was: was == muon.OLD_NAME),
    _row(muon.WHOLE, "Muon's matrices are whole", f"optimizer.{muon.TP_MODE}",
         lambda t, was: muon.computes(t.section("optimizer")) and was != muon.WHOLE, unset=True),
    _row("mcore", "its writer sends the hashes of what it writes", "checkpoint.async_strategy",
         lambda t, was: t.section("checkpoint").get("async_save") and was != "mcore", unset=True),
    _row(False, "only a distributed optimizer gathers weights", "ddp.overlap_param_gather "
         "optimizer.overlap_param_gather",
         lambda t, was: was and not t.section("optimizer").get("use_distributed_optimizer")),
    _row(False, "it is Transformer Engine's distributed Adam", "optimizer.use_precision_aware_optimizer", _alone),
    _row("float32", "only that Adam has other moments", "optimizer.exp_avg_dtype optimizer.exp_avg_sq_dtype",
         lambda t, was: (was or "float32") != "float32"
         and not t.section("optimizer").get("use_precision_aware_optimizer")),
    _row(False, _MASK, "dataset.create_attention_mask dataset.reset_attention_mask"),
    _row(_with("get_attention_mask_from_fusion"), _MASK, "dataset.dataset_kwargs",
         _examples("get_attention_mask_from_fusion", lambda was: was is False)),
    _row(_with("pad_to_max_length"), "how far an example is padded depends on no other one", "dataset.dataset_kwargs",
         _examples("pad_to_max_length", lambda was: not was), unset=True),
    _row(lambda t: training_rules.fitting(t, (finetuning.packing(t) or {}).get("pad_seq_to_mult") or 1),
         "virtual shards divide each packed sequence", f"{_PACKING}.pad_seq_to_mult",
         _packs("pad_seq_to_mult", training_rules.uneven)),
    _row(False, "a row has the sequences that it holds", f"{_PACKING}.pad_cu_seqlens",
         _packs("pad_cu_seqlens", lambda t, specs: specs["pad_cu_seqlens"])),
    _row(False, "weights are kept in bf16, and quantized once a step", f"{PRECISION}.fp8_param "
         f"{PRECISION}.fp8_param_gather", lambda t, was: was and low_precision.fp8_layers(t) is not None),
    _row(False, "attention is in bf16, which is more exact", f"{PRECISION}.fp8_dot_product_attention "
         f"{PRECISION}.fp8_multi_head_attention", lambda t, was: was and low_precision.fp8_layers(t) is not None),
    _row(False, "gradients' memory holds gradients alone", f"{PRECISION}.{low_precision.REUSED}",
         lambda t, was: was and low_precision.fp8_layers(t) is not None),
    _row("fp32", "Megatron-Core's name of it", "model.moe_router_dtype", lambda t, was: was == "float32"),
    _row(0, "checkpoints of adapters lack the experts' bias", "model.moe_router_bias_update_rate",
         lambda t, was: finetuning.loses_bias(t), unset=True),
    # Megatron's fused bias and GELU has tanh in place of erf, and so has this function.
    _row("megatron.core.activations.fast_gelu", "the bias' fused GELU is this one", "model.activation_func",
         lambda t, was: _fuses_bias(t) and str(was).endswith(".gelu")),
    _row(False, "the layer itself has added its bias", "model.bias_activation_fusion", lambda t, was: _fuses_bias(t)),
    _row(False, "whether it is faster depends on the machine", f"model.{run_config.COMBINED} "
         f"{run_config.OVERLAPS}.{run_config.COMBINED}", lambda t, was: was),
    _row(False, "it changes the sums' order", "model.apply_rope_fusion",
         lambda t, was: was and model_rules.is_mla(t)),
    _row(True, "two interleaved stages would take each other's messages", "model.overlap_p2p_comm",
         lambda t, was: not was and (t.model.get("virtual_pipeline_model_parallel_size") or 1) > 1),
    _row(False, "messages that overlap are not in a batch", "model.batch_p2p_comm",
         lambda t, was: was and t.model.get("overlap_p2p_comm")),
    _row(None, "multi-latent attention keeps what it computed", "model.recompute_granularity",
         lambda t, was: was and model_rules.is_mla(t)),
    # The result is the same for any cp. C first: it follows cp where nobody has typed it.
    _row(_largest_cp, _CONTEXT, "numerics.context_shards", lambda t, was: was == t.layout.cp and _is_above(t, was)),
    _row(_largest_cp, _CONTEXT, "model.context_parallel_size", _is_above),
    # So it is for any pp, ep and etp.
    *(_row(_of_stage(end), _STAGES, f"model.{field}", _is_unsaid(end), unset=True)
      for end, field in enumerate(run_config.UNEVEN)),
    _row(_shared_by, _WHOLE, "model.expert_model_parallel_size", _splits_experts),
    _row(1, _WHOLE, "model.expert_tensor_parallel_size", _splits_experts),
    _row(expert_groups.groups_of_run, "it follows the layout", "numerics.expert_groups",
         lambda t, was: was not in (None, expert_groups.groups_of_run(t))),
    _row(_padded_size, _PADDED, "model.vocab_size", lambda t, was: t.model.get("should_pad_vocab")),
    _row(False, _PADDED, "model.should_pad_vocab"),
    _row(_recomputed, "the layers of this run keep it", "model.recompute_modules",
         lambda t, was: bool(was) and _recomputed(t) != [*was]),
    _row(_capturable, _GRAPHS, "model.cuda_graph_modules",
         lambda t, was: t.model.get("cuda_graph_impl") == cuda_graphs.TE and _capturable(t) not in (was, [])),
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
        wrong = kept or (given is not NOT_SET and row.wrong(config, given))
        if not (recipes and wrong) or any(f"{path}.".startswith(f"{t}.") or t.startswith(f"{path}.") for t in typed):
            continue
        now = row.value(config) if callable(row.value) else row.value
        if now == was and not kept:
            continue
        config = _set(config, path.split("."), now)
        if path == f"{PRECISION}.grad_reduce_in_fp32" and preset is not None:
            config = RunConfig({**config.sections, PRECISION: preset})
        lines.append(f"{path}: {'an object' if kept else _text(was)} -> {_text(now)}: {row.why}")
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
