# SPDX-License-Identifier: Apache-2.0
"""`tpi audit --resume-at`, end to end on CPU ranks: a whole resume, states that are lost, and a save that fails."""

import json

import pytest
import yaml

from tp_invariant_recipes.features.audit.campaign import audited

DENSE = ("qwen3_toy", "model.num_layers=1", "seq=32", "gbs=2", "device=cpu")
EXPERTS = (
    *("qwen3_moe_toy", "seq=32", "gbs=2", "device=cpu", "model.moe_router_score_function=sigmoid"),
    *("model.moe_router_enable_expert_bias=true", "model.moe_router_bias_update_rate=0.5"),
)
MAMBA = ("nemotron3_nano_toy", "gbs=2", "device=cpu")
ASYNC = ("checkpoint.async_save=true", "checkpoint.async_strategy=mcore")


def before_first_step(lose):
    """Have a resumed training lose a state after it was loaded. lose: takes Bridge's context."""

    def plant() -> None:
        from tp_invariant_recipes.features.audit import resume_recording

        record = resume_recording.ResumeRecording.on_train_step_start

        def losing(self, context):
            if self.run.path.name == "resumed" and context.state.train_state.step + 1 == self.first:
                lose(context)
            record(self, context)

        resume_recording.ResumeRecording.on_train_step_start = losing

    return plant


def reads_from_the_start() -> None:
    """Have Bridge forget the place in the data, and nothing else."""
    from megatron.bridge.training import setup

    original = setup.setup_data_iterators

    def forgetful(*arguments, **more):
        state = more["train_state"]
        place, state.consumed_train_samples = state.consumed_train_samples, 0
        iterators = original(*arguments, **more)
        state.consumed_train_samples = place
        return iterators

    setup.setup_data_iterators = forgetful


def adam(context):
    return context.optimizer.chained_optimizers[0].optimizer.state.values()


def forget_bias(context):
    for module in context.model[0].modules():
        if hasattr(module, "expert_bias"):
            module.expert_bias.zero_()


def draw(context):
    import torch

    torch.rand(1)


# Moments and the weights of Mamba layers: test_every_state_that_a_training_has_is_named_when_it_is_lost.
LOST = (
    (DENSE, before_first_step(lambda context: setattr(context.scheduler, "num_steps", 0)),
     "differs: num_steps (scheduler) starts at 0 instead of 4: learning rate differs from step 4"),
    ((*DENSE, "model.hidden_dropout=0.1"), before_first_step(draw),
     "differs: torch (RNG states) was not restored: loss differs from step 3"),
    (DENSE, reads_from_the_start,
     "differs: batch differs from step 3 after the resume at step 2, and every compared state was restored"),
    (EXPERTS, before_first_step(forget_bias),
     "differs: expert_bias of decoder.layers.2.mlp.router starts at 0 (and 1 more state): tokens per expert differ "
     "from step 3"),
    ((*DENSE, "checkpoint.load_optim=false"), lambda: None,
     "differs: embedding.word_embeddings.weight (fp32 master weights) was not restored (and 42 more states): learning "
     "rate differs from step 3"),
    ((*DENSE, "patches.off=[bridge-resume-rng]"), lambda: None,
     "differs: torch (RNG states) was not restored: steps 3 to 4 are bitwise identical all the same\n"
     "known: a resumed run draws the seed of its data loader"),
)  # fmt: skip


FP8 = ("qwen3_toy", "model.num_layers=1", "seq=128", "gbs=1", "precision=fp8_tensorwise", "numerics=tree", "device=cpu")


def forget_everything(context):
    """One state of each kind that the training has. FP8 with current scaling keeps none of its own."""
    import random

    import numpy as np
    import torch
    from megatron.core import tensor_parallel

    from tp_invariant_recipes.features.audit import resume_recording

    held = dict(resume_recording.states(context))

    def first(kind):
        return next(value for name, value in held.items() if name.startswith(kind))

    with torch.no_grad():
        for kind in ("weights/", "masters/", "moments/exp_avg of", "moments/exp_avg_sq of", "router/", "buffers/"):
            if any(name.startswith(kind) for name in held):
                first(kind).add_(1)
    next(iter(context.optimizer.chained_optimizers[0].optimizer.param_groups))["lr"] = 0.5
    state = next(iter(adam(context)))
    state["step"] = state["step"] + 1
    context.scheduler.num_steps += 1
    context.state.train_state.consumed_train_samples += 1
    torch.rand(1)
    np.random.rand()
    random.random()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork():
        torch.rand(1, device="cuda" if torch.cuda.is_available() else "cpu")


