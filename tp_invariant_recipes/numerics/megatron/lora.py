# SPDX-License-Identifier: Apache-2.0
"""LoRA (Hu et al. 2021, arXiv 2106.09685): Bridge's adapters with invariant sums, and how their weights begin.

An adapter adds x A^T B^T · alpha/dim to the output of a frozen linear layer; A is [dim, k], B is [n, dim]. One of the
two GEMMs has its sums split over ranks as the base layer has. Of the other one the ranks gather the matrix, which
is small:

    base             x @ A^T                                     a @ B^T
    column-parallel  gathered_linear: A [dim/t, k]               column-parallel: B [n/t, dim]
    row-parallel     row-parallel: A [dim, k/t]                  gathered_linear: B [n/t, dim]
    whole            gathered_linear: A [dim/t, k]               gathered_linear: B [n/t, dim]

Every rank holds a down-projection of multi-latent attention whole, for its slice of the tokens. Bridge gathers x where
this gathers A, which is smaller. Parameters, their names and checkpoints are Bridge's.
"""

import math
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.utils import AdapterAttributes, ParallelLinearAdapter
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.gemm.operands import Split
from tp_invariant_recipes.numerics.layers import linear
from tp_invariant_recipes.numerics.layers.linear import gathered_linear
from tp_invariant_recipes.numerics.megatron import expert_lora as expert_adapters
from tp_invariant_recipes.numerics.megatron import init
from tp_invariant_recipes.numerics.megatron.attention.mla import DuplicatedLinear
from tp_invariant_recipes.numerics.megatron.base import OnMesh
from tp_invariant_recipes.numerics.megatron.covered_layers import ROW_PARALLEL
from tp_invariant_recipes.numerics.megatron.families.mamba import uniform
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.replacement import Replacement

_SETUP = "megatron.bridge.training.setup"
SIZES = "partition_sizes"  # attribute of a weight
_GATED = "linear_fc1"  # whose rows are gate and up, each split over the ranks
# A trained parameter by its name in the whole model: whether it is of experts, the layer that it adapts, and which of
# the two matrices it is.
_NAME = re.compile(
    rf"{init.LAYER}(?:self_attention|mlp|mlp\.shared_experts|mlp\.(experts)|mixer)\."
    r"(linear_\w+|in_proj|out_proj)\.adapter\.(linear_in|linear_out)\.weight"
)


class InvariantLinearAdapter(OnMesh, ParallelLinearAdapter):
    """The adapter of one linear layer. The modules in it hold the weights and never run."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Compute what is added to the base layer's output.

        column-parallel base: [s/t or s, b, k] → [s, b, n/t]. row-parallel base: [s, b, k/t] → [s/t or s, b, n].
        A base that is whole: [s/t, b, k] → [s/t, b, n].
        """
        first, second = self.linear_in.weight, self.linear_out.weight
        mesh, sequence_parallel = self.mesh, self.config.sequence_parallel
        if self.input_is_parallel:
            low = linear.row_parallel(x, first, mesh, sequence_parallel)
            y = gathered_linear(low, second, mesh, sequence_parallel)
        else:
            low = gathered_linear(x, first, mesh, sequence_parallel)
            if self.base_linear_is_parallel:
                segments = _segments(second, self.base_linear_name, self.config)
                y = linear.column_parallel(low, second, mesh, segments, sequence_parallel)
            else:
                y = gathered_linear(low, second, mesh, sequence_parallel)
        return y * (self.alpha / self.dim)


def _linear_adapter(*args: Any, is_expert: bool = False, **kwargs: Any) -> Any:
    kind = expert_adapters.InvariantSharedExpertAdapter if is_expert else InvariantLinearAdapter
    return kind(*args, is_expert=is_expert, **kwargs)


def _segments(rows: Any, base: str, config: Any) -> Split:
    """Return the parts of a layer's rows, each split over the ranks: their number, or their sizes on a rank."""
    gated = base.endswith(_GATED) and config.gated_linear_unit
    return tuple(getattr(rows, SIZES, ())) or (2 if gated else 1)


