"""`NVTE_TP_INVARIANT_MODE=1` and one import make a plain Megatron-Core program invariant; without, it is not."""

import os
import subprocess
import sys

import pytest
import torch

from tests.distributed.numerics.module_runs import joined_shards, split_of
from tests.distributed.ranks import megatron, on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.invariant import _variables, switched_on
from tp_invariant_recipes.settings.environment import settings

V, SEQUENCE, BATCH, VOCABULARY = 4, 16, 2, 64


def config(mesh, **fields):
    from megatron.core.transformer import TransformerConfig

    defaults = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "qk_layernorm": True, "normalization": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "params_dtype": torch.float32, "tensor_model_parallel_size": mesh.size, "sequence_parallel": mesh.size > 1,
        "masked_softmax_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
        "persist_layer_norm": False, "bias_activation_fusion": False,
    }  # fmt: skip
    return TransformerConfig(**defaults | fields)


def model(config, positions="rope"):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=True,
    )


EXPERTS = {
    "num_moe_experts": 8, "moe_ffn_hidden_size": 32, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2,
    "moe_token_dispatcher_type": "alltoall", "expert_tensor_parallel_size": 1,
}  # fmt: skip

MUON = {"optimizer": "muon", "muon_tp_mode": "duplicated"}


def program(mesh, bf16, fields, steps):
    """Train for four steps as one would without us; losses, gradient norms and this rank's weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from tp_invariant_recipes.numerics.megatron.init import initialise

    dtype = torch.bfloat16 if bf16 else torch.float32
    settings = config(mesh, bf16=bf16, params_dtype=dtype, **fields)
    torch.manual_seed(1)
    gpt = model(settings)
    initialise([gpt], seed=torch.initial_seed())  # what the switch does too: without it, only sums can differ
    inner = Float16Module(settings, gpt) if bf16 else gpt
    ddp = DistributedDataParallel(settings, DistributedDataParallelConfig(grad_reduce_in_fp32=True), inner)
    how = OptimizerConfig(lr=1e-2, bf16=bf16, params_dtype=dtype, clip_grad=1.0, **steps)
    optimizer = get_megatron_optimizer(how, [ddp])
    generator = torch.Generator().manual_seed(2)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    seen = []
    for _ in range(4):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        loss = ddp(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        finalize_model_grads([ddp])
        _, norm, _ = optimizer.step()
        seen.append((loss.item(), norm))
    # Every rank of these has all experts, whole.
    weights = {
        name: (p.detach(), None if "experts" in name else split_of(p, 2 if "linear_fc1" in name else 1))
        for name, p in gpt.named_parameters()
    }
    return seen, weights


def switched(mesh, value, function, *arguments):
    os.environ |= {"NVTE_TP_INVARIANT_MODE": value, "TPI_SHARDS": str(V)}
    sys.modules.pop("tp_invariant_recipes.invariant")  # this module has imported it, switched off
    with megatron(mesh, expert_tensor_parallel_size=1):
        import tp_invariant_recipes.invariant  # noqa: F401

        return function(mesh, *arguments)


PROGRAMS = pytest.mark.parametrize(
    "bf16, fields, steps",
    (
        pytest.param(False, {}, {}, marks=pytest.mark.release),
        (True, {}, {}),
        pytest.param(True, EXPERTS, {}, marks=pytest.mark.release),
        pytest.param(True, EXPERTS, MUON, marks=pytest.mark.release),
    ),
    ids=("fp32", "bf16", "experts", "muon"),
)


@PROGRAMS
def test_a_plain_program_has_one_result(bridge, bf16, fields, steps):
    first, second = (on_ranks(t, V, switched, "1", program, bf16, fields, steps) for t in (1, 2))
    assert all(rank[0] == first[0][0] for rank in second)
    a, b = (joined_shards([weights for _, weights in ranks]) for ranks in (first, second))
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


@PROGRAMS
def test_without_the_switch_it_has_several(bridge, bf16, fields, steps):
    first, second = (on_ranks(t, V, switched, "0", program, bf16, fields, steps) for t in (1, 2))
    a, b = (joined_shards([weights for _, weights in ranks]) for ranks in (first, second))
    assert [name for name in a if not same_bits(a[name], b[name])]  # a loss is one number: a rounding may hide it


def test_a_sequence_that_fills_no_vectors_of_a_routers_is_refused(bridge):
    with pytest.raises(RuntimeError, match=r"ConfigError.*must be a multiple of 32, not 16"):
        on_ranks(1, V, switched, "1", program, True, EXPERTS | {"num_moe_experts": 4}, {})


def _refused(mesh, fields, positions):
    with pytest.raises(ConfigError) as error:
        model(config(mesh, **fields), positions)
    return error.value.problems


def test_all_that_is_not_covered_is_reported_at_once(bridge):
    fields = {
        "normalization": "L2Norm", "hidden_dropout": 0.1, "num_query_groups": 2, "ffn_hidden_size": 96,
        "cross_entropy_loss_fusion": True,
    }  # fmt: skip
    (problems,) = on_ranks(1, V, switched, "1", _refused, fields, "learned_absolute")
    message = (
        "of norms only RMSNorm and LayerNorm", "dropout", "fused cross entropy",
        "TPI_SHARDS=4 does not divide num_query_groups=2", "position_embedding_type=learned_absolute",
    )  # fmt: skip
    assert len(problems) == len(message)
    assert all(any(text in problem for problem in problems) for text in message)


# Fields of DistributedDataParallelConfig and OptimizerConfig that are not covered, and the value that is.
NOT_COVERED_DDP = {
    "grad_reduce_in_fp32": (False, "true"), "average_in_collective": (True, "false"), "nccl_ub": (True, "false"),
}  # fmt: skip
NOT_COVERED_OPTIMIZER = {
    "optimizer": ("lion", "adam or sgd or muon"),
    "optimizer_cpu_offload": (True, "false"),
    "fp8_recipe": ("mxfp8", "null or tensorwise"),
}


def _refused_ddp(mesh):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    plain = config(mesh, bf16=True, params_dtype=torch.bfloat16)
    fields = {name: value for name, (value, _) in NOT_COVERED_DDP.items()}
    with pytest.raises(ConfigError) as error:
        DistributedDataParallel(plain, DistributedDataParallelConfig(**fields), model(plain))
    return error.value.problems


def _refused_optimizer(mesh):
    """Built by name, as a program that imported the class before the switch would."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    weight = torch.nn.Parameter(torch.zeros(1))
    fields = {name: value for name, (value, _) in NOT_COVERED_OPTIMIZER.items()}
    with pytest.raises(ConfigError) as error:
        FP32Optimizer(torch.optim.SGD([weight], lr=1.0), OptimizerConfig(**fields), lambda *_: None)
    return error.value.problems


