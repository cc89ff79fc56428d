"""What a ledger is asked to record is checked before anything starts."""

import copy

import pytest

from tp_invariant_recipes.config import recording
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError

TREE = compose("qwen3_toy", [], device="cpu").tree


def changed(**fields) -> dict:
    """The toy with other fields, named section__field."""
    tree = copy.deepcopy(TREE)
    for name, value in fields.items():
        section, field = name.split("__")
        tree[section][field] = value
    return tree


def test_digests_are_recorded_at_every_step_unless_told_otherwise():
    assert TREE["ledger"] == {"digests": 1, "state_digests": 10, "trace": None, "dump": []}
    assert recording.problems(TREE) == []


@pytest.mark.parametrize("text, first, last", (("1:1", 1, 1), ("3:12", 3, 12)))
def test_steps_include_both_ends(text, first, last):
    assert list(recording.steps(text)) == list(range(first, last + 1))


@pytest.mark.parametrize("text", ("", "3:", ":3", "0:3", "3:2", "a:b", "1:2:3", "-1:2", "1.0:2"))
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(ValueError, match="FIRST:LAST"):
        recording.steps(text)
    assert recording.problems(changed(ledger__trace=text))


@pytest.mark.parametrize(
    "fields, words",
    (
        ({"ledger__digests": -1}, "ledger.digests=-1: must be 0 (never) or a number of steps"),
        ({"ledger__digests": True}, "ledger.digests=True"),
        ({"ledger__state_digests": -1}, "ledger.state_digests=-1: must be a number of steps, or 0"),
        ({"ledger__state_digests": 1.5}, "ledger.state_digests=1.5"),
        ({"optimizer__optimizer_cpu_offload": True}, "optimizer.optimizer_cpu_offload=false"),
        ({"ledger__trace": "99:101"}, "the run ends at step 50; raise iters or trace less"),
        ({"ledger__trace": "1:2", "model__cuda_graph_impl": "local"}, "model.cuda_graph_impl=local; cuda_graph=off"),
        ({"ledger__dump": ["weights/x"]}, "at which steps? set ledger.trace=FIRST:LAST"),
        ({"ledger__dump": ["weights/x", "loss", "forward/x"], "ledger__trace": "1:1"}, "ledger.dump: loss, forward/x:"),
        ({"ddp__use_megatron_fsdp": True}, "ddp.use_megatron_fsdp=false"),
        ({"ddp__use_megatron_fsdp": True}, "or record none: ledger.digests=0"),
        ({"model__gtp_weight_remat_size": 2}, "model.gtp_weight_remat_size=1"),
    ),
)
def test_each_mistake_names_the_key(fields, words):
    (problem,) = recording.problems(changed(**fields))
    assert words in problem


def test_what_digests_cannot_cover_can_be_trained_without_them():
    assert recording.problems(changed(ledger__digests=0, ddp__use_megatron_fsdp=True)) == []


@pytest.mark.parametrize(
    "name", ("forward/decoder.layers.0.mlp/output", "backward/model/input.1", "gradients/a.b", "weights/a.b")
)
def test_tensors_that_can_be_dumped(name):
    assert recording.problems(changed(ledger__dump=[name], ledger__trace="1:1")) == []


def test_the_command_line_takes_them_and_lists_all_that_is_wrong():
    tree = compose("qwen3_toy", ["ledger.trace=1:3", "ledger.digests=10", "ledger.dump=[weights/a.b]"]).tree
    assert tree["ledger"] == {"digests": 10, "state_digests": 10, "trace": "1:3", "dump": ["weights/a.b"]}
    with pytest.raises(ConfigError) as caught:
        compose("qwen3_toy", ["ledger.trace=3:1", "ledger.digests=-1", "ledger.digest=3", "tp=3"])
    assert len(caught.value.problems) >= 4
    assert "ledger.digests" in str(caught.value)
