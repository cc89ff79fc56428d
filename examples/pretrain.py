# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT for three steps, with a loop of its own. torchrun --nproc-per-node TP examples/pretrain.py

On GPUs, `--stock` shows what Megatron-Core computes without tpi.invariant().
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

import tp_invariant_recipes as tpi

SEQUENCE, VOCABULARY = 64, 256
GPU = torch.cuda.is_available()


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("nccl" if GPU else "gloo")
    tp, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=8, ffn_hidden_size=512, tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1, bf16=True, params_dtype=torch.bfloat16, normalization="RMSNorm",
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0, attention_dropout=0.0, deterministic_mode=True, masked_softmax_fusion=GPU,
        bias_activation_fusion=False, bias_dropout_fusion=False, persist_layer_norm=GPU,
    )  # fmt: skip
    name = "get_gpt_layer_with_transformer_engine_spec" if GPU else "get_gpt_layer_local_spec"
    layer = getattr(gpt_layer_specs, name)(normalization="RMSNorm")
    model = GPTModel(config, layer, VOCABULARY, SEQUENCE, position_embedding_type="rope").to(device)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    settings = OptimizerConfig(lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, [model])
    data = torch.Generator().manual_seed(2)
    positions = torch.arange(SEQUENCE, device=device).expand(2, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    for step in (1, 2, 3):
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=data).to(device)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).float().mean()
        loss.backward()
        finalize_model_grads([model])
        _, norm, _ = optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item().hex()}, gradient norm {float(norm).hex()}", flush=True)


if __name__ == "__main__":
    with nullcontext() if "--stock" in sys.argv else tpi.invariant(virtual_shards=8):
        main()
