# SPDX-License-Identifier: Apache-2.0
"""Which state a resume has lost: every kind lost once, as a verdict names it, and a resume that is whole."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core import num_microbatches_calculator, tensor_parallel

from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.features.audit import resume
from tp_invariant_recipes.features.audit.result import DIFFERS, NOT_JUDGED, WHOLE
from tp_invariant_recipes.features.audit.resume_recording import described, states
from tp_invariant_recipes.features.audit.resume_result import (
    KINDS,
    ChangedStep,
    ResumeResult,
    changed_steps,
    lost_states,
    verdict_line,
)
from tp_invariant_recipes.ledger.schema import StepRecord
from tp_invariant_recipes.patches import faults
from tp_invariant_recipes.runs.sweep_dir import AuditDir, RankRecord


class TopKRouter(torch.nn.Module):
    """Has what Megatron's has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.tensor([0.5, -0.5]))
        self.register_buffer("local_tokens_per_expert", torch.tensor([3.0, 1.0]), persistent=False)


class Layer(torch.nn.Module):
    """The fourth layer of a model, the first of its stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_number = 4
        self.linear = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        self.linear.fp8_meta = {
            "recipe": "delayed",
            "scaling_fwd": SimpleNamespace(scale=torch.tensor([2.0, 4.0]), amax_history=torch.ones(3, 2)),
        }
        self.linear.cuda_graphs = ["graph"]
        self.router = TopKRouter()
        self.register_buffer("cache", torch.arange(3.0), persistent=False)


class Model:
    """A training before a step, as Bridge's callbacks see it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        chunk = torch.nn.Module()
        chunk.layers = torch.nn.ModuleList([Layer()])
        self.model = [chunk]
        self.layer = chunk.layers[0]
        self.weight = self.layer.linear.weight
        self.master = torch.nn.Parameter(torch.rand(2, 2))
        self.adam = torch.optim.Adam([{"params": [self.master], "lr": 0.25, "weight_decay": 0.125}])
        self.master.grad = torch.ones(2, 2)
        self.adam.step()
        self.scaler = {"growth_tracker": 7}
        self.optimizer = SimpleNamespace(
            optimizer=self.adam,
            param_groups=self.adam.param_groups,
            fp32_from_float16_groups=[[self.master]],
            float16_groups=[[self.weight]],
            fp32_from_fp32_groups=[],
            get_loss_scale=lambda: torch.tensor([65536.0]),
            grad_scaler=SimpleNamespace(state_dict=lambda: self.scaler),
        )
        self.progress = {"num_steps": 80}
        self.scheduler = SimpleNamespace(state_dict=lambda: self.progress)
        self.state = SimpleNamespace(train_state=SimpleNamespace(step=10, consumed_train_samples=40))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A GPU's random state and Megatron's, and the number of micro-batches."""
    values = SimpleNamespace(cuda=torch.ones(4), tracker=torch.ones(5), micro_batches=4)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: values.cuda)
    tracker = SimpleNamespace(get_states=lambda: {"model-parallel-rng": values.tracker})
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(num_microbatches_calculator, "get_num_microbatches", lambda: values.micro_batches)
    monkeypatch.setattr(num_microbatches_calculator, "get_current_global_batch_size", lambda: 4)
    random.seed(1)
    np.random.seed(1)
    return values


def recorded(training: Model) -> RankRecord:
    with patch.object(torch.cuda, "is_available", return_value=True):
        return RankRecord({name: described(value) for name, value in states(training)}, {})


LAYER = "layers.3"
# What is lost, how, and what the verdict says of it.
LOST = (
    ("weights", lambda t, m: t.weight.data.add_(1), f"{LAYER}.linear.weight (weights) was not restored"),
    ("masters", lambda t, m: t.master.data.copy_(t.master.data.bfloat16()),
     f"{LAYER}.linear.weight (fp32 master weights) was not restored"),
    ("moments", lambda t, m: t.adam.state[t.master]["exp_avg"].zero_(),
     f"exp_avg of {LAYER}.linear.weight (optimizer moments) starts at 0"),
    ("moments", lambda t, m: t.adam.state[t.master]["step"].zero_(),
     f"step count of {LAYER}.linear.weight (optimizer moments) starts at 0 instead of 1"),
    ("moments", lambda t, m: t.adam.state[t.master].pop("exp_avg_sq"),
     f"exp_avg_sq of {LAYER}.linear.weight (optimizer moments) is missing after the resume"),
    ("scheduler", lambda t, m: t.progress.update(num_steps=0), "num_steps (scheduler) starts at 0 instead of 80"),
    ("scheduler", lambda t, m: t.adam.param_groups[0].update(lr=0.5),
     "lr of group 0 (scheduler) is 0.5 instead of 0.25"),
    ("loss_scale", lambda t, m: setattr(t.optimizer, "get_loss_scale", lambda: torch.tensor([1.0])),
     "loss scale (loss scale) is 1 instead of 65536"),
    ("loss_scale", lambda t, m: t.scaler.update(growth_tracker=0),
     "growth_tracker of optimizer 0 (loss scale) starts at 0 instead of 7"),
    ("rng", lambda t, m: torch.rand(1), "torch (RNG states) was not restored"),
    ("rng", lambda t, m: setattr(m, "cuda", torch.zeros(4)), "CUDA (RNG states) starts at 0"),
    ("rng", lambda t, m: setattr(m, "tracker", torch.full((5,), 2.0)),
     "Megatron's tracker, model-parallel-rng (RNG states) was not restored"),
    ("rng", lambda t, m: np.random.rand(), "numpy (RNG states) was not restored"),
    ("rng", lambda t, m: random.random(), "python (RNG states) was not restored"),
    ("data", lambda t, m: setattr(t.state.train_state, "consumed_train_samples", 0),
     "consumed_train_samples (place in the data) starts at 0 instead of 40"),
    ("data", lambda t, m: setattr(m, "micro_batches", 2), "micro-batches (place in the data) is 2 instead of 4"),
    ("fp8", lambda t, m: t.layer.linear.fp8_meta["scaling_fwd"].amax_history.zero_(),
     f"amax_history of {LAYER}.linear (scaling_fwd) (FP8 state) starts at 0"),
    ("fp8", lambda t, m: t.layer.linear.fp8_meta["scaling_fwd"].scale.fill_(1),
     f"scale of {LAYER}.linear (scaling_fwd) (FP8 state) was not restored"),
    ("router", lambda t, m: t.layer.router.expert_bias.zero_(), f"expert_bias of {LAYER}.router starts at 0"),
    ("router", lambda t, m: t.layer.router.local_tokens_per_expert.zero_(),
     f"local_tokens_per_expert of {LAYER}.router starts at 0"),
    ("buffers", lambda t, m: t.layer.cache.zero_(), f"cache of {LAYER} starts at 0"),
    ("graphs", lambda t, m: setattr(t.layer.linear, "cuda_graphs", []),
     "captured (CUDA graphs) starts at 0 instead of 1"),
)  # fmt: skip


@pytest.mark.parametrize("kind, lose, says", LOST, ids=[f"{kind}-{says.split(' (')[0]}" for kind, _, says in LOST])
def test_a_lost_state_is_named_and_nothing_else_is(machine, kind, lose, says):
    training = Model()
    before = recorded(training)
    assert lost_states([before], [recorded(training)]) == []  # reading changes nothing
    lose(training, machine)
    (lost,) = lost_states([before], [recorded(training)])
    assert (lost.kind, str(lost)) == (kind, says)


def test_every_kind_of_state_is_lost_once():
    assert list(dict.fromkeys(kind for kind, *_ in LOST)) == [*KINDS]
    assert list(dict.fromkeys(name.partition("/")[0] for name in recorded(Model()).state)) == [*KINDS]


def test_states_come_in_their_order_with_the_ranks_that_lost_them(machine):
    first, second = recorded(Model()), recorded(Model())
    training = Model()
    training.layer.router.expert_bias.zero_()
    training.weight.data.add_(1)
    wrong = recorded(training)
    lost = lost_states([first, second], [first, wrong])
    assert [(state.kind, state.ranks) for state in lost] == [("weights", (1,)), ("router", (1,))]


# --- Steps ---

LINE = StepRecord(
    11, 44, 64, "f32:40c7b717", "f32:40000000", "f64:3f50624dd2f1a9fc", gradients={"layers.0.weight": "a" * 32}
)
SEEN = {"batch": "1", "tokens per expert of layers.3.router": "2", "tokens per expert of layers.10.router": "3"}
CHANGES = (
    (replace(LINE, learning_rate="f64:3f50624dd2f1a9fd"), SEEN | {"batch": "9"}, "learning rate differs"),
    (replace(LINE, loss="f32:40c7b718"), SEEN | {"batch": "9"}, "batch differs"),
    (replace(LINE, loss="f32:40c7b718"), SEEN | {"tokens per expert of layers.3.router": "9"},
     "tokens per expert of layers.3.router differ"),
    (replace(LINE, loss="f32:40c7b718", grad_norm="f32:40000001"), SEEN, "loss differs"),
    (replace(LINE, gradients={"layers.0.weight": "b" * 32}, grad_norm="f32:40000001"), SEEN,
     "gradients of layers.0.weight differ"),
    (replace(LINE, grad_norm="f32:40000001"), SEEN, "gradient norm differs"),
)  # fmt: skip


@pytest.mark.parametrize("line, seen, says", CHANGES, ids=[says for *_, says in CHANGES])
def test_what_differs_first_in_a_step(line, seen, says):
    records = [[RankRecord({}, {"11": SEEN})], [RankRecord({}, {"11": seen})]]
    (changed,) = changed_steps(range(11, 12), ({11: LINE}, {11: line}), records)
    assert str(changed) == f"{says} from step 11"
    assert changed_steps(range(11, 12), ({11: LINE}, {11: LINE}), [records[0], records[0]]) == []


# --- Verdicts ---


def lost_bias():
    training = Model()
    before = recorded(training)
    training.layer.router.expert_bias.zero_()
    return lost_states([before], [recorded(training)])


ROUTED = ChangedStep(11, "tokens per expert", ("layers.3.router", "layers.4.router"))
REPEATED_OTHERWISE = "loss differs from step 3"
VERDICTS = (
    (WHOLE, [], [], None, "whole: 5 states of 2 kinds and steps 11 to 12 are bitwise identical after the resume at"),
    (DIFFERS, lost_bias, [ROUTED], None,
     "differs: expert_bias of layers.3.router starts at 0: tokens per expert differ from step 11"),
    (DIFFERS, lost_bias, [], None,
     "differs: expert_bias of layers.3.router starts at 0: steps 11 to 12 are bitwise identical all the same"),
    (DIFFERS, [], [ROUTED], None, "differs: tokens per expert differ from step 11 after the resume at step 10, and "),
    (NOT_JUDGED, [], [ROUTED], REPEATED_OTHERWISE,
     "not judged: without a resume the training does not repeat itself: loss differs from step 3; numerics=determ"),
    (DIFFERS, lost_bias, [ROUTED], REPEATED_OTHERWISE, "differs: expert_bias of layers.3.router starts at 0: without"),
)  # fmt: skip


@pytest.mark.parametrize("verdict, lost, changed, apart, says", VERDICTS)
def test_the_verdict_in_one_line_its_status_and_its_card(verdict, lost, changed, apart, says):
    lost = lost() if callable(lost) else lost
    words = verdict_line(verdict, range(11, 13), {"weights": 2, "rng": 3}, lost, changed, apart)
    assert words.startswith(says)
    facts = {"command": "tpi audit qwen3_toy --resume-at 10", "time": "2026-11-28T08:00:00+0000"}
    result = ResumeResult(Path("a"), verdict, words, None, facts, 10, 12, {}, tuple(lost), tuple(changed))
    assert result.exit_status == {WHOLE: 0, DIFFERS: 1, NOT_JUDGED: 2}[verdict]
    assert result.as_json()["text"] == words
    item = result.card_item("H100", "bf16", {11: 2.5, 12: 2.25})["checkpoint_resume"]["H100"]
    whole = verdict == WHOLE
    assert (item["status"], item["last_verified"]) == (("verified", "2026-11-28") if whole else ("unverified", None))
    assert item["metrics"] == {"initial_loss": 2.5, "final_loss": 2.25}
    assert item["resume_comparison"] == {
        "reference_item": "pretrain",
        "sentinel_steps": [11, 12],
        "loss_relative_tolerance": 0.0,
        "loss_absolute_tolerance": 0.0,
        "sentinels_match": whole,
    }


# --- Mistakes ---


def test_a_save_that_failed_is_no_answer(tmp_path):
    audit = SimpleNamespace(at=2)
    with pytest.raises(RunError, match=r"saved no checkpoint that can be loaded: .*; finished: none"):
        resume._check_saved(audit, AuditDir(tmp_path).training("uninterrupted"))


def test_an_option_that_ends_the_training_at_the_save_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"train.exit_interval=2 ends the training at step 2"):
        resume.new("qwen3_toy", ["train.exit_interval=2", "device=cpu"], 2, directory=tmp_path / "a")


def test_the_fault_of_the_data_loader_is_known_where_its_patch_is_off():
    off = resume.new("qwen3_toy", ["patches.off=[bridge-resume-rng]", "device=cpu"], 2).first.config
    known = faults.of_tensor(off, f"{faults.RESUMED}rng/torch")
    assert known is not None
    assert "Megatron-Bridge #5257" in str(known)
    assert faults.of_tensor(off, f"{faults.RESUMED}rng/numpy") is None
    on = resume.new("qwen3_toy", ["device=cpu"], 2).first.config
    assert faults.of_tensor(on, f"{faults.RESUMED}rng/torch") is None
