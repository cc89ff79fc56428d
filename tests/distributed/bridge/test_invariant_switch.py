# SPDX-License-Identifier: Apache-2.0
"""`NVTE_TP_INVARIANT_MODE=1` and one import make a plain Megatron-Core program invariant; without, it is not.
examples/pretrain.py under torchrun, with Megatron-Core alone: one result on 1 and 2 ranks; stock has several.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.adapters import recorded
from tests.distributed.numerics.module_runs import split_of
from tests.distributed.ranks import megatron, on_ranks, together, unequal
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.patch_mode import _variables, switched_on
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
    mode = "portable" if value == "portable" else "tree"
    switch = {"NVTE_TP_INVARIANT_MODE": "0" if value == "0" else "1", "TPI_SHARDS": str(V), "TPI_NUMERICS": mode}
    os.environ |= switch
    sys.modules.pop("tp_invariant_recipes.patch_mode")  # this module has imported it, switched off
    with megatron(mesh, expert_tensor_parallel_size=1):
        import tp_invariant_recipes.patch_mode  # noqa: F401

        return function(mesh, *arguments)


@pytest.mark.parametrize(
    "bf16, fields, steps",
    (
        pytest.param(False, {}, {}, marks=pytest.mark.release),
        (True, {}, {}),
        pytest.param(True, EXPERTS, {}, marks=pytest.mark.release),
        pytest.param(True, EXPERTS, MUON, marks=pytest.mark.release),
    ),
    ids=("fp32", "bf16", "experts", "muon"),
)
@pytest.mark.parametrize("switch", ("1", "0"))
def test_a_plain_program_has_one_result_and_without_the_switch_several(bridge, bf16, fields, steps, switch):
    first, second = (on_ranks(t, V, switched, switch, program, bf16, fields, steps) for t in (1, 2))
    different = unequal(*(together([weights for _, weights in ranks]) for ranks in (first, second)))
    if switch == "0":
        assert different  # a loss is one number: a rounding may hide it
    else:
        assert different == []
        assert all(rank[0] == first[0][0] for rank in second)


PORTABLE = {"kv_channels": 32, "num_query_groups": 4, "transformer_impl": "local"}


def rollouts(mesh):
    """Completions of an engine, and of their tokens the log-probabilities of a forward pass that the trainer makes: by
    its loss, and from logits as verl and as NeMo-RL have them.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.module import Float16Module

    from tp_invariant_recipes import Engine, Request, Sampling

    settings = config(mesh, bf16=True, params_dtype=torch.bfloat16, **PORTABLE)
    torch.manual_seed(1)
    gpt = Float16Module(settings, model(settings)).eval()
    with torch.no_grad():
        (drawn,) = Engine(gpt).generate([Request("a", (5, 6, 7), Sampling(max_new_tokens=8, do_sample=True, seed=1))])
        tokens = torch.tensor([[5, 6, 7, *drawn.tokens] + [0] * (SEQUENCE - 11)])
        targets, positions = tokens.roll(-1, 1), torch.arange(SEQUENCE)[None]
        losses, logits = gpt(tokens, positions, None, labels=targets), gpt(tokens, positions, None)
        of_verl = tensor_parallel.vocab_parallel_cross_entropy(vocab_parallel_logits=logits, target=targets)
        with recorded.installed("nemo_rl") as nemo_rl:
            of_nemo_rl = nemo_rl.LogProbabilities.apply(
                logits.float(), targets, 0, 0, 64, parallel_state.get_tensor_model_parallel_group(), True
            )
    of_trainers = [(0.0 - losses.float()), -of_verl, of_nemo_rl]
    return drawn.tokens, drawn.log_probabilities, [each[0, 2:10].tolist() for each in of_trainers]


@pytest.mark.usefixtures("portable_loops")
def test_under_the_portable_switch_rollouts_have_the_bits_of_the_trainer(bridge):
    """At any layout; under tree the engine says what to set."""
    ranks = [*on_ranks(1, V, switched, "portable", rollouts), *on_ranks(2, V, switched, "portable", rollouts)]
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][2] == 3 * [list(ranks[0][1])]
    with pytest.raises(RuntimeError, match=r"numerics=tree: a cached row .*TPI_NUMERICS=portable"):
        on_ranks(1, V, switched, "1", rollouts)


@pytest.mark.release
@pytest.mark.usefixtures("portable_loops")
def test_under_the_portable_switch_a_training_has_one_result(bridge):
    first, second = (on_ranks(t, V, switched, "portable", program, True, PORTABLE, {}) for t in (1, 2))
    assert all(rank[0] == first[0][0] for rank in second)


