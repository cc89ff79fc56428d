"""Multi-token prediction under `numerics=tree`: one ledger for all layouts, the last stage with its layers."""

import pytest

from tests.distributed.scenario import agree, stock_differs, unequal
from tests.distributed.small_models import RECOMPUTED, small

AHEAD = "model.mtp_num_layers=1 numerics.virtual_shards=4 iters=2"
SHARDS = "gbs=4 numerics.data_shards=4"
HYBRID = (
    "model.mtp_num_layers=2 model.mtp_use_repeated_layer=true model.mtp_hybrid_override_pattern=*ME "
    "numerics.virtual_shards=4 iters=2"
)

# Model, what is held fixed, the layouts that must agree.
ROWS = (
    pytest.param(small("deepseek_v3_toy"), AHEAD, ("tp=1", "pp=2", "tp=2 pp=2"), marks=pytest.mark.release),
    pytest.param(  # the last stage has no layer but those ahead
        small("deepseek_v3_toy"),
        AHEAD,
        (
            "tp=1",
            "pp=2 model.pipeline_model_parallel_layout=Ett|mL",
            "pp=2 model.pipeline_model_parallel_layout=Et|tmL",
        ),
        marks=pytest.mark.release,
    ),
    pytest.param(
        small("deepseek_v3_toy"),
        f"{AHEAD} {SHARDS}",
        ("dp=1", "dp=2 tp=2 ep=2", "pp=2 dp=2 optimizer.use_distributed_optimizer=true"),
        marks=pytest.mark.release,
    ),
    pytest.param(
        "qwen3_toy seq=32 gbs=4",  # the embedding is the output layer's weight, too
        f"{AHEAD} model.mtp_num_layers=2 numerics.data_shards=2",
        ("dp=1", "dp=2 tp=2"),
        marks=pytest.mark.release,
    ),
    pytest.param(
        "qwen3_toy seq=32 gbs=4 model.share_embeddings_and_output_weights=false",
        f"{AHEAD} model.mtp_num_layers=2 numerics.data_shards=2 precision=fp32",
        ("dp=1", "pp=2", "dp=2"),
        marks=pytest.mark.release,
    ),
    pytest.param(
        "qwen3_toy seq=32 model.num_layers=1", AHEAD, ("tp=1", f"tp=2 {RECOMPUTED}"), marks=pytest.mark.release
    ),
    pytest.param(
        "qwen3_toy seq=32 gbs=4 model.share_embeddings_and_output_weights=false",
        f"{AHEAD} model.mtp_num_layers=2 numerics.data_shards=2",
        ("dp=1", *(f"{layout} {RECOMPUTED}" for layout in ("dp=1", "dp=2", "pp=2 dp=2", "tp=2 sp=false pp=2", "tp=4"))),
        marks=pytest.mark.release,
    ),
    # A hybrid model repeats its layers ahead; at pp=1 a router of the model has the number of one of theirs.
    pytest.param(small("nemotron3_nano_toy"), HYBRID, ("tp=1", "pp=2", "tp=2 ep=2"), marks=pytest.mark.release),
    pytest.param(
        small("nemotron3_nano_toy"),
        f"{HYBRID} {SHARDS} model.mtp_use_repeated_layer=false",
        ("dp=1", "dp=2 tp=2", "dp=2 pp=2 ep=2"),
        marks=pytest.mark.release,
    ),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, model, fixed, layouts):
    agree(scenario(model, fixed), layouts)


@pytest.mark.release
def test_a_run_that_recomputes_resumes(scenario, tpi):
    words = (
        f"qwen3_toy seq=32 model.num_layers=1 {AHEAD} {RECOMPUTED} scheduler.lr_decay_iters=4 ledger.state_digests=1"
    )
    tpi("train", *words.split(), "tp=2", "save=2", "run.dir=run", status=0)
    tpi("train", "--resume", "run", "iters=4", status=0)
    assert unequal(tpi.ledger("run"), scenario(words, "iters=4").ledger()) == []


@pytest.mark.release
@pytest.mark.parametrize("words", ((small("deepseek_v3_toy"), AHEAD), (small("nemotron3_nano_toy"), HYBRID)))
def test_the_loss_of_later_tokens_counts(scenario, words):
    model = scenario(*words, "tp=1")
    assert model.ledger()[0].grad_norm != model("model.mtp_loss_scaling_factor=0.3").ledger()[0].grad_norm


@pytest.mark.release
@pytest.mark.parametrize(
    "words",
    (
        (small("deepseek_v3_toy"), AHEAD),
        (small("nemotron3_nano_toy"), HYBRID),
        ("qwen3_toy seq=32 model.num_layers=1", f"{AHEAD} {RECOMPUTED}"),
    ),
)
def test_stock_does_not(scenario, words):
    message = stock_differs(scenario(*words, "iters=1"), ("tp=1", "tp=2"))
    assert "different at step 1" in message


def _in_single_sum() -> None:
    from tp_invariant_recipes.numerics.megatron import local

    local.InvariantVocabParallelEmbedding.ahead = property(lambda self: False, lambda self, value: None)


@pytest.mark.release
def test_lookups_of_later_tokens_need_a_sum_of_their_own(scenario):
    """At pp=2 the two sums are on two ranks; at pp=1 one buffer would get both in turns.

    In fp32: the few tokens of a row of the vocabulary add up exactly in bf16.
    """
    untied = scenario("qwen3_toy seq=32 gbs=4 model.share_embeddings_and_output_weights=false precision=fp32", AHEAD)
    first, second = (untied(at).planted(_in_single_sum).ledger() for at in ("pp=1", "pp=2"))
    assert first[0].loss == second[0].loss
    assert unequal(first, second)


@pytest.mark.parametrize(
    "words, message",
    (
        ("cp=2 numerics.context_shards=2", "multi-token prediction has no version with context shards"),
        ("numerics=gather", "multi-token prediction is covered by numerics=tree only"),
        ("pp=2", "cannot save a tied embedding beside multi-token prediction"),
        (f"{RECOMPUTED} model.recompute_num_layers=2", "recomputes the layers of multi-token prediction one by one"),
        (f"{RECOMPUTED} model.recompute_method=block", "recomputes the layers of multi-token prediction one by one"),
    ),
)
def test_what_is_refused(cli, words, message):
    ended = cli("train", "qwen3_toy", "seq=32", "model.mtp_num_layers=1", "device=cpu", "--dry-run", *words.split())
    assert ended.status == 2
    assert message in ended.err