@pytest.mark.parametrize(
    "build, fields", ((_refused_ddp, NOT_COVERED_DDP), (_refused_optimizer, NOT_COVERED_OPTIMIZER))
)
def test_a_way_to_reduce_or_to_step_that_is_not_covered_is_refused_by_name(bridge, build, fields):
    (problems,) = on_ranks(1, V, switched, "1", build)
    assert len(problems) == len(fields)
    for name, (value, allowed) in fields.items():
        shown = str(value).lower()
        assert [p for p in problems if p.startswith(f"{name}={shown}: ") and p.endswith(f"; {name}={allowed}")], name


def test_muon_of_parts_of_matrices_is_refused(bridge):
    blockwise = MUON | {"muon_tp_mode": "blockwise"}
    with pytest.raises(RuntimeError, match=r"optimizer=muon muon_tp_mode=blockwise .* has no invariant version"):
        on_ranks(1, V, switched, "1", program, True, {}, blockwise)


@pytest.mark.release
def test_copies_of_experts_without_data_parallel_ranks_are_refused_layer_by_layer(bridge):
    layer_wise = MUON | {"use_layer_wise_distributed_optimizer": True}
    with pytest.raises(RuntimeError, match=r"without data-parallel ranks each copy of an expert counts as one of its"):
        on_ranks(2, V, switched, "1", program, True, EXPERTS, layer_wise)


