# SPDX-License-Identifier: Apache-2.0
"""Modules of Megatron-Core on invariant layers: one result for every layout, near to fp64; on its own layers, several.

A module is a row: how to build it, its layouts, the tensors that sums over ranks reach in stock. An ingredient that is
left out is a row, too: what then depends on the layout.
"""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.transformer import TransformerConfig

from tests.distributed.numerics.module_runs import inaccurate, run, set_weights, split_of
from tests.distributed.ranks import megatron, on_ranks, together, unequal
from tests.operands import same_bits
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels import delta_rule
from tp_invariant_recipes.numerics.megatron import spec

SHARDS, BATCH, EXPERTS = 4, 2, 8
DTYPES = (torch.float32, torch.bfloat16)
INVARIANT, STOCK = "invariant", "stock"
FP64 = "fp64"  # Megatron-Core's own module, computed in fp64 from weights and inputs of the dtype that a case names
SILU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}


class Layout(NamedTuple):
    """sp: counts where tp is more than 1."""

    tp: int = 1
    sp: bool = True
    ep: int = 1


ALONE = Layout()


@dataclass(frozen=True)
class Kind:
    """A module.

    build:    of a configuration, and what replaces layers of a specification. forward: of it and its input.
    fields:   of the configuration. shape: of the input, [s, h]. scale: of weights.
    layouts:  to be compared with one rank, in `make test` and more for a release. crossing: what depends on them in
              stock; None: all. at: where stock and fp64 are computed to be near to; `exact`: whether fp64 is.
    """

    build: Callable[[Any, Callable], Any]
    forward: Callable[[Any, torch.Tensor], torch.Tensor]
    fields: dict[str, Any]
    shape: tuple[int, int]
    layouts: tuple[Layout, ...]
    more: tuple[Layout, ...] = ()
    crossing: frozenset[str] | None = None
    scale: float = 0.1
    at: Layout = ALONE
    exact: bool = True
    release: bool = False

    def config(self, layout: Layout, dtype: torch.dtype, **settings: Any) -> Any:
        fields = {
            "num_layers": 1, "num_attention_heads": 4, "add_bias_linear": False, "normalization": "RMSNorm",
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "persist_layer_norm": False, "bias_dropout_fusion": False,
            "bias_activation_fusion": False, "bf16": dtype == torch.bfloat16, "params_dtype": dtype,
            "hidden_size": self.shape[1], "tensor_model_parallel_size": layout.tp,
            "sequence_parallel": layout.tp > 1 and layout.sp, "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": 1,
        }  # fmt: skip
        config = TransformerConfig(**fields | self.fields | settings)
        config.invariant_mode, config.virtual_shards = "tree", SHARDS
        return config

    def trained(self, mesh, layout, numerics, dtype, main_grad):
        """What a rank has of all tensors, and tokens of each expert as it counts them for the bias."""
        config = self.config(layout, torch.float64 if numerics == FP64 else dtype)
        module = self.build(config, spec.invariant if numerics == INVARIANT else lambda part: part)
        first = parallel_state.get_expert_model_parallel_rank() * (
            EXPERTS // layout.ep
        )  # numbers that no layout changes; every rank that has an expert has it whole
        parameters = {}
        for name, parameter in module.named_parameters():
            segments = 2 if "linear_fc1" in name and config.gated_linear_unit else 1
            split = None if "local_experts" in name else split_of(parameter, segments)
            parameters[re.sub(r"local_experts\.(\d+)", lambda at: f"expert.{first + int(at[1])}", name)] = (
                parameter,
                split,
            )
        set_weights(parameters, mesh, self.scale, dtype)
        result = run(
            module, parameters, mesh, (self.shape[0], BATCH, self.shape[1]), self.forward,
            dtype=dtype, sequence_parallel=config.sequence_parallel, main_grad=main_grad,
        )  # fmt: skip
        counts = getattr(getattr(module, "router", None), "local_tokens_per_expert", None)
        return result, None if counts is None else counts.clone()


def _block(config, replaced):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    return TransformerBlock(
        config, replaced(TransformerBlockSubmodules(layer_specs=[layer], layer_norm=WrappedTorchNorm))
    )


def _through_block(block, x):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary, mask = RotaryEmbedding(32, rotary_percent=1.0)(64), torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1)
    return block(hidden_states=x, attention_mask=mask, rotary_pos_emb=rotary)


def _built(part, config):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(part, config=config, layer_number=1, pg_collection=groups)


def _delta_net(config, replaced):
    from tp_invariant_recipes.numerics.megatron.families import delta_net

    layer = _built(replaced(delta_net.block(config).layer_specs[0].submodules.self_attention), config)
    delta_net.mark_sections(layer)
    return layer