KINDS_LOST = {"weights", "masters", "moments", "scheduler", "rng", "data"}


@pytest.mark.release
@pytest.mark.parametrize(
    "words, more", ((DENSE, set()), (EXPERTS, {"router"}), (MAMBA, {"router"}), (FP8, set())), ids=str
)
def test_every_state_that_a_training_has_is_named_when_it_is_lost(shared, words, more):
    name = f"all-{words[0]}-{len(words)}"
    shared("audit", *words, "--resume-at", "2", "--dir", name, before=before_first_step(forget_everything), status=1)
    lost = json.loads((shared.folder / name / "audit.json").read_text())["lost"]
    assert {state["kind"] for state in lost} == KINDS_LOST | more
    assert len(lost) == 12 + len(more)


def test_a_whole_resume_has_no_difference_and_a_card(shared):
    done = shared("audit", *DENSE, "--resume-at", "2", "--card", "--dir", "whole", status=0)
    assert "bitwise identical after the resume at step 2" in done.stdout
    result = json.loads((shared.folder / "whole/audit.json").read_text())
    assert (result["verdict"], result["lost"], result["changed"]) == ("whole", [], [])
    assert set(result["states"]) == {"weights", "masters", "moments", "scheduler", "loss_scale", "rng", "data"}
    card = yaml.safe_load((shared.folder / "whole/card.yaml").read_text())["checkpoint_resume"]["CPU"]
    assert card["resume_comparison"]["sentinel_steps"] == [3, 4]
    assert not (shared.folder / "whole/resumed").exists()


@pytest.mark.release  # a row takes 15 s
@pytest.mark.parametrize("words, plant, says", LOST, ids=[says[:60] for *_, says in LOST])
def test_a_lost_state_and_what_it_changes(shared, words, plant, says):
    name = f"lost-{LOST.index((words, plant, says))}"
    done = shared("audit", *words, "--resume-at", "2", "--dir", name, before=plant, status=1)
    assert says in done.stdout
    assert (shared.folder / name / "resumed").is_dir()


@pytest.mark.release
@pytest.mark.parametrize("words", ((*DENSE, *ASYNC), EXPERTS, MAMBA, (*DENSE, "numerics=stock")), ids=str)
def test_the_installed_bridge_resumes_whole(shared, words):
    shared("audit", *words, "--resume-at", "2", "--dir", f"whole-{abs(hash(words))}", status=0)


@pytest.mark.release
def test_a_campaign_audits_resumes(bridge, tmp_path):
    [*words] = [word for word in EXPERTS[1:] if word != "device=cpu"]
    run = audited("qwen3_moe_toy", words, ("dp=2",), tmp_path / "1", at=2)
    assert (run.verdict, run.first, run.settings) == ("whole", None, ("dp=2",))
    run = audited("qwen3_moe_toy", [*words, "patches.off=[bridge-resume-rng]"], (), tmp_path / "2", at=2)
    assert (run.verdict, run.first, run.covers) == ("differs", "rng torch", False)
    assert "Megatron-Bridge #5257" in run.known
    assert audited("qwen3_moe_toy", [*words, "iters=2"], (), tmp_path / "3", at=2) is None


@pytest.mark.release
def test_a_save_that_fails_is_no_answer_and_keeps_the_run(shared):
    def plant() -> None:
        from megatron.bridge.training import checkpointing

        def full(*arguments, **more):
            raise OSError(28, "No space left on device")

        checkpointing.dist_checkpointing.save = full

    done = shared("audit", *DENSE, "--resume-at", "2", "--dir", "unsaved", before=plant, status=2)
    assert "the training uninterrupted failed, so that nothing can be compared" in done.stderr
    assert (shared.folder / "unsaved/uninterrupted/ledger.jsonl").exists()
