# SPDX-License-Identifier: Apache-2.0
"""One layer of Megatron-Core over several ranks and on one, from the same weights and inputs. It needs nothing else.

torchrun --standalone --nproc-per-node=RANKS SCRIPT

Exit status 1: a gradient of the module, or its output, differs by more than rounding (fp32). `tpi audit --all --script`
writes this file with the settings below.
"""

# mypy: ignore-errors
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm

SETTINGS = json.loads(r"""{"config": {}, "ranks": 1, "module": "", "tokens": 32, "sequences": 2}""")
CLOSE = 1e-3  # relative RMS that fp32 never reaches here


def without_cuda():
    """Replace what Megatron takes of CUDA, for ranks on a CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, *args, **more: self
    torch.cuda.Stream = torch.cuda.Event = MagicMock
    torch.cuda.stream = torch.cuda.current_stream = MagicMock()
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **more: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **more: torch.set_rng_state(state)
    # Gloo takes the sizes of an exchange as numbers.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **more: (
        x.numpy() if x is not None and as_numpy else x
    )
    row_parallel = layers.RowParallelLinear.forward

    def own_output(self, x):
        """Biases of experts are added in place, which autograd refuses of what a custom function returns."""
        output, bias = row_parallel(self, x)
        return output.clone(), bias

    layers.RowParallelLinear.forward = own_output


class LocalNorm(torch.nn.RMSNorm):
    """Megatron's local norm, which refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **more):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def drawn(name, shape):
    """Return a whole tensor of this name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.1


def whole_name(name, local_experts, rank):
    """Return the name of an expert's parameter in the whole model."""
    before, marker, rest = name.partition("local_experts.")
    number, _, after = rest.partition(".")
    return f"{before}{marker}{int(number) + rank * local_experts}.{after}" if marker else name


def cut(name, whole, dim, parts, rank):
    """Return a tensor-parallel rank's part; a gated matrix has a gate and a value."""
    blocks = whole.chunk(2, dim) if "linear_fc1" in name else [whole]
    return torch.cat([block.chunk(parts, dim)[rank] for block in blocks], dim)


def filled(layer, config):
    """Give each parameter its part of a whole one; return the tensor-parallel size and rank, and how each is cut."""
    tp, tp_rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    experts = (config.num_moe_experts or 0) // (config.expert_model_parallel_size or 1)
    cuts = {}
    for name, parameter in layer.named_parameters():
        own = whole_name(name, experts, ep_rank)
        split = getattr(parameter, "tensor_model_parallel", False) or name.endswith("softmax_offset")
        parts, at = (tp, tp_rank) if split and "experts" not in name else (1, 0)
        dim = max(0, getattr(parameter, "partition_dim", 0))
        shape = [size * (parts if n == dim else 1) for n, size in enumerate(parameter.shape)]
        parameter.data.copy_(cut(own, drawn(own, shape), dim, parts, at))
        cuts[name] = (own, dim, parts, at)
    return tp, tp_rank, cuts


def run(world):
    """name -> (gradient of this rank, how it is cut); "output" likewise."""
    fields = {name: value for name, value in SETTINGS["config"].items() if world > 1 or "parallel" not in name}
    fields |= {"activation_func": F.silu, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    degrees = {name: fields.get(name, 1) for name in SETTINGS["config"] if name.endswith("parallel_size")}
    parallel_state.initialize_model_parallel(**{n: v for n, v in degrees.items() if v})
    random.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(**fields)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    WrappedTorchNorm.__new__ = lambda cls, *args, **more: LocalNorm(*args, **more)
    layer = build_module(
        spec, config=config, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    tp, tp_rank, cuts = filled(layer, config)
    dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), layer)
    tokens, sequences = SETTINGS["tokens"], SETTINGS["sequences"]
    x, g = (drawn(name, (tokens, sequences, config.hidden_size)).chunk(dp, 1)[dp_rank] for name in ("input", "output"))
    if config.sequence_parallel:
        x, g = (whole.chunk(tp, 0)[tp_rank] for whole in (x, g))
    model.zero_grad_buffer()
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)[None, None]
    out = model(hidden_states=x.clone().requires_grad_(), attention_mask=later)[0]
    ((out * g).sum() / sequences * dp).backward()
    finalize_model_grads([model])
    gradients = {name: parameter.main_grad.clone() for name, parameter in layer.named_parameters()}
    return {name: (gradients[name].cpu(), *cuts[name]) for name in gradients}


def main():
    """Compare this rank's part with the reference's."""
    if not torch.cuda.is_available():
        without_cuda()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    results = run(world)
    if "REFERENCE" in os.environ:
        torch.save({own: gradient for gradient, own, *_ in results.values()}, os.environ["REFERENCE"])
        return 0
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        folder = tempfile.mkdtemp()  # which nobody else can write
        file = os.path.join(folder, "reference.pt")
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "REFERENCE": file, "MASTER_PORT": "0"}
        alone = {n: v for n, v in os.environ.items() if not n.startswith("TORCHELASTIC")} | alone
        alone["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
        subprocess.run([sys.executable, __file__], env=alone, check=True)
        store.set("reference", file)
    reference, wrong = torch.load(store.get("reference").decode()), 0
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    for name, (gradient, own, dim, parts, at) in results.items():
        if not name.startswith(SETTINGS["module"]):
            continue
        expected = cut(own, reference[own], dim, parts, at)
        error = float((gradient - expected).norm() / expected.norm()) if expected.any() else float(gradient.norm())
        ratio = float((gradient * expected).sum() / (expected * expected).sum()) if expected.any() else float("nan")
        wrong += error > CLOSE
        if error > CLOSE:
            print(f"rank {rank}: the gradient of {own} is wrong by {error:.1%}, ratio {ratio:.3g}", flush=True)
    total = torch.tensor(wrong)
    dist.all_reduce(total)
    if rank == 0:
        print(f"{int(total)} of the module's gradients are wrong on {world} ranks", flush=True)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
