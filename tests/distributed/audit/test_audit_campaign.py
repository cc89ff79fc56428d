# SPDX-License-Identifier: Apache-2.0
"""`tpi audit --all`: what a refusal leaves, what a cell becomes, and in which order."""

import itertools
import json
import os
import signal
import threading
import time
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from tests.distributed import audit_bugs
from tp_invariant_recipes.check.hosts import machine
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError
from tp_invariant_recipes.features.audit import campaign, configurations
from tp_invariant_recipes.features.audit.configurations import Configurations
from tp_invariant_recipes.features.audit.result import BEYOND, WITHIN, AuditRun
from tp_invariant_recipes.machine import processor

pytestmark = pytest.mark.usefixtures("bridge", "here")


def begun(here, *overrides: str, model: str = "qwen3_toy") -> campaign.Campaign:
    """A campaign before its first audit."""
    where, state = campaign.new(model, ["device=cpu", *overrides], here / "audits")
    where.path.mkdir(parents=True)
    campaign._write_texts(where.texts)
    return campaign.Campaign(where, state, lambda *_: None, scripts=False)


def test_a_refusal_leaves_no_directory(here):
    where, state = campaign.new("qwen3_toy", ["device=cpu", "model.num_layers=0"], here / "audits")
    with pytest.raises(ConfigError):
        campaign.execute(where, state, lambda *_: None, resume=False)
    assert not where.path.exists()


def test_a_campaign_of_resumes_leaves_out_formats_that_no_audit_reads(here):
    fsdp = configurations.OPTIONS["fsdp"][0]
    audits = begun(here)
    assert audits._allowed(frozenset(("dp=2", fsdp)))
    audits.state.resume_at = 1
    assert not audits._allowed(frozenset(("dp=2", fsdp)))


def test_the_first_setting_that_numerics_allow_is_tried_and_a_refusal_has_its_reason(here, monkeypatch):
    names = ("evaluation", "adapters")
    monkeypatch.setattr(configurations, "OPTIONS", {name: configurations.OPTIONS[name] for name in names})
    monkeypatch.setattr(configurations, "LAYOUTS", {})
    first, second = configurations.OPTIONS["evaluation"]
    stock, tree = (begun(here / numerics, f"numerics={numerics}")._cells for numerics in ("stock", "tree"))
    assert (stock.axes[-2:], tree.axes[-2:]) == ([[first], []], [[second], []])
    [adapters] = configurations.OPTIONS["adapters"]
    assert stock.refused.keys() == {adapters}
    assert "LoRA adapts weights that are there: weights=FOLDER" in stock.refused[adapters]


PATTERNS = (("MEM*EME", "ME*ME*"), ("M*M*", None), ("MEME|*EME", None), ("ME*" * 9, "ME*ME*"))


@pytest.mark.parametrize("pattern, cut", PATTERNS)
def test_a_hybrid_model_is_cut_to_two_stages_that_have_all_kinds_of_layers(pattern, cut):
    model = {"hybrid_layer_pattern": pattern}
    assert configurations.small_sizes(model, set()) == ([f"model.hybrid_layer_pattern={cut}"] if cut else [])
    assert configurations.small_sizes(model, {"model.hybrid_layer_pattern"}) == []


class Answers:
    """Stands for audits. judged: a cell -> whether it is right; None: Bridge refuses it."""

    def __init__(self, judged, known=None) -> None:
        self.judged, self.known, self.settings = judged, known, []

    def __call__(self, model, words, settings, where, at):
        self.settings.append(settings)
        if (sound := self.judged(frozenset(settings))) is None:
            return None
        fault = (None, None) if sound else ("gradients x", self.known)
        return AuditRun(settings, WITHIN if sound else BEYOND, "text", fault[0], 1.0, fault[1])


class Here(Executor):
    """Calls at once, in this process."""

    def submit(self, call, *arguments):
        future = Future()
        future.set_result(call(*arguments))
        return future


LOSS = "model.calculate_per_token_loss=true"


@cache
def cells_of_layouts_and_losses() -> Configurations:
    """Composed once: no campaign changes them."""
    with mock.patch.object(configurations, "OPTIONS", {"loss": (LOSS,)}):
        return Configurations("qwen3_toy", ["device=cpu"], Path("texts"), "cpu")


def ran(here, monkeypatch, judged, known=None, *, at_a_time=1, **more):
    """A campaign whose audits are answers."""
    answers = Answers(judged, known)
    monkeypatch.setattr(campaign, "Configurations", lambda *_: cells_of_layouts_and_losses())
    monkeypatch.setattr(campaign.Campaign, "_concurrent", lambda _: at_a_time)
    monkeypatch.setattr(campaign, "workers", lambda _: nullcontext(Here()))
    monkeypatch.setattr(campaign, "audited", answers)
    return begun(here).run(**more), answers