# Fields of DistributedDataParallelConfig and OptimizerConfig that are not covered, and the value that is.
NOT_COVERED_DDP = {
    "grad_reduce_in_fp32": (False, "true"), "average_in_collective": (True, "false"), "nccl_ub": (True, "false"),
}  # fmt: skip
NOT_COVERED_OPTIMIZER = {
    "optimizer": ("lion", "adam or sgd or muon"),
    "optimizer_cpu_offload": (True, "false"),
    "fp8_recipe": ("mxfp8", "null or tensorwise"),
}


def _several(mesh):
    fields = {
        "normalization": "L2Norm", "hidden_dropout": 0.1, "num_query_groups": 2, "ffn_hidden_size": 96,
        "cross_entropy_loss_fusion": True,
    }  # fmt: skip
    model(config(mesh, **fields), "learned_absolute")


def _ddp(mesh):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    plain = config(mesh, bf16=True, params_dtype=torch.bfloat16)
    fields = {name: value for name, (value, _) in NOT_COVERED_DDP.items()}
    DistributedDataParallel(plain, DistributedDataParallelConfig(**fields), model(plain))


def _optimizer(mesh):
    """Built by name, as a program that imported the class before the switch would."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    weight = torch.nn.Parameter(torch.zeros(1))
    fields = {name: value for name, (value, _) in NOT_COVERED_OPTIMIZER.items()}
    FP32Optimizer(torch.optim.SGD([weight], lr=1.0), OptimizerConfig(**fields), lambda *_: None)


def _fsdp(mesh):
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    class FullyShardedDataParallel(_BaseDataParallel):
        pass

    FullyShardedDataParallel(config(mesh), torch.nn.Linear(1, 1))


def _unknown_field(mesh):
    model(config(mesh, calculate_per_token_loss=True))


def _another_model(mesh):
    from megatron.core.models.common.language_module.language_module import LanguageModule

    LanguageModule(config(mesh))


def _reduced_precision(mesh):
    """The switch forbids it, and the program allows it again."""
    flags = torch.backends.cuda.matmul
    assert flags.allow_bf16_reduced_precision_reduction is False
    flags.allow_bf16_reduced_precision_reduction = True
    try:
        model(config(mesh))
    finally:
        flags.allow_bf16_reduced_precision_reduction = False
        model(config(mesh))


def _uneven_experts(mesh):
    program(mesh, True, EXPERTS | {"num_moe_experts": 4}, {})


def _muon_of_parts(mesh):
    program(mesh, True, {}, MUON | {"muon_tp_mode": "blockwise"})


# What a program builds, and the parts of each problem with it.
REFUSED = {
    _several: (
        *(("of norms only RMSNorm and LayerNorm",), ("dropout",), ("cross_entropy_loss_fusion=true: ",)),
        ("TPI_SHARDS=4 does not divide num_query_groups=2",),
        ("position_embedding_type=learned_absolute",),
    ),
    _ddp: [(f"{name}={value}: ".lower(), f"; {name}={fits}") for name, (value, fits) in NOT_COVERED_DDP.items()],
    _optimizer: [
        (f"{name}={value}: ".lower(), f"; {name}={fits}") for name, (value, fits) in NOT_COVERED_OPTIMIZER.items()
    ],
    _fsdp: [("FullyShardedDataParallel reduces gradients in an order of its own",)],
    _unknown_field: [("calculate_per_token_loss: who counts the tokens is not known here; leave it unset",)],
    _another_model: [("LanguageModule has no invariant version",)],
    _reduced_precision: [
        ("disable_bf16_reduced_precision_matmul=false: cuBLAS may add partial sums of a GEMM in bf16",)
    ],
    _uneven_experts: [("must be a multiple of 32, not 16",)],
    _muon_of_parts: [("optimizer=muon muon_tp_mode=blockwise ", " has no invariant version")],
}


def _problems(mesh):
    """What each is refused for."""
    results = []
    for build in REFUSED:
        with pytest.raises(ConfigError) as error:
            build(mesh)
        results.append(error.value.problems)
    return results


def test_what_is_not_covered_is_refused_all_at_once(bridge):
    (results,) = on_ranks(1, V, switched, "1", _problems)
    for (build, expected), actual in zip(REFUSED.items(), results, strict=True):
        assert len(actual) == len(expected), build
        for parts in expected:
            assert [problem for problem in actual if all(part in problem for part in parts)], (build, parts)


@pytest.mark.release
def test_copies_of_experts_without_data_parallel_ranks_are_refused_layer_by_layer(bridge):
    layer_wise = MUON | {"use_layer_wise_distributed_optimizer": True}
    with pytest.raises(RuntimeError, match=r"without data-parallel ranks each copy of an expert counts as one of its"):
        on_ranks(2, V, switched, "1", program, True, EXPERTS, layer_wise)


def test_variables_are_checked_and_those_that_cuda_started_without_are_refused(monkeypatch):
    monkeypatch.setattr("tp_invariant_recipes.patch_mode._device", lambda: "gpu")
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


@pytest.mark.parametrize(
    "variables, numerics",
    (
        ({}, None),
        ({"NVTE_TP_INVARIANT_MODE": "0", "TPI_SHARDS": "x"}, None),
        ({"NVTE_TP_INVARIANT_MODE": "1"}, NumericsSettings("tree", 8)),
    ),
)
def test_what_the_variables_mean(variables, numerics):
    assert switched_on(variables) == numerics


@pytest.mark.parametrize(
    "variables",
    (
        {"NVTE_TP_INVARIANT_MODE": "on"},
        {"NVTE_TP_INVARIANT_MODE": "1", "TPI_SHARDS": "6"},
        {"NVTE_TP_INVARIANT_MODE": "1", "TPI_NUMERICS": "gather"},
    ),
)
def test_what_they_cannot_mean(variables):
    with pytest.raises(ConfigError):
        switched_on(variables)


def test_switched_off_it_imports_nothing():
    code = "import sys, tp_invariant_recipes.patch_mode; print([n for n in ('torch', 'megatron') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.release
def test_switched_on_before_anything_is_imported():
    """The layers a specification names must be Megatron's own, whatever was imported first."""
    code = """
import sys
import tp_invariant_recipes.patch_mode
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


ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "examples/pretrain.py"
LINE = re.compile(r"step \d: loss \S+, gradient norm \S+")
# The control starts from the weights that the switch gives, so that sums alone can differ.
CONTROL = f"""
import runpy, sys
from megatron.core.models.gpt import GPTModel
from tp_invariant_recipes.cpu_host import cpu
from tp_invariant_recipes.numerics.megatron.init import initialise

