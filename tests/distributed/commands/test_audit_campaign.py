"""`tpi audit --all`: what a refusal leaves, what a cell becomes, and that equal references are trained once."""

from types import SimpleNamespace

import pytest

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.audit import campaign, workflow
from tp_invariant_recipes.runs.audit_dir import AuditedRun

pytestmark = pytest.mark.usefixtures("bridge", "here")


def begun(here, *overrides: str) -> campaign.Campaign:
    """A campaign of a dense model, before its first audit."""
    where, state = campaign.new("qwen3_toy", ["device=cpu", *overrides], here / "audits")
    where.path.mkdir()
    campaign._write_texts(where.texts)
    return campaign.Campaign(where, state, campaign.quiet, lambda trial: None, scripts=False)


def test_a_refusal_leaves_no_directory(here):
    where, state = campaign.new("qwen3_toy", ["device=cpu", "model.num_layers=0"], here / "audits")
    with pytest.raises(ConfigError):
        campaign.execute(where, state, campaign.quiet, lambda trial: None, resume=False)
    assert not where.path.exists()


def test_a_cell_is_configured_as_hydra_composes_it(here, monkeypatch):
    monkeypatch.setattr(campaign.options, "OPTIONS", {"loss": campaign.options.OPTIONS["loss"]})
    audits = begun(here)
    cell = frozenset(("tp=2 sp=false", "mbs=2", "model.calculate_per_token_loss=true"))
    composed = audits._composed([*audits._sizes, *audits._words(cell)])
    assert audits._configured(cell).sections == composed.sections
    assert audits._configured(frozenset(("mbs=2",))).sections != composed.sections
    monkeypatch.setattr(workflow, "check", lambda planned: (_ for _ in ()).throw(ConfigError("refused by Bridge")))
    assert audits._allowed(cell)
    assert audits._audited(cell) is None  # and the next cell is another
    assert not audits._allowed(cell)
    assert audits.state.trials == []


@pytest.mark.parametrize("experts, trained", ((None, 2), (8, 3)))
def test_an_equal_reference_is_trained_once_unless_it_follows_choices(here, monkeypatch, experts, trained):
    monkeypatch.setattr(campaign.options, "OPTIONS", {})
    audits, trainings = begun(here), []

    def execute(planned, watch, *, keep, page, reference):
        if reference is None:
            trainings.append(planned)
            planned.directory.training(workflow.REFERENCE).path.mkdir(parents=True)
        return {}

    def planned(number: int, layers: int):
        shape = SimpleNamespace(experts=experts)
        config = SimpleNamespace(sections={"model": {"num_layers": layers}}, shape=shape)
        composed = SimpleNamespace(composed=SimpleNamespace(config=config))
        directory = SimpleNamespace(training=lambda name: AuditedRun(here / str(number) / name))
        return SimpleNamespace(reference=composed, directory=directory, steps=range(1, 2))

    monkeypatch.setattr(workflow, "execute", execute)
    for number, layers in enumerate((2, 2, 1)):
        audits._executed(planned(number, layers))
    assert len(trainings) == trained


ALL = [[0, 1, 2, 3]]