several = pytest.mark.parametrize("at_a_time", (1, 2))


@several
def test_no_pair_stays_and_no_audit_is_repeated(here, monkeypatch, at_a_time):
    result, answers = ran(here, monkeypatch, lambda cell: True, at_a_time=at_a_time)
    assert len({*answers.settings}) == len(answers.settings) == len(result.trials)
    assert (result.pending, result.exit_status) == (0, 0)


def resumed(here, monkeypatch, trials, judged, **more):
    """A campaign with the trials of an earlier start."""
    monkeypatch.setattr(campaign, "choose_for_several", lambda directory, name: here / "resumed")
    original = campaign.State
    monkeypatch.setattr(campaign, "State", lambda model, overrides, **more: original(model, overrides, trials, **more))
    return ran(here, monkeypatch, judged, **more)


def test_a_resumed_campaign_audits_what_is_pending(here, monkeypatch):
    first, answers = ran(here, monkeypatch, lambda cell: True)
    trials = campaign.resumed(here / "audits")[1].trials
    assert trials == [*first.trials]
    second, other = resumed(here, monkeypatch, trials[:-1], lambda cell: True)
    assert other.settings == answers.settings[-1:]
    assert second.pending == 0


def test_a_resumed_campaign_covers_what_a_cell_covered_that_it_would_not_choose(here, monkeypatch):
    every = AuditRun(("tp=2", "pp=2", "dp=2", "cp=2", "mbs=2", LOSS), WITHIN, "text", None, 1.0)
    result, answers = resumed(here, monkeypatch, [every], lambda cell: True)
    assert all("tp=2 sp=false" in settings for settings in answers.settings)
    assert result.pending == 0


@several
def test_a_resumed_campaign_has_the_faults_of_the_first_and_repeats_no_audit(here, monkeypatch, at_a_time):
    def judged(cell):
        return not {"tp=2", LOSS} <= cell and not {"pp=2", "mbs=2"} <= cell

    first, _ = ran(here, monkeypatch, judged, at_a_time=at_a_time)
    trials = campaign.resumed(here / "audits")[1].trials
    audited = {trial.settings for trial in trials}
    second, other = resumed(here, monkeypatch, trials, judged, at_a_time=at_a_time)
    assert not {*other.settings} & audited
    assert [finding.settings for finding in second.findings] == [finding.settings for finding in first.findings]
    assert len(first.findings) == 2


@several
def test_a_fault_is_shrunk_and_detected_once(here, monkeypatch, at_a_time):
    result, answers = ran(here, monkeypatch, lambda cell: not {"tp=2", LOSS} <= cell, at_a_time=at_a_time)
    assert [finding.settings for finding in result.findings] == [("tp=2", LOSS)]
    assert len({*answers.settings}) == len(answers.settings)
    assert (result.pending, result.exit_status) == (0, 1)


def the_first_ends_last(model, words, settings, where, at):
    """Stands for audits, of which the first ends once the third has begun."""
    where.mkdir(parents=True)
    until = time.monotonic() + 20
    while where.name == "1" and not (where.parent / "3").exists():
        assert time.monotonic() < until, "no other audit runs beside the first"
        time.sleep(0.01)
    return AuditRun(settings, WITHIN, "text", None, 1.0)


def test_two_audits_run_at_a_time_and_are_told_in_the_order_of_the_plan(here, monkeypatch):
    one_at_a_time, _ = ran(here / "1", monkeypatch, lambda cell: True)
    monkeypatch.undo()
    monkeypatch.setattr(campaign, "Configurations", lambda *_: cells_of_layouts_and_losses())
    monkeypatch.setattr(campaign.Campaign, "_concurrent", lambda _: 2)
    monkeypatch.setattr(campaign, "audited", the_first_ends_last)
    two = begun(here / "2")
    assert {trial.settings for trial in two.run().trials} == {trial.settings for trial in one_at_a_time.trials}
    assert two.state.trials[0] == one_at_a_time.trials[0]


@pytest.mark.parametrize("cores, free, number", ((1, 2**40, 1), (2, 2**40, 2), (8, 2**30, 1), (8, None, 2)))
def test_two_audits_run_at_a_time_where_there_are_cores_and_memory(here, monkeypatch, cores, free, number):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(campaign, "Configurations", lambda *_: cells_of_layouts_and_losses())
    audits = begun(here)
    monkeypatch.setattr(processor, "available", lambda: free)
    assert audits._concurrent() == number