original = GPTModel.__init__

def begin(self, *args, **kwargs):
    original(self, *args, **kwargs)
    initialise([self], seed=1)

GPTModel.__init__ = begin
sys.argv.append("--stock")
with cpu.megatron_core():
    runpy.run_path({str(PROGRAM)!r}, init_globals={{}}, run_name="__main__")
"""


def lines(program, size):
    """What `torchrun --nproc-per-node SIZE` prints of losses and gradient norms."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    variables = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return LINE.findall(done.stdout)


@pytest.mark.release
@pytest.mark.parametrize("invariant", (True, False))
def test_it_has_one_result_and_without_patch_mode_several(tmp_path, invariant):
    program = PROGRAM
    if not invariant:
        program = tmp_path / "control.py"
        program.write_text(CONTROL)
    first, second = (lines(program, size) for size in (1, 2))
    assert len(first) == len(second) == 3
    assert (first == second) == invariant


def in_a_block(mesh):
    """Losses and norms of two blocks, one after the other, and what is said of a model whose block has ended."""
    from megatron.core.transformer import TransformerConfig

    from tp_invariant_recipes.patch_mode import invariant

    seen = []
    with megatron(mesh):
        before = dict(os.environ), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        for _ in range(2):
            with invariant(virtual_shards=V):
                seen.append(program(mesh, True, {}, {})[0])
                gpt = model(config(mesh, bf16=True, params_dtype=torch.bfloat16))
                for again in (invariant.enable, invariant(virtual_shards=V).__enter__):
                    with pytest.raises(ConfigError, match="in force already"):
                        again()
        with pytest.raises(ConfigError, match=r"^the block of tpi\.invariant\(\) that built this model has ended"):
            gpt(torch.zeros(1, SEQUENCE, dtype=torch.int64), None, None)
        after = dict(os.environ), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert after == before
    assert not hasattr(TransformerConfig, "virtual_shards")
    return seen


def test_a_block_takes_back_all_that_it_has_changed(bridge):
    one, two = (on_ranks(size, V, in_a_block)[0] for size in (1, 2))
    assert one[0] == one[1] == two[0] == two[1]