def _mamba(config, replaced):
    part = spec.local_hybrid_spec(config).submodules.mamba_layer
    part.submodules.mixer.params = {"chunk_size": 16}  # the sequence is two and a half of them
    return _built(replaced(part), config)


def _experts(config, replaced):
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend

    layer = replaced(get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=EXPERTS))(
        config=config, layer_number=1
    )
    layer.set_layer_number(1)
    return layer


# Qwen3's way and Nemotron-3's, without and with a limit to an expert's tokens. An expert is on all ranks, on one, and
# in between; layouts/ trains more.
ROUTED = {
    "ffn_hidden_size": 128, "moe_ffn_hidden_size": 32, "num_moe_experts": EXPERTS, "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
QWEN = ROUTED | SILU | {"moe_router_load_balancing_type": "aux_loss"}
NEMOTRON = ROUTED | {
    "activation_func": squared_relu, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32", "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_shared_expert_intermediate_size": 128,
}  # fmt: skip
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def _of_experts(fields, release=True):
    return Kind(
        _experts, lambda layer, x: layer(x)[0], fields, (32, 64), (Layout(2), Layout(4, ep=4)),
        (Layout(4, ep=2), Layout(2, ep=2), Layout(4)), scale=0.2, at=Layout(4, ep=4), release=release,
        crossing=frozenset(("router.weight", "experts.expert.0.linear_fc1.weight")),
    )  # fmt: skip


KINDS = {
    "block": Kind(
        _block, _through_block, {"ffn_hidden_size": 256, "qk_layernorm": True, "masked_softmax_fusion": False} | SILU,
        (64, 128), (Layout(4), Layout(4, sp=False)), (Layout(2), Layout(2, sp=False)),
    ),
    "mamba": Kind(
        _mamba, lambda layer, x: layer(hidden_states=x),
        {"mamba_num_heads": 8, "mamba_head_dim": 12, "mamba_num_groups": 4, "mamba_state_dim": 8,
         "is_hybrid_model": True},
        (40, 64), (Layout(4), Layout(4, sp=False)), (Layout(2), Layout(2, sp=False)),
        frozenset(("output", "input gradient", "norm.weight")),
    ),
    "gated delta net": Kind(
        _delta_net, lambda layer, x: layer(x, None)[0],
        {"num_layers": 2, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2,
         "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 4,
         "linear_num_value_heads": 8, "layernorm_zero_centered_gamma": True, "transformer_impl": "local"} | SILU,
        (40, 64), (Layout(2),), (Layout(4),), frozenset(("output", "input gradient")), exact=False,
    ),
    "qwen": _of_experts(QWEN, release=False),
    "nemotron capacity": _of_experts(NEMOTRON | {"moe_expert_capacity_factor": 0.75}, release=False),
    "nemotron": _of_experts(NEMOTRON),
    "qwen padded": _of_experts(QWEN | PADDED),
    "qwen by position": _of_experts(QWEN | PADDED | {"moe_token_drop_policy": "position"}),
}  # fmt: skip


def _every(mesh, name, layout, main_grad):
    kind = KINDS[name]
    numerics = (INVARIANT, STOCK, *((FP64,) if kind.exact and layout == kind.at else ()))
    with megatron(mesh, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=1):
        cases = [(one, dtype) for one in numerics for dtype in DTYPES]
        return {case: kind.trained(mesh, layout, *case, main_grad) for case in cases}


def _whole(ranks):
    held, counts = zip(*ranks, strict=True)
    return together(held) | ({} if counts[0] is None else {"counts": torch.stack(counts).sum(0)})


@pytest.fixture(scope="module")
def results(bridge):
    """(module, layout, main_grad) → numerics, dtype → the whole tensors, of what a test asks for."""

    @functools.cache
    def computed(name, layout, main_grad):
        ranks = on_ranks(layout.tp, SHARDS, _every, name, layout, main_grad)
        return {case: _whole([rank[case] for rank in ranks]) for case in ranks[0]}

    return computed


@pytest.mark.parametrize(
    "name, layout, main_grad",
    [
        pytest.param(
            name, layout, main_grad, marks=[pytest.mark.release] * (kind.release or later or not main_grad)
        )  # `make test` has the gradients of training, in Megatron's buffers
        for name, kind in KINDS.items()
        for later, layouts in enumerate((kind.layouts, kind.more))
        for layout in layouts
        # Only Megatron's buffers add up the gradients of an expert that several ranks have.
        for main_grad in (True, *([] if "num_moe_experts" in kind.fields and layout.ep < layout.tp else [False]))
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestModules:
    def test_one_result_for_all_layouts(self, results, name, layout, main_grad, dtype):
        first, other = (results(name, at, main_grad)[INVARIANT, dtype] for at in (ALONE, layout))
        assert all(gradient.any() for gradient in first.values())
        assert unequal(first, other) == []

    def test_stock_has_several(self, results, name, layout, main_grad, dtype):
        first, other = (results(name, at, main_grad)[STOCK, dtype] for at in (ALONE, layout))
        different, crossing = {*unequal(first, other)}, KINDS[name].crossing
        if crossing is None:
            assert different == first.keys()
        else:  # an expert on one rank has all its tokens, as on a rank alone
            assert different >= crossing if layout.ep == 1 else different

    def test_both_compute_the_same_but_for_rounding(self, results, name, layout, main_grad, dtype):
        """Ours is as near to fp64 as stock is on one rank, or where its capacity is that of a virtual shard."""
        at = results(name, KINDS[name].at, main_grad)
        stock, actual = at[STOCK, dtype], results(name, layout, main_grad)[INVARIANT, dtype]
        if KINDS[name].exact:
            assert at[FP64, dtype].keys() == actual.keys()
            assert inaccurate(actual, stock, at[FP64, dtype]) == {}
        elif dtype == torch.float32:
            assert [n for n in stock if (actual[n] - stock[n]).norm() > 1e-5 * stock[n].norm()] == []


def test_one_percent_too_much_is_seen(results):
    """The control of the bound on errors, where it is widest."""
    at = results("block", ALONE, True)
    exact, stock, actual = (at[numerics, torch.bfloat16] for numerics in (FP64, STOCK, INVARIANT))
    for name in actual:
        assert inaccurate(actual | {name: actual[name].float() * 1.01}, stock, exact).keys() == {name}


def test_chunks_are_those_of_megatron(bridge):
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule as stock

    assert inspect.signature(stock).parameters["chunk_size"].default == delta_rule.CHUNK


# --- what is left out ---


def _plain_gradients(module):
    """Of a weight that every rank has: Megatron adds up what the ranks have."""

    def plant():
        from tp_invariant_recipes.numerics.sums.weight_gradient import weight_gradient

        def plain(weight, leaves, mesh, everywhere, by_heads=False):
            local = leaves.flatten(0, 1).sum(0).view(weight.shape)
            return weight_gradient(weight, lambda out, add: out.add_(local) if add else out.copy_(local))

        module().reduce_weight_gradient = plain

    return plant


def _norm():
    from tp_invariant_recipes.numerics.layers import norm

    return norm


def _router():
    from tp_invariant_recipes.numerics.megatron import router

    return router


def _single_segment():
    from tp_invariant_recipes.numerics.megatron import base

    base.ColumnForward.segments = property(lambda layer: 1, lambda layer, value: None)


def _head_norms_like_others():
    spec.HEAD_NORMS = spec.SUBSTITUTES


def _of_rank_alone(mixer):
    from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

    group = mixer.pg_collection.tp
    mixer.__dict__["mesh"] = VirtualMesh(group.size(), group.size(), group.rank())


def _norm_of_rows(net):
    from tp_invariant_recipes.numerics.layers.norm import NormShards

    net.out_norm.shards_of = lambda: NormShards.SEQUENCE_WHOLE


def _once_built(family, name, change):
    """Have a family's layer changed after it is built."""

    def plant():
        from importlib import import_module

        layer = getattr(import_module(f"tp_invariant_recipes.numerics.megatron.families.{family}"), name)

        def built(self, *args, original=layer.__init__, **kwargs):
            original(self, *args, **kwargs)
            change(self)

        layer.__init__ = built

    return plant


def _each_with_its_own_tokens():
    from tp_invariant_recipes.numerics.layers.experts import token_dispatcher
    from tp_invariant_recipes.numerics.layers.experts.expert_placement import ExpertHosts

    alone = classmethod(lambda cls, config, tp, ep: cls(config.num_moe_experts, 1, 1))
    token_dispatcher.ExpertHosts = type("Alone", (ExpertHosts,), {"from_config": alone})


def _capacity_of_a_rank():
    spec.SUBSTITUTES.pop("TopKRouter")
    spec.AS_THEY_ARE = (*spec.AS_THEY_ARE, "TopKRouter")


def _segment_of_in_proj(mixer):
    mixer.in_proj.segments = 1


_NET, _MIXER = ("delta_net", "InvariantGatedDeltaNet"), ("mamba", "InvariantMambaMixer")
NORMS = {"final_layernorm.weight", *(f"layers.0.{part}_layernorm.weight" for part in ("input", "pre_mlp"))}
HEAD_NORMS = {f"layers.0.self_attention.{part}_layernorm.weight" for part in "qk"}
PRODUCTS = {f"layers.0.self_attention.linear_{part}.weight" for part in ("qkv", "proj")}
# An ingredient -> the module that shows it, and what depends on the layout without it: no more, or at least.
INGREDIENTS = {
    "norm weight gradients": ("block", _plain_gradients(_norm), NORMS | HEAD_NORMS, None),
    "norms of queries and keys": ("block", _head_norms_like_others, HEAD_NORMS, None),
    "segments of gate and up": (
        "block", _single_segment, (NORMS | HEAD_NORMS | PRODUCTS | {"input gradient"}) - {"final_layernorm.weight"},
        None,
    ),
    "router weight gradient": ("qwen", _plain_gradients(_router), {"router.weight"}, None),
    "an expert's tokens on one rank": (
        "qwen", _each_with_its_own_tokens, {"experts.expert.0.linear_fc1.weight"}, "at least",
    ),
    "capacity of a virtual shard": ("nemotron capacity", _capacity_of_a_rank, {"output"}, "at least"),
    "segments of Mamba's in_proj": (
        "mamba", _once_built(*_MIXER, _segment_of_in_proj), {"input gradient", "norm.weight"}, "at least",
    ),
    "shards on their own": (
        "mamba", _once_built(*_MIXER, _of_rank_alone), {"mixer.A_log", "mixer.dt_bias"}, "at least",
    ),
    "segments of a net's in_proj": (
        "gated delta net", _once_built(*_NET, _segment_of_in_proj), {"input gradient"}, "at least",
    ),
    "the norm's shards are heads": (
        "gated delta net", _once_built(*_NET, _norm_of_rows), {"out_norm.weight"}, "at least",
    ),
}  # fmt: skip


def _without(mesh, ingredient):
    name, plant, *_ = INGREDIENTS[ingredient]
    with megatron(mesh, expert_model_parallel_size=1, expert_tensor_parallel_size=1):
        plant()
        return KINDS[name].trained(mesh, Layout(mesh.size), INVARIANT, torch.float32, True)


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(bridge, ingredient):
    *_, shown, at_least = INGREDIENTS[ingredient]
    different = {*unequal(*(_whole(on_ranks(tp, SHARDS, _without, ingredient)) for tp in (1, 2)))}
    assert different >= shown if at_least else different == shown


# --- what is refused ---

# A module, settings that its invariant form does not cover, and what is said of them with numerics=gather and V = 8.
REFUSED = (
    (
        "mamba", {"use_mamba_mem_eff_path": False},
        ("numerics=tree only", "virtual_shards=8 must divide model.mamba_num_groups=4", "mem_eff_path=true"),
    ),
    (
        "gated delta net", {"linear_conv_kernel_dim": 3},
        ("tree and numerics=portable only", "shards=8 must divide model.linear_num_key_heads=4", "kernel_dim=4"),
    ),
)  # fmt: skip


def _refusals(mesh):
    results = []
    with megatron(mesh):
        for name, settings, _ in REFUSED:
            config = KINDS[name].config(ALONE, torch.float32, **settings)
            config.invariant_mode, config.virtual_shards = "gather", 8
            with pytest.raises(ConfigError) as error:
                KINDS[name].build(config, spec.invariant)
            results.append(str(error.value))
    return results


def test_what_they_do_not_cover_is_refused_at_once(bridge):
    (messages,) = on_ranks(1, SHARDS, _refusals)
    for message, (_, _, parts) in zip(messages, REFUSED, strict=True):
        assert all(part in message for part in parts), message


def _embedded(mesh):
    """[b, s, h] for rows that hold -0.0, of a vocabulary divided among the ranks."""
    from tp_invariant_recipes.numerics.megatron.local import InvariantVocabParallelEmbedding

    with megatron(mesh):
        config = KINDS["block"].config(Layout(mesh.size, sp=False), torch.float32)
        embedding = InvariantVocabParallelEmbedding(16, 4, init_method=torch.nn.init.zeros_, config=config)
        embedding.weight.data.fill_(-0.0)
        return embedding(torch.arange(16).view(2, 8)).detach()


def test_the_embedding_of_negative_zero(bridge):
    single, four = on_ranks(1, SHARDS, _embedded), on_ranks(4, SHARDS, _embedded)
    assert all(same_bits(single[0], rank) for rank in four)
    assert not single[0].signbit().any()
