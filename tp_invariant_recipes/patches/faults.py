# SPDX-License-Identifier: Apache-2.0
"""Known faults of Megatron that change results in silence: which runs meet them, and which patch mends them.

`tpi audit` names a row where its first tensor is the row's; `tpi train numerics=stock` warns of those that a run meets.
docs/audit.md has the table with a run of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.patches import bridge, core
from tp_invariant_recipes.patches.patch import Form, Patch

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Fault:
    """One fault.

    name:     a word for it.
    upstream: its report.
    effect:   what goes wrong, and when.
    meets:    whether a run with this configuration reaches it.
    tensors:  pattern of the name of an audit's first tensor outside rounding-error tolerance, or of the first state
    that is lost.
    form:     of the installed code that has it; None: of the code that needs the patch.
    patch:    what mends it; None: nothing here does. limit: where it does, in words; empty: everywhere.
    shows:    whether a run that meets it differs from an audit's reference, which may meet it, too.
    """

    name: str
    upstream: str
    effect: str
    meets: Callable[[RunConfig], Any]
    tensors: str
    form: Callable[[], bool] | None = None
    patch: Patch | None = None
    limit: str = ""
    shows: Callable[[RunConfig], bool] = lambda config: True

    def live(self) -> bool:
        """Whether the installed code has the fault, by its source."""
        if self.form is None:
            return self.patch is None or self.patch.verdict().state == "applies"
        return self.form()

    def strikes(self, config: RunConfig) -> bool:
        """Whether a run of stock numerics meets the fault, and no patch mends it."""
        if config.numerics.invariant:
            return False
        mended = self.patch is not None and self.patch.name not in config.patches.off and self.patch.concerns(config)
        return not mended and bool(self.meets(config)) and self.live()

    def __str__(self) -> str:
        mended = f"; patch {self.patch.name} mends it{self.limit}" if self.patch else "; no patch"
        return f"{self.effect} ({self.upstream}{mended})"


def known(config: RunConfig) -> list[Fault]:
    """Return the faults that strike a run."""
    return [fault for fault in FAULTS if fault.strikes(config)]


def shown(config: RunConfig) -> list[Fault]:
    """Return the faults that an audit of a run may show."""
    return [fault for fault in known(config) if fault.shows(config)]


def of_tensor(config: RunConfig, name: str) -> Fault | None:
    """Return the known fault that has made this tensor of an audit wrong; None: none is known."""
    found = known(config) if name.startswith(RESUMED) else shown(config)
    return next((fault for fault in found if re.search(fault.tensors, name)), None)


RESUMED = "resume/"  # of the name of a state that a resume has not restored: resume/KIND/NAME


def _balances(config: RunConfig, *kinds: str) -> bool:
    balancing = config.model.get("moe_router_load_balancing_type")
    used = {*balancing} if isinstance(balancing, list) else {balancing}
    coefficient = config.model.get("moe_aux_loss_coeff") or 0
    positive = any(coefficient) if isinstance(coefficient, list) else coefficient > 0
    return bool(config.shape.experts and positive and used & {*kinds})


def _masked(config: RunConfig) -> bool:
    data = config.section("dataset")
    return bool(data.get("eod_mask_loss") or "dataset_root" in data)


_ROUTER = "transformer/moe/router.py", "__init__"
_UNEQUAL_PARTS = Form(
    "pipeline_parallel/schedules.py",
    "forward_step_calc_loss",
    has="output_tensor /= torch.clamp(num_tokens, min=1)",
    lacks="all_reduce",
)

_LOSSES = r"^(backward|gradients)/(output_layer|mtp)\b"  # a loss of another size: its gradient begins there
_BALANCE = r"^backward/.*router/auxiliary$|^(gradients|updates)/.*\brouter\."  # z-loss strikes a router's input


def split_biased_experts(config: RunConfig) -> bool:
    """Whether tensor-parallel ranks share tokens, and each adds biases of the whole experts that it holds."""
    return bool(config.shape.experts and config.shape.biased and config.layout.sp and config.layout.etp == 1)


def _masked_means(config: RunConfig) -> bool:
    return _masked(config) and not config.model.get("calculate_per_token_loss")


def masked_losses_over_cp(config: RunConfig) -> bool:
    """Whether a masked loss is a mean over the tokens of a context-parallel rank."""
    return config.layout.cp > 1 and _masked_means(config)


def masked_losses_of_micro_batches(config: RunConfig) -> bool:
    """Whether a masked loss is a mean over the tokens of several sequences."""
    return config.train["micro_batch_size"] > 1 and _masked_means(config)


def balances_in_several_parts(config: RunConfig) -> bool:
    """Whether global_aux_loss sees a step in parts: of ranks, or one after the other."""
    several = config.layout.dp > 1 or config.train["global_batch_size"] > config.train["micro_batch_size"]
    return _balances(config, "global_aux_loss") and several


def has_other_micro_batches(config: RunConfig) -> bool:
    """Whether a micro-batch holds other sequences than in the reference, which has one at a time."""
    return config.layout.dp > 1 or config.train["micro_batch_size"] > 1


def evaluates_in_other_orders(config: RunConfig) -> bool:
    """Whether the sampler of an evaluation hands out sequences by dp and mbs."""
    validation, dataset = config.section("validation"), config.section("dataset")
    if not validation.get("eval_iters") or "dataset_root" in dataset:
        return False
    split = dataset.get("data_sharding", True) and config.layout.dp > 1
    return split or (validation.get("eval_micro_batch_size") or config.train["micro_batch_size"]) > 1


def splits_muon_in_blocks(config: RunConfig) -> bool:
    """Whether Muon makes each rank's block of a matrix orthogonal by itself."""
    optimizer = config.section("optimizer")
    blocks = optimizer.get("optimizer") == "muon" and optimizer.get("muon_tp_mode") == "blockwise"
    return blocks and config.layout.tp > 1


