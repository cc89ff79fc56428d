"""`tpi audit` up to the point where Bridge would be imported: mistakes, and the reference that it plans."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.features.audit import reference as audit_reference

pytestmark = pytest.mark.usefixtures("here")

LORA = ("qwen3_moe_toy", "tp=2", "peft=lora", "checkpoint.pretrained_checkpoint=nowhere")

# Arguments of `tpi audit` on a machine without a GPU, and what must stand in the message.
MISTAKES = (
    (["qwen3_toy"], ["qwen3_toy is its own reference", "--against KEY=VALUE"]),
    (["qwen3_toy", "tp=2", "model.hidden_dropout=0.1"], ["dropout draws other numbers in every layout"]),
    (["qwen3_toy", "tp=2", "--reference", "dp=2", "--against", "pp=2"], ["--reference and --against"]),
    (["qwen3_toy", "tp=2", "--reference", "iters=2"], ["--reference iters=2: both train for as long"]),
    (["qwen3_moe_toy", "tp=2", "etp=2"], ["etp=2: every layout would begin with other experts; etp=1"]),
    (
        [*LORA, "numerics.initial_weights=megatron"],
        [
            "adapters of experts begin with other weights",
            "peft.target_modules=[linear_qkv,linear_proj], or numerics=tree",
        ],
    ),
    ([*LORA, "numerics=tree"], ["error: checkpoint.pretrained_checkpoint=nowhere: "]),
    (["--recorded", "a", "b", "tp=2"], ["trains nothing; leave out tp=2"]),
    (["--recorded", "a", "b"], ["a and b have no step in common"]),
    ([], ["missing MODEL"]),
    (["qwen3_toy", "--against", "tp=3"], ["tp=3 does not divide"]),
    (["qwen3_toy", "--against", "iters=3"], ["--against iters=3: both train for as long"]),
    (["qwen3_toy", "--against", "run.dir=x"], ["run.dir=x: an audit has its own directory; --dir PATH"]),
    (["qwen3_toy", "--dir", "taken", "--against", "tp=2"], ["--dir taken is there and is not an empty directory"]),
    (
        ["qwen3_toy", "save=2", "gbs=3", "mbs=2", "ledger.trace=1:1"],
        [
            "3 problems",
            "save=2: an audit saves no checkpoints",
            "an audit records every module itself",
            "gbs=3 is not a multiple",
        ],
    ),
)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("arguments, says", MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_screen_and_leaves_nothing(cli, here, arguments, says):
    ended = cli("audit", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    for part in says:
        assert ended.err.count(part) == 1
    assert sorted(p.name for p in here.rglob("*")) == ["file", "taken"]


def test_a_reference_is_the_simplest_of_what_the_configuration_has():
    config = compose(
        "qwen3_moe_toy",
        ["numerics=stock", "tp=2", "pp=2", "ep=2", "dp=2", "gbs=4", "mbs=2", "ddp.overlap_grad_reduce=true"],
    ).config
    result = audit_reference.overrides(config, [])
    assert {"train.micro_batch_size=1", "ddp.overlap_grad_reduce=false", "sp=false"} <= set(result)
    assert "parallel.data_parallel_size=1" in result
    own = parse_all(["mbs=2", "sp=true"])
    assert not {"train.micro_batch_size=1", "sp=false"} & set(audit_reference.overrides(config, own))
    assert "model.expert_model_parallel_size=4" in audit_reference.overrides(config, [], 4)
    assert audit_reference.overrides(compose("qwen3_toy", ["numerics=stock"]).config, []) == []


DEFINITIONS = (
    ("qwen3_toy", "dp=2", "numerics.data_shards=2"),
    ("qwen3_toy", "cp=2", "numerics.context_shards=2"),
    ("qwen3_moe_toy", "dp=2", "numerics.expert_groups=2"),
)


@pytest.mark.parametrize("model, word, count", DEFINITIONS)
def test_a_reference_of_invariant_numerics_has_their_definition(model, word, count):
    config = compose(model, ["numerics=tree", word, "gbs=4"]).config
    words = audit_reference.overrides(config, [])
    assert count in words
    assert count not in audit_reference.overrides(config, parse_all([count.replace("2", "1")]))
    name = count.partition("=")[0].partition(".")[2]
    defined = compose(model, ["numerics=tree", "gbs=4", *words]).config
    assert getattr(defined.numerics, name) == getattr(config.numerics, name)
    assert compose(model, ["numerics=tree", "gbs=4"]).config.numerics != defined.numerics
    stock = compose(model, ["numerics=stock", word, "gbs=4"]).config
    assert count not in audit_reference.overrides(stock, [])
