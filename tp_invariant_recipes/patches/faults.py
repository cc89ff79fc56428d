"""Known faults of Megatron that change results in silence: which runs meet them, and which patch mends them.

`tpi audit` names a row where its first tensor is the row's; `tpi train numerics=stock` warns of those that a run meets.
docs/audit.md has the table with a run of each.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_invariant_recipes.patches import (
    bridge_mtp,
    code,
    core_delta_net,
    core_expert_bias,
    core_mtp,
    core_sinks,
)
from tp_invariant_recipes.patches.patch import Patch

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Fault:
    """One fault.

    name:     a word for it.
    upstream: its report.
    effect:   what goes wrong, and when.
    live:     whether the installed code has it, by its source.
    meets:    whether a run with this configuration reaches it.
    tensors:  pattern of the name of an audit's first tensor beyond rounding.
    patch:    what mends it; None: nothing here does. limit: where it does, in words; empty: everywhere.
    shows:    whether a run that meets it differs from an audit's reference, which may meet it, too.
    """

    name: str
    upstream: str
    effect: str
    live: Callable[[], bool]
    meets: Callable[["RunConfig"], bool]
    tensors: str
    patch: Patch | None = None
    limit: str = ""
    shows: Callable[["RunConfig"], bool] = lambda config: True

    def strikes(self, config: "RunConfig") -> bool:
        """Whether a run of stock numerics meets the fault, and no patch mends it."""
        if config.numerics.invariant:
            return False
        mended = self.patch is not None and self.patch.name not in config.patches.off and self.patch.concerns(config)
        return not mended and self.meets(config) and self.live()

    def __str__(self) -> str:
        mended = f"; patch {self.patch.name} mends it{self.limit}" if self.patch else "; no patch"
        return f"{self.effect} ({self.upstream}{mended})"


def known(config: "RunConfig") -> list[Fault]:
    """Return the faults that strike a run."""
    return [fault for fault in FAULTS if fault.strikes(config)]


def shown(config: "RunConfig") -> list[Fault]:
    """Return the faults that an audit of a run may show."""
    return [fault for fault in known(config) if fault.shows(config)]


def of_tensor(config: "RunConfig", name: str) -> Fault | None:
    """Return the known fault that has made this tensor of an audit wrong; None: none is known."""
    return next((fault for fault in shown(config) if re.search(fault.tensors, name)), None)


def _balances(config: "RunConfig", *kinds: str) -> bool:
    balancing = config.model.get("moe_router_load_balancing_type")
    used = {*balancing} if isinstance(balancing, list) else {balancing}
    coefficient = config.model.get("moe_aux_loss_coeff") or 0
    positive = any(coefficient) if isinstance(coefficient, list) else coefficient > 0
    return bool(config.shape.experts and positive and used & {*kinds})


def _masked(config: "RunConfig") -> bool:
    data = config.section("dataset")
    return bool(data.get("eod_mask_loss") or "dataset_root" in data)


def _shuffled_by_mbs() -> bool:
    return '"cyclic" if isinstance(cfg.dataset, GPTDatasetConfig)' in code.source(
        "megatron.bridge", "data/loaders.py", "build_train_valid_test_data_loaders"
    )


def _unequal_parts() -> bool:
    loss = code.source("megatron.core", "pipeline_parallel/schedules.py", "forward_step_calc_loss")
    return "output_tensor /= torch.clamp(num_tokens, min=1)" in loss and "all_reduce" not in loss


def _running_mean() -> bool:
    return "averated_tokens_per_expert = self.global_tokens_per_expert / self.ga_steps" in code.source(
        "megatron.core", "transformer/moe/router.py", "__init__"
    )


def _sequence_per_row() -> bool:
    return "cu_seqlens" not in code.source("megatron.core", "transformer/moe/router.py", "__init__")


def _loss_per_micro_batch() -> bool:
    return "routing_map=routing_map" in code.source("megatron.core", "transformer/moe/router.py", "__init__")


_LOSSES = r"^(backward|gradients)/(output_layer|mtp)\b"  # a loss of another size: its gradient begins there
_BALANCE = r"^backward/.*router/auxiliary$|^(gradients|updates)/.*\brouter\."  # z-loss strikes a router's input

FAULTS = (
    Fault(
        "norm of sinks",
        "Megatron-LM #7452, finding 8, and #7530",
        "the clipping norm has the sinks of one tensor-parallel rank alone",
        core_sinks.not_marked,
        core_sinks.learnable,
        "^norm/",
        core_sinks.PATCH,
    ),
    Fault(
        "norm of delta nets",
        "Megatron-LM #7452, finding 11",
        "without sequence parallelism each tensor-parallel rank keeps its own gradient of out_norm",
        core_delta_net.not_summed,
        core_delta_net.delta_nets,
        r"^(gradients|updates)/.*\bout_norm\b",
        core_delta_net.PATCH,
    ),
    Fault(
        "biases of experts",
        "no report yet",
        "biases of experts' second matrices get tp times their gradient",
        core_expert_bias.marked_twice,
        lambda config: bool(
            config.shape.experts and config.shape.biased and config.layout.sp and config.layout.etp == 1
        ),
        r"^(gradients|updates)/.*experts.*linear_fc2\.bias|^norm/",
        core_expert_bias.TWICE_PATCH,
    ),
    Fault(
        "multi-token prediction over cp",
        "Megatron-LM #7498",
        "losses of multi-token prediction are divided by the tokens of one context-parallel rank",
        core_mtp.of_a_rank,
        lambda config: bool(config.shape.depths and config.layout.cp > 1),
        _LOSSES,
        core_mtp.PATCH,
    ),
    Fault(
        "masked losses over cp",
        "Megatron-LM #7452, finding 9, and #7513",
        "a masked loss is divided by the tokens of one context-parallel rank, without model.calculate_per_token_loss",
        _unequal_parts,
        lambda config: config.layout.cp > 1 and _masked(config) and not config.model.get("calculate_per_token_loss"),
        _LOSSES,
    ),
    Fault(
        "mask of multi-token prediction",
        "Megatron-Bridge #6103, Megatron-LM #3959",
        "masked tokens count in the losses of multi-token prediction",
        bridge_mtp.without_a_mask,
        lambda config: bool(config.shape.depths) and _masked(config),
        _LOSSES,  # where the reference is patched
        bridge_mtp.MASK_PATCH,
        " at cp=1",
    ),
    Fault(
        "global_aux_loss",
        "Megatron-LM #7213 and #3672",
        "global_aux_loss balances what a step has seen so far and is divided by the data-parallel ranks",
        _running_mean,
        lambda config: (
            _balances(config, "global_aux_loss")
            and (config.layout.dp > 1 or config.train["global_batch_size"] > config.train["micro_batch_size"])
        ),
        _BALANCE,
        shows=lambda config: config.layout.dp > 1 or config.train["micro_batch_size"] > 1,
    ),
    Fault(
        "seq_aux_loss of packed rows",
        "Megatron-LM #6115",
        "seq_aux_loss takes a packed row for one sequence",
        _sequence_per_row,
        lambda config: (
            _balances(config, "seq_aux_loss") and bool(config.section("dataset").get("enable_offline_packing"))
        ),
        _BALANCE,
        shows=lambda config: False,  # it takes the same in every layout
    ),
    Fault(
        "masked losses of a micro-batch",
        "by definition",
        "a masked loss is a mean over a micro-batch's tokens, so that another mbs or dp is another loss",
        _unequal_parts,
        lambda config: (
            config.train["micro_batch_size"] > 1
            and _masked(config)
            and not config.model.get("calculate_per_token_loss")
        ),
        _LOSSES,
    ),
    Fault(
        "sequences of an evaluation",
        "by definition",
        "an evaluation reads other sequences for another mbs or dp, without validation.eval_micro_batch_size and "
        "dataset.data_sharding=false",
        _shuffled_by_mbs,
        lambda config: bool(
            config.section("validation").get("eval_iters")
            and "dataset_root" not in config.section("dataset")
            and (
                (config.section("dataset").get("data_sharding", True) and config.layout.dp > 1)
                or (config.section("validation").get("eval_micro_batch_size") or config.train["micro_batch_size"]) > 1
            )
        ),
        "^reports/evaluation",
    ),
    Fault(
        "blocks of Muon",
        "by definition",
        "muon_tp_mode=blockwise makes each rank's block of a matrix orthogonal by itself",
        lambda: True,
        lambda config: (
            config.section("optimizer").get("optimizer") == "muon"
            and config.section("optimizer").get("muon_tp_mode") == "blockwise"
            and config.layout.tp > 1
        ),
        r"^updates/(?!.*(embedding|output_layer|router|norm|bias))",  # of matrices that tp splits
    ),
    Fault(
        "aux_loss of a micro-batch",
        "by definition",
        "aux_loss balances a micro-batch, so that another mbs is another loss",
        _loss_per_micro_batch,
        lambda config: _balances(config, "aux_loss", "global_aux_loss") and config.train["micro_batch_size"] > 1,
        _BALANCE,
    ),
)