def _refused_fsdp(mesh):
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    class FullyShardedDataParallel(_BaseDataParallel):
        pass

    with pytest.raises(ConfigError) as error:
        FullyShardedDataParallel(config(mesh), torch.nn.Linear(1, 1))
    return error.value.problems


def test_fsdp_is_refused(bridge):
    ((problem,),) = on_ranks(1, V, switched, "1", _refused_fsdp)
    assert problem.startswith("FullyShardedDataParallel reduces gradients in an order of its own")


def _refused_field(mesh):
    with pytest.raises(ConfigError) as error:
        model(config(mesh, calculate_per_token_loss=True))
    return error.value.problems


def test_a_field_of_the_model_that_no_rule_knows_is_refused(bridge):
    ((problem,),) = on_ranks(1, V, switched, "1", _refused_field)
    assert problem == "calculate_per_token_loss: who counts the tokens is not known here; leave it unset"


def _reduced_precision(mesh):
    """What cuBLAS may do once the switch is on, and what a model says when a program allows it again."""
    flags = torch.backends.cuda.matmul
    switched_off = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = True
    with pytest.raises(ConfigError) as error:
        model(config(mesh))
    flags.allow_bf16_reduced_precision_reduction = False
    model(config(mesh))
    return switched_off, error.value.problems


def test_cublas_adds_no_part_of_a_product_in_bf16(bridge):
    ((before, problems),) = on_ranks(1, V, switched, "1", _reduced_precision)
    assert before is False
    (problem,) = problems
    assert problem.startswith("cuBLAS may add parts of a product in bf16; disable_bf16_reduced_precision_matmul=true")


def test_variables_are_checked_and_those_that_cuda_started_without_are_refused(monkeypatch):
    monkeypatch.setattr("tp_invariant_recipes.invariant._device", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    variables = settings("gpu", {})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _variables() == variables
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    with pytest.raises(
        ConfigError, match="NVIDIA_TF32_OVERRIDE=0: CUDA has started without; import this module before"
    ):
        _variables()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert _variables() == variables
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG=:16:8 in the environment"):
        _variables()


def _refuses_another_model(mesh):
    from megatron.core.models.common.language_module.language_module import LanguageModule

    with pytest.raises(ConfigError, match="LanguageModule has no invariant version"):
        LanguageModule(config(mesh))
    return "refused"


def test_another_model_is_refused(bridge):
    assert on_ranks(1, V, switched, "1", _refuses_another_model) == ["refused"]


@pytest.mark.parametrize(
    "variables, shards",
    (({}, None), ({"NVTE_TP_INVARIANT_MODE": "0", "TPI_SHARDS": "x"}, None), ({"NVTE_TP_INVARIANT_MODE": "1"}, 8)),
)
def test_what_the_variables_mean(variables, shards):
    assert switched_on(variables) == shards


@pytest.mark.parametrize(
    "variables", ({"NVTE_TP_INVARIANT_MODE": "on"}, {"NVTE_TP_INVARIANT_MODE": "1", "TPI_SHARDS": "6"})
)
def test_what_they_cannot_mean(variables):
    with pytest.raises(ConfigError):
        switched_on(variables)


def test_switched_off_it_imports_nothing():
    code = (
        "import sys, tp_invariant_recipes.invariant as i; print([n for n in ('torch', 'megatron') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.release
def test_switched_on_before_anything_is_imported():
    """The layers a specification names must be Megatron's own, whatever was imported first."""
    code = """
import sys
import tp_invariant_recipes.invariant
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from tp_invariant_recipes.numerics.megatron import spec
layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm").submodules.self_attention.submodules
print(layer.linear_qkv.__name__, spec.invariant(layer).linear_qkv.__name__, TransformerConfig.virtual_shards)
assert "megatron.bridge" not in sys.modules  # a program on Megatron-Core need not have it
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env=os.environ | {"NVTE_TP_INVARIANT_MODE": "1", "TPI_SHARDS": "4"},
    )  # fmt: skip
    assert done.stdout.split() == ["ColumnParallelLinear", "InvariantColumnParallelLinear", "4"]