def the_third_does_not_end(model, words, settings, where, at):
    where.mkdir(parents=True)
    (where / "pid").write_text(str(os.getpid()))
    if int(where.name) > 2:
        time.sleep(600)
    return AuditRun(settings, WITHIN, "text", None, 1.0)


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also in tests that run in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM), ids=("Ctrl-C", "SIGTERM"))
def test_a_stop_ends_all_audits_and_names_the_command_that_goes_on(here, monkeypatch, number):
    monkeypatch.setattr(campaign, "Configurations", lambda *_: cells_of_layouts_and_losses())
    monkeypatch.setattr(campaign.Campaign, "_concurrent", lambda _: 2)
    monkeypatch.setattr(campaign, "audited", the_third_does_not_end)
    where, state = campaign.new("qwen3_toy", ["device=cpu"], here / "audits")
    told = []

    def stop():
        while len(told) < 2 or not all((where.trial(n) / "pid").exists() for n in (3, 4)):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Interrupted, match=f"stopped after 2 audits; tpi audit --resume {where.path}"):
        campaign.execute(where, state, lambda trial, *_: told.append(trial), resume=False)
    assert campaign.resumed(where.path)[1].trials == told
    pids = {(where.trial(n) / "pid").read_text() for n in (3, 4)}
    assert len(pids) == 2
    assert not any(Path("/proc", pid).exists() for pid in pids)


@pytest.mark.parametrize("known", (None, "a known fault"))
def test_the_first_fault_that_is_not_known_ends_a_campaign_on_request(here, monkeypatch, known):
    result, _ = ran(here, monkeypatch, lambda cell: LOSS not in cell, known=known, exitfirst=True)
    assert bool(result.pending) == (known is None)
    assert all(finding.trial.known == known for finding in result.findings)


@several
def test_the_smallest_part_that_bridge_refuses_is_refused_once(here, monkeypatch, at_a_time):
    def problems(self, cell):
        return dict.fromkeys(["as Bridge says"] if {"pp=2", LOSS} <= cell else [])

    monkeypatch.setattr(campaign.Campaign, "_problems", problems)
    refused = {"pp=2", LOSS}
    result, answers = ran(here, monkeypatch, lambda cell: None if refused <= cell else True, at_a_time=at_a_time)
    assert sum(refused <= {*settings} for settings in answers.settings) <= 2 * at_a_time - 1
    assert result.refused == {f"pp=2 {LOSS}": "as Bridge says"}
    assert (result.pending, result.exit_status) == (0, 0)


def test_bridges_refusal_of_a_typed_override_beside_a_setting_is_its_own(here):
    """As of the distributed optimizer, which FSDP needs: of each layout and option."""
    fsdp = configurations.OPTIONS["fsdp"][0]
    audits = begun(here, "optimizer.use_distributed_optimizer=false")
    audits._refuse(frozenset(("tp=2", "mbs=2", LOSS, fsdp)))
    [(refused, why)] = audits._refused.items()
    assert (refused, why.partition(":")[0]) == ({fsdp}, "optimizer.use_distributed_optimizer=false")
    assert audits._allowed(frozenset(("tp=2",)))
    assert not audits._allowed(frozenset(("dp=2", fsdp)))


def test_a_full_disk_refuses_no_configuration_and_ends_the_campaign(here, monkeypatch):
    """Otherwise configurations are "not tried", with status 0: each refusal has another number of bytes."""
    audits, free = begun(here), itertools.count(32 << 20, -1 << 20)
    monkeypatch.setattr(machine, "free_bytes", lambda path: next(free))
    with pytest.raises(RunError, match=rf"32.0 MiB free .*; then tpi audit --resume {audits.where.path}"):
        audits._refuse(frozenset(("dp=2",)))
    assert not audits._refused


FEW = ("optimizer.optimizer=adam", "optimizer.use_distributed_optimizer=false", "validation.eval_iters=0")


# A bug, and the setting without which it does not strike.
NEEDED = ((audit_bugs.softmax_over_own_words, "tp=2"), (audit_bugs.sinks_of_another_head, "softmax_type"))


@pytest.mark.release
@pytest.mark.parametrize("bug, needed", NEEDED)
def test_a_planted_fault_is_detected_and_shrunk_to_what_it_needs(shared, bug, needed):
    words = ("device=cpu", *FEW, "--all", "-x", "--dir", bug.__name__)
    shared("audit", "qwen3_toy", *words, before=bug, status=1)
    [finding] = json.loads((shared.folder / bug.__name__ / "audits.json").read_text())["findings"]
    assert needed in " ".join(finding["settings"])
    assert len(finding["settings"]) <= 2
