# SPDX-License-Identifier: Apache-2.0
"""A process that turns a checkpoint of a run into the files of a Hugging Face folder, on the CPU."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.numerics.megatron.spec import block_of_both
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.replacement import resolve_own
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.sources import hf_models, weights
from tp_invariant_recipes.sources.hf_families import GLM_45
from tp_invariant_recipes.sources.weights import CONFIG, INDEX, read
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.training import saved_weights

# Before the name of a weight in a checkpoint, its master weight: of Megatron's optimizers, and of the distributed one.
MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
ADAPTER = ".adapter."  # in the name of an adapter's weight
SHARD = 5 * 10**9  # bytes of one file, as Hugging Face writes them


@dataclass(frozen=True)
class Adapters:
    """What a checkpoint of LoRA adapters belongs to.

    fields: the section `peft` of the run. base: the folder of the weights that they adapt: a checkpoint of
    Megatron-Bridge, or of Hugging Face if `hugging_face`. merge: add them to these weights, in fp32.
    """

    fields: dict[str, Any]
    base: Path
    hugging_face: bool
    merge: bool


@dataclass(frozen=True)
class Export:
    """What a rank does: write the tensors of `checkpoint` into `folder`, which has a config.json.

    model: the section of a run's configuration. masters: write the master weights, in fp32. adapters: None: the
    checkpoint has all weights.
    """

    checkpoint: Path
    folder: Path
    model: dict[str, Any]
    masters: bool
    adapters: Adapters | None = None

    def __call__(self, run_dir: RunDir, rank_info: Any) -> None:
        """Raise RunError: the checkpoint has no such weights."""
        bridge.load_models()
        with ExitStack() as stack:
            from tp_invariant_recipes.cpu_host import cpu

            stack.enter_context(cpu.megatron_core() if self.adapters is None else cpu.installed())
            stack.enter_context(registry.applied(unused=weights.unused(self.folder)))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_single_rank_world())
            if self.adapters is None:
                chunks = _model(self.model, torch.float32 if self.masters else _dtype(self.checkpoint))
                masters = _masters(self.checkpoint) if self.masters else ""
                saved_weights.load_weights(chunks, self.checkpoint, masters)
                self._write(chunks)
            else:
                self._write_adapted(self.adapters)

    def _write_adapted(self, adapters: Adapters) -> None:
        """Write the base weights with the adapters added, or what the library peft reads beside them."""
        from megatron.bridge.peft.lora import LoRA

        chunks = _model(self.model, _base_dtype(adapters))
        if adapters.hugging_face:
            weights.from_folder(adapters.base).load_hf_weights(chunks)
        else:
            saved_weights.load_weights(chunks, adapters.base, "")
        lora = LoRA(**adapters.fields)
        shared = lora.share_expert_adapters
        saved_weights.load_weights(lora(chunks, training=False), self.checkpoint, "", part=ADAPTER, shared=shared)
        if adapters.merge:
            self._write(chunks)
            return
        name = str(adapters.base) if adapters.hugging_face else ""
        weights.from_config(self.folder).save_hf_adapter(
            chunks, self.folder, lora, base_model_name_or_path=name, show_progress=False
        )
        (self.folder / CONFIG).unlink()

    def _write(self, chunks: list[Any]) -> None:
        family = hf_models.family_of(self.model)
        assert not isinstance(family, str)
        shapes = dict(family.tensors(family.sizes(self.model)))
        write(self.folder, self._tensors(chunks), shapes, next(chunks[0].parameters()).dtype)
        if wrong := hf_models.problems(self.model, read(self.folder)):  # here transformers is imported already
            raise RunError(f"this is a defect of tpi: it would not import what it exports: {wrong[0]}")

    def _tensors(self, chunks: list[Any]) -> Iterator[tuple[str, Tensor]]:
        of_folder = weights.from_config(self.folder)
        tied = of_folder.hf_pretrained.tie_word_embeddings
        for name, tensor in of_folder.export_hf_weights(chunks, cpu=True, show_progress=False):
            if not (tied and name == hf_models.OUTPUT):  # Hugging Face stores a tied tensor once
                yield name, tensor.contiguous()


@contextmanager
def _single_rank_world() -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", world_size=1, rank=0)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _dtype(checkpoint: Path) -> torch.dtype:
    return saved_weights.metadata(checkpoint)["embedding.word_embeddings.weight"].properties.dtype


def _base_dtype(adapters: Adapters) -> torch.dtype:
    """Return the type of the weights that are adapted. The folder has been checked: its tensors have one type."""
    if not adapters.hugging_face:
        return _dtype(adapters.base)
    return (
        torch.float32
        if {tensor.dtype for tensor in read(adapters.base).tensors.values()} == {"F32"}
        else torch.bfloat16
    )


def _masters(checkpoint: Path) -> str:
    there = saved_weights.metadata(checkpoint)
    return next((prefix for prefix in MASTERS if any(name.startswith(prefix) for name in there)), MASTERS[0])


def _model(model: dict[str, Any], dtype: torch.dtype) -> list[Any]:
    """Megatron-Core's own layers with the sizes of a run's model, whole and without values."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.core.transformer.enums import AttnBackend

    family = hf_models.family_of(model)
    assert not isinstance(family, str)
    traits = {name: bool(model.get(name)) for name in ("add_qkv_bias", "qk_layernorm", "rope_scaling")}
    fields = traits | {name: value for name, (value, _) in family.shared.items()}
    fields |= {name: model[name] for name, _ in family.fields.values() if model.get(name) is not None}
    fields["activation_func"] = resolve_name(fields["activation_func"])
    own = families.family_of(model)
    cls, spec = GPTModelProvider, block_of_both if family is GLM_45 else local_layer_spec
    if families.delta_sizes(model):
        spec = resolve_own(families.DELTA_BLOCK)
    if own is not None:
        cls, spec = resolve_name(model[families.PROVIDER]), partial(families.block, family=own)
    if shared := ModelShape(model).shared_width:
        fields["moe_shared_expert_intermediate_size"] = shared
    provider = cls(
        **fields,
        seq_length=ModelShape(model).sequence,
        transformer_layer_spec=spec,
        transformer_impl="local",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_backend=AttnBackend.auto,
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    provider.finalize()
    return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


def write(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], wanted: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Write tensors as they come, in files of about SHARD bytes, with an index. RunError: they are not those wanted.

    wanted: name -> shape. dtype: of nearly all. A file is written once it is complete.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    expected = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in wanted.items()}
    split = split_torch_state_dict_into_shards(expected, max_shard_size=SHARD)
    held: dict[str, dict[str, Tensor]] = {file: {} for file in split.filename_to_tensors}
    missing, total = {*wanted}, 0
    for name, tensor in tensors:
        if name not in missing:
            raise RunError(f"Megatron-Bridge wrote other tensors than the architecture has: {name}")
        missing.remove(name)
        total += tensor.nbytes
        file = split.tensor_to_filename[name]
        held[file][name] = tensor
        if len(held[file]) == len(split.filename_to_tensors[file]):
            save_file(held.pop(file), folder / file, metadata={"format": "pt"})
            shutil.copymode(folder / CONFIG, folder / file)  # it is for its owner's eyes alone
    if missing:
        raise RunError(f"Megatron-Bridge wrote other tensors than the architecture has: {min(missing)}")
    if split.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