def attributes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bridge's description of a base layer, which knows of whole layers only Transformer Engine's."""

    @wraps(original)
    def describe(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, expert_adapters.AllExperts):
            return layer.attributes()
        if not isinstance(layer, DuplicatedLinear):
            return original(layer, *args, **kwargs)
        features, inputs = layer.weight.shape
        return AdapterAttributes(
            input_is_parallel=False, in_features=inputs, out_features=features, disable_tensor_parallel_comm=False,
            disable_sequence_parallel_comm=True, base_linear_is_parallel=False,
        )  # fmt: skip

    return describe


# --- How training begins ---


def replacements(numerics: NumericsSettings, seed: int, folder: str | None) -> tuple[Replacement, ...]:
    """Return what a run with LoRA replaces of Bridge.

    folder: of the Hugging Face weights to adapt; None: a checkpoint.
    """
    drawn = seed if numerics.initial_weights == "invariant" else None
    rows = [
        Replacement(
            f"{_SETUP}:_apply_peft_transformation",
            lambda original: _adapted(original, drawn),
            "adapters would begin with other weights for every tp, and know no fused projection of a Mamba layer",
        ),
        Replacement(
            "megatron.bridge.peft.lora:get_adapter_attributes_from_linear",
            attributes,
            "multi-latent attention has layers without tensor parallelism also where Transformer Engine is not",
        ),
    ]
    if numerics.invariant:
        lora = "megatron.bridge.peft.lora"
        rows += [
            Replacement(
                f"{lora}:ParallelLinearAdapter",
                lambda _: _linear_adapter,
                "an adapter's GEMMs sum over features that ranks share, or over experts",
            ),
            Replacement(
                f"{lora}:GroupedExpertLinearAdapter",
                lambda _: expert_adapters.InvariantGroupedExpertAdapter,
                "GEMMs of experts' tokens depend on the number of tokens on each rank",
            ),
            Replacement(
                f"{lora}:LoRA.transform",
                expert_adapters.without_local_experts,
                "without Transformer Engine, Bridge gives each expert adapters whatever peft.share_expert_adapters is",
            ),
        ]
    if folder is not None:
        rows.append(
            Replacement(
                f"{_SETUP}:_create_peft_pre_wrap_hook",
                lambda original: _adapting,
                "Bridge would load the base weights from a checkpoint of its own; the folder has been imported",
            )
        )
    return tuple(rows)


def _adapted(original: Callable[..., list[Any]], seed: int | None) -> Callable[..., list[Any]]:
    """Return a replacement for Bridge's function that puts adapters into a model.

    seed: None: they begin as Bridge's do.
    """

    @wraps(original)
    def apply(peft: Any, base_model: list[Any]) -> list[Any]:
        expert_adapters.stand_for_experts(base_model)
        chunks = original(peft, base_model)
        note_segments(chunks)
        if seed is not None:
            methods = {"linear_in": peft.lora_A_init_method, "linear_out": peft.lora_B_init_method}
            initialise(chunks, seed=seed, methods=methods)
        return chunks

    return apply


def note_segments(model_chunks: list[Any]) -> None:
    """Tell the adapters of Mamba's `in_proj` what Megatron notes of the layer alone.

    The sizes of z, x, B, C and dt on this rank; and the number of ranks, which Bridge reads of the layer for
    checkpoints, and which only Transformer Engine's have.
    """
    for wrapper in (module for chunk in model_chunks for module in chunk.modules()):
        if not isinstance(wrapper, AdapterWrapper) or not hasattr(wrapper.to_wrap, "weight"):
            continue
        base = wrapper.to_wrap
        if hasattr(base.weight, SIZES):
            setattr(wrapper.adapter.linear_out.weight, SIZES, getattr(base.weight, SIZES))
            base.tp_size = wrapper.adapter.tp_group.size()


def _adapting(cfg: Any, state: Any) -> Callable[[list[Any]], list[Any]]:
    """Return a replacement for Bridge's hook that loads base weights and then adapts them: the second half of it."""
    from megatron.bridge.training import setup

    return lambda model: setup._apply_peft_transformation(cfg.peft, model)


@torch.no_grad()
def initialise(model_chunks: list[Any], *, seed: int, methods: dict[str, str]) -> None:
    """Set the adapters' weights of this rank: a function of seed, name and place in the whole matrix (init.py).

    methods: "linear_in" and "linear_out" -> Bridge's name of a distribution (`peft.lora_A_init_method`).
    Raises ConfigError: a trained parameter is none of a known adapter.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    ep_size = parallel_state.get_expert_model_parallel_world_size()
    for chunk in model_chunks:
        for name, parameter in init.canonical_parameters(chunk):
            if not parameter.requires_grad:
                continue
            match = _NAME.fullmatch(name)
            if match is None:
                raise ConfigError(
                    f"{name}: no rule specifies its initial values (megatron/adapters.py); peft.target_modules"
                )
            experts, layer, matrix = match.groups()
            dim = 1 if layer in ROW_PARALLEL and matrix == "linear_in" else 0
            segments = _segments(parameter, layer, chunk.config) if matrix == "linear_out" else 1
            at, ranks = (rank, size) if experts is None else (0, 1)
            if parameter.dim() == 3:  # of each expert
                dim, segments, at, ranks = 0, 1, ep_rank, ep_size
            shape, ranges = init.place(parameter.shape, dim, at, ranks, segments)
            values = _quantile(methods[matrix], shape[-2:])
            parameter.copy_(
                init.sample(shape, ranges, values, seed=seed, name=name, dtype=parameter.dtype, device=parameter.device)
            )


def _quantile(method: str, shape: list[int]) -> Callable[[Tensor], Tensor]:
    """52 random bits → numbers of Bridge's distribution for a whole matrix of this shape. Raises ConfigError."""
    rows, columns = shape
    bound = 1.0 / math.sqrt(columns)  # Kaiming's with a = sqrt(5)
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "xavier": lambda bits: init._ppnd16(bits) * math.sqrt(2.0 / (rows + columns)),
        "normal": lambda bits: init._ppnd16(bits) * 0.2,
        "kaiming": lambda bits: (uniform(bits) * 2.0 - 1.0) * bound,
        "zero": lambda bits: torch.zeros(bits.shape, dtype=torch.float64, device=bits.device),
    }
    if method not in known:
        raise ConfigError(f"{method}: adapters begin with {', '.join(known)} only")
    return known[method]
