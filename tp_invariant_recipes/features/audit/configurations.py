# SPDX-License-Identifier: Apache-2.0
"""The settings that a campaign combines, and the configuration of a configuration of them."""

import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check.hosts.inputs import input_problems
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import given, parse_all
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.audit import workflow
from tp_invariant_recipes.settings.run_config import STRATEGIES, RunConfig

TEXTS = "{texts}"  # stands for a folder of short texts, whose ends are masked

# Axis -> settings, of which a run has at most one. Every model tries those that it may have.
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tp=2", "tp=2 sp=false"),
    "pipeline": ("pp=2",),
    "data": ("dp=2",),
    "context": ("cp=2",),
    "experts": ("ep=2",),
    "batch": ("mbs=2",),
}
# Axes of models with experts; the others have these fields and no use of them.
OF_EXPERTS = ("experts", "balance", "router")
# Axes of which a model tries the first setting that it may have.
FIRST_ALLOWED = ("ahead", "biases", "evaluation")
_EVALUATED = "validation.eval_iters=2 validation.eval_interval=1"
OF_EXAMPLES = ("packing",)  # of fine-tuning data
_BALANCED = "model.moe_aux_loss_coeff=0.1 model.moe_router_load_balancing_type="
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "loss": ("model.calculate_per_token_loss=true",),
    "masks": (f"data=text data.path={TEXTS} data.tokenizer=byte dataset.eod_mask_loss=true dataset.split='90,5,5'",),
    "ahead": ("model.mtp_num_layers=1 model.mtp_hybrid_override_pattern='*E'", "model.mtp_num_layers=1"),
    "sinks": ("model.softmax_type=learnable",),
    "biases": ("model.add_bias_linear=true model.add_qkv_bias=true", "model.add_qkv_bias=true"),
    "embedding": (
        "model.share_embeddings_and_output_weights=true",
        "model.share_embeddings_and_output_weights=false",
    ),
    "balance": tuple(f"{_BALANCED}{kind}" for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")),
    "router": ("model.moe_z_loss_coeff=0.1",),
    "optimizer": (
        "optimizer.use_distributed_optimizer=true",
        "optimizer.optimizer=muon optimizer.use_distributed_optimizer=false optimizer.muon_tp_mode=duplicated seq=128",
        "optimizer.optimizer=muon optimizer.use_distributed_optimizer=false optimizer.muon_tp_mode=blockwise seq=128",
    ),
    "fsdp": tuple(
        f"ddp.use_megatron_fsdp=true ddp.data_parallel_sharding_strategy={strategy}" for strategy in STRATEGIES
    ),
    "recompute": ("model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",),
    # Without the last two another mbs or dp evaluates other sequences under stock (patches/faults.py).
    "evaluation": (f"{_EVALUATED} validation.eval_micro_batch_size=1 dataset.data_sharding=false", _EVALUATED),
    "adapters": ("peft=lora peft.dim=8",),
    "packing": ("dataset.enable_offline_packing=true", "dataset.enable_offline_packing=false"),
}

_AXES = {setting: (name, axis) for name, axis in OPTIONS.items() for setting in axis}


def label(setting: str) -> str:
    """Return a short name of a setting: the axis of an option, with the value that no other of the axis has."""
    name, axis = _AXES.get(setting, (setting, ()))
    others = {word for other in axis if other != setting for word in other.split()}
    own = next((word for word in setting.split() if word not in others), None) if others else None
    return f"{name}:{own.rpartition('=')[2]}" if own else name