def adds_rounded_gradients(config: RunConfig) -> bool:
    """Whether FSDP's buffers of gradients have the dtype of the weights, which are in bf16."""
    return bool(config.fsdp and config.mixed_precision and config.at("ddp.megatron_fsdp_main_grads_dtype") is None)


def scales_gradients_of_experts_again(config: RunConfig) -> bool:
    """Whether FSDP sums each micro-batch's gradients of experts that one rank alone has."""
    layout, batch = config.layout, config.train["global_batch_size"]
    alone = config.shape.experts and layout.world == layout.pp * layout.etp * layout.ep
    several = batch > config.train["micro_batch_size"] * layout.dp
    return bool(config.fsdp in ("optim_grads", "optim_grads_params") and alone and several and layout.dp > 1)


_FSDP = "distributed/fsdp/src/megatron_fsdp/"

FAULTS = (
    Fault("gradients of FSDP", "no report yet",
        "Megatron-FSDP does not read ddp.grad_reduce_in_fp32 and adds gradients in the dtype of the weights, without "
        "ddp.megatron_fsdp_main_grads_dtype=float32",
        adds_rounded_gradients, "^gradients/",
        Form("distributed/fsdp/mcore_fsdp_adapter.py", "__init__",
            has="main_grads_dtype=ddp_config.megatron_fsdp_main_grads_dtype", lacks="grad_reduce_in_fp32"),
        shows=lambda config: False),  # at the sizes of a test it is less than rounding moves
    Fault("experts of one rank under FSDP", "Megatron-LM #6660 and #6773",
        "where ep is dp, each micro-batch divides the gradients of the ones before by dp again",
        scales_gradients_of_experts_again, r"^(gradients|updates)/.*experts",
        Form(f"{_FSDP}megatron_fsdp.py", "__init__",
            has='self.is_delay_grad_reduce = self.data_parallel_sharding_strategy in ["no_shard", "optim"]')),
    Fault("norm of attention sinks", "Megatron-LM #7452, finding 8, and #7530",
        "the clipping norm has the attention sinks of one tensor-parallel rank alone", core.split_sinks, "^norm/",
        patch=core.SINKS),
    Fault("norm of delta nets", "Megatron-LM #7452, finding 11",
        "without sequence parallelism each tensor-parallel rank keeps its own gradient of out_norm",
        core.delta_nets, r"^(gradients|updates)/.*\bout_norm\b", patch=core.DELTA_NET),
    Fault("biases of experts", "no report yet", "biases of experts' second matrices get tp times their gradient",
        split_biased_experts, r"^(gradients|updates)/.*experts.*linear_fc2\.bias|^norm/",
        patch=core.EXPERT_BIAS_SUM),
    Fault("MTP over cp", "Megatron-LM #7498",
        "losses of MTP are divided by the tokens of one context-parallel rank",
        lambda config: config.shape.depths and config.layout.cp > 1, _LOSSES, patch=core.MULTI_TOKEN),
    Fault(
        "masked losses over cp",
        "Megatron-LM #7452, finding 9, and #7513",
        "a masked loss is divided by the tokens of one context-parallel rank, without model.calculate_per_token_loss",
        masked_losses_over_cp,
        _LOSSES,
        _UNEQUAL_PARTS,
    ),
    Fault(
        "mask of MTP",
        "Megatron-Bridge #6103, Megatron-LM #3959",
        "masked tokens count in the losses of MTP",
        lambda config: config.shape.depths and _masked(config),
        _LOSSES,  # where the reference is patched
        patch=bridge.MULTI_TOKEN_MASK,
        limit=" at cp=1",
    ),
    Fault("global_aux_loss", "Megatron-LM #7213 and #3672",
        "global_aux_loss balances what a step has seen so far and is divided by the data-parallel ranks",
        balances_in_several_parts, _BALANCE,
        Form(*_ROUTER, has="averated_tokens_per_expert = self.global_tokens_per_expert / self.ga_steps"),
        shows=has_other_micro_batches),
    Fault(
        "seq_aux_loss of packed rows",
        "Megatron-LM #6115",
        "seq_aux_loss takes a packed row for one sequence",
        lambda config: _balances(config, "seq_aux_loss") and config.section("dataset").get("enable_offline_packing"),
        _BALANCE,
        Form(*_ROUTER, lacks="cu_seqlens"),
        shows=lambda config: False,  # it takes the same in every layout
    ),
    Fault("masked losses of a micro-batch", "by definition",
        "a masked loss is a mean over a micro-batch's tokens, so that another mbs or dp is another loss",
        masked_losses_of_micro_batches, _LOSSES, _UNEQUAL_PARTS),
    Fault(
        "sequences of an evaluation",
        "by definition",
        "an evaluation reads other sequences for another mbs or dp, without validation.eval_micro_batch_size and "
        "dataset.data_sharding=false",
        evaluates_in_other_orders,
        "^reports/evaluation",
        Form(
            "data/loaders.py",
            "build_train_valid_test_data_loaders",
            has='"cyclic" if isinstance(cfg.dataset, GPTDatasetConfig)',
            package="megatron.bridge",
        ),
    ),
    Fault(
        "blocks of Muon",
        "by definition",
        "muon_tp_mode=blockwise makes each rank's block of a matrix orthogonal by itself",
        splits_muon_in_blocks,
        r"^updates/(?!.*(embedding|output_layer|router|norm|bias))",  # of matrices that tp splits
    ),
    Fault("torch's RNG after a resume", "Megatron-Bridge #5257",
        "a resumed run draws the seed of its data loader after it has restored torch's CPU generator",
        lambda config: True, "^resume/rng/torch$", patch=bridge.LOADER_DRAWS, shows=lambda config: False),
    Fault("aux_loss of a micro-batch", "by definition",
        "aux_loss balances a micro-batch, so that another mbs is another loss",
        lambda config: _balances(config, "aux_loss", "global_aux_loss") and config.train["micro_batch_size"] > 1,
        _BALANCE, Form(*_ROUTER, has="routing_map=routing_map")),
)  # fmt: skip