# Field of a model -> the largest value that is tried.
_LARGEST = {
    **dict.fromkeys(("hidden_size", "moe_ffn_hidden_size"), 64),
    **dict.fromkeys(("ffn_hidden_size", "moe_shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("kv_channels", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("mamba_head_dim", "mamba_state_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("num_attention_heads", "num_query_groups", "linear_num_key_heads", "mamba_num_groups"), 4),
    **dict.fromkeys(("num_moe_experts", "linear_num_value_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    "vocab_size": 512,
}
BATCHES = (("seq=32", "gbs=4"), ("seq=128", "gbs=4"))  # the first that a model may have


def small_sizes(model: Mapping[str, Any], typed: set[str]) -> list[str]:
    """Return overrides that cut a model. typed: the fields that the user gave, which stay."""
    cut: dict[str, int | str] = {
        name: most
        for name, most in _LARGEST.items()
        if isinstance(now := model.get(name), int) and now > most and f"model.{name}" not in typed
    }
    if isinstance(layers := model.get("num_layers"), int) and layers > 2 and "model.num_layers" not in typed:
        cut["num_layers"] = 2
        if isinstance(dense := model.get("moe_layer_freq"), list):
            cut["moe_layer_freq"] = f"[{dense[0]},{dense[-1]}]"
    pattern = model.get("hybrid_layer_pattern") or ""
    kinds = "".join(dict.fromkeys(pattern))
    if 2 * len(kinds) < len(pattern) and not {*"|/"} & {*kinds} and "model.hybrid_layer_pattern" not in typed:
        cut["hybrid_layer_pattern"] = 2 * kinds  # each stage of pp=2 has all
    return [f"model.{name}={value}" for name, value in cut.items()]


Configuration = frozenset[str]
MOST = 6  # settings of a configuration: a fault among more takes long to shrink


def ranks(setting: str) -> int:
    """Return the ranks that a configuration needs for a setting: those with few come first."""
    return 2 if setting.startswith(("tp=", "pp=", "cp=", "dp=")) else 1


def pairs(axes: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Each two settings of different axes, in the order of the axes."""
    for first, second in combinations(axes, 2):
        yield from ((a, b) for a in first for b in second)


class Covering:
    """The pairs that no configuration has covered yet.

    axes:    rows of overrides; a configuration has at most one setting of an axis.
    layouts: how many of the axes, the first ones, change the layout. Every configuration has such a setting: the others
             alone leave nothing to compare.
    allowed: whether a run may have these settings together.
    """

    def __init__(
        self,
        axes: Sequence[Sequence[str]],
        layouts: int,
        allowed: Callable[[Configuration], bool],
    ) -> None:
        self._axis = {setting: n for n, axis in enumerate(axes) for setting in axis}
        self._layouts, self._allowed = layouts, allowed
        cells = [frozenset(pair) for pair in pairs(axes)]
        cells += [frozenset((setting,)) for axis in axes[:layouts] for setting in axis]
        self.pending: dict[Configuration, None] = dict.fromkeys(
            sorted(cells, key=lambda cell: math.prod(map(ranks, cell)))
        )
        self.total = len(self.pending)

    def changes_layout(self, cell: Configuration) -> bool:
        """Whether the configuration and its reference differ."""
        return any(self._axis[setting] < self._layouts for setting in cell)

    def cover(self, cell: Configuration) -> None:
        """Nothing of this configuration need be tried again."""
        for pair in [pair for pair in self.pending if pair <= cell]:
            del self.pending[pair]

    def next(self, ahead: Collection[Configuration] = ()) -> Configuration | None:
        """Return the next configuration: the first pending pair, and what fits beside it; None: nothing is left.

        A pair that no run may have is dropped from `pending`. ahead: configurations that will cover their pairs.
        """
        pending = dict.fromkeys(pair for pair in self.pending if not any(pair <= cell for cell in ahead))
        for pair in [*pending]:
            if (cell := self._seed(pair)) is not None:
                return self._grown(cell, pending)
            del pending[pair], self.pending[pair]
        return None

    def _seed(self, pair: Configuration) -> Configuration | None:
        """Return the pair, with a layout and, where it needs one, another setting."""
        layouts = (
            [pair]
            if self.changes_layout(pair)
            else [pair | {s} for s in self._axis if self.changes_layout(frozenset((s,)))]
        )
        candidates = [*layouts, *(pair | {setting} for setting in self._axis if self._fits(pair, setting))]
        return next((cell for cell in candidates if self.changes_layout(cell) and self._allowed(cell)), None)

    def _fits(self, cell: Configuration, setting: str) -> bool:
        return self._axis[setting] not in {self._axis[other] for other in cell}

    def _grown(self, cell: Configuration, pending: Container[Configuration]) -> Configuration:
        while len(cell) < MOST:
            gains = {
                setting: sum(frozenset((setting, other)) in pending for other in cell)
                for setting in self._axis
                if self._fits(cell, setting) and not (self._axis[setting] < self._layouts and ranks(setting) > 1)
            }
            best = sorted((s for s in gains if gains[s]), key=lambda setting: -gains[setting])
            larger = next((cell | {setting} for setting in best if self._allowed(cell | {setting})), None)
            if larger is None:
                break
            cell = larger
        return cell


def shrunk(cell: Configuration, fails: Callable[[Configuration], bool]) -> Configuration:
    """Return the smallest part of a configuration that still fails, one setting after the other left out."""
    for setting in sorted(cell, key=lambda words: (words.startswith(("tp", "pp", "cp", "dp", "ep", "mbs")), words)):
        if fails(cell - {setting}):
            cell = cell - {setting}
    return cell


class Configurations:
    """The configurations of a model. ConfigError: it is refused as it is.

    overrides: that every run gets. texts: the folder that stands for options.TEXTS.
    base:      the model in the sizes that are tried. sizes: the overrides that cut it.
    axes:      settings that the model may have in some layout, a row an axis; those that change it not at all are left
               out. refused: the others, with the reason.
    configured: a configuration as the model has it; None: it is refused.
    """

    def __init__(self, model: str, overrides: Sequence[str], texts: Path, device: str) -> None:
        self._model, self._overrides, self._texts, self._device = model, overrides, texts, device
        self.refused: dict[str, str] = {}
        self.base, self.sizes = self._cut()
        named = {**LAYOUTS, **OPTIONS}
        examples = "dataset_root" in self.base.section("dataset")
        absent = {*(() if self.base.shape.experts else OF_EXPERTS), *(() if examples else OF_EXAMPLES)}
        self.axes = [[] if name in absent else self._possible(name, axis) for name, axis in named.items()]
        self._order = [setting for axis in self.axes for setting in axis]
        self.configured = cache(self._configured)

    def settings(self, cell: Configuration) -> tuple[str, ...]:
        """Return the settings of a configuration, in the order of the axes."""
        return tuple(setting for setting in self._order if setting in cell)

    def words(self, cell: Configuration) -> list[str]:
        """Return the overrides of a configuration, in the order of the axes."""
        return [word for setting in self.settings(cell) for word in self._split(setting)]

    def _configured(self, cell: Configuration) -> RunConfig | None:
        try:
            return self.composed([*self.sizes, *self.words(cell)]).config
        except ConfigError:
            return None

    def composed(self, settings: Sequence[str]) -> Composed:
        """Compose the model with these overrides. Raises ConfigError."""
        overrides = ["iters=1", *workflow.DEFAULTS, "save=0"]
        numerics = workflow.default_numerics(parse_all(self._overrides))
        words = [*overrides, *numerics, *self._overrides, *settings]
        return compose(self._model, words, device=self._device, also=input_problems)

    def _cut(self) -> tuple[RunConfig, list[str]]:
        typed = parse_all(self._overrides)
        fields = {override.path for override in typed}
        batches = [[text for text in batch if parse_all([text])[0].path not in fields] for batch in BATCHES]
        words = [*workflow.default_numerics(typed), *self._overrides]
        whole = compose(self._model, words, device=self._device)
        sizes = small_sizes(whole.config.model, {path for path in fields if path})
        for cut in (*([*sizes, *batch] for batch in batches), *batches):
            try:
                return self.composed([*cut]).config, cut
            except ConfigError as error:
                problem = error
        raise problem

    def _typed(self, path: str) -> bool:
        return given(parse_all(self._overrides), path) is not None

    def _split(self, setting: str) -> list[str]:
        words = [word.replace(TEXTS, str(self._texts)) for word in setting.split()]
        return [word for word in words if not (word.startswith("seq=") and self._typed("model.seq_length"))]

    def _possible(self, name: str, axis: Sequence[str]) -> list[str]:
        usable, before = [], {"": self.base}
        refused: dict[str, str] = {}
        for setting in axis:
            words = self._split(setting)
            if any(self._typed(override.path) for override in parse_all(words) if override.path):
                continue
            for layout in ("", "tp=2", "dp=2"):
                sizes = [*self.sizes, *layout.split()]
                try:
                    before[layout] = before.get(layout) or self.composed(sizes).config
                    config = self.composed([*sizes, *words]).config
                except ConfigError as error:
                    refused.setdefault(setting, error.problems[0])
                    continue
                refused.pop(setting, None)
                if config.sections != before[layout].sections:
                    usable.append(setting)
                break
            if usable and name in FIRST_ALLOWED:
                return usable
        self.refused |= refused
        return usable
