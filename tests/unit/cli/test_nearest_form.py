"""A key in another program's form, or a model in other letters: the message has the nearest right form."""

import pytest

# Arguments of `tpi train`, and what the message says.
FORMS = (
    ("qwen3_toy --tp 2", "A key has no dashes: write tp=2."),
    ("qwen3_toy --tp=2", "A key has no dashes: write tp=2."),
    ("--tp 2 qwen3_toy", "A key has no dashes: write tp=2."),
    ("qwen3_toy --tensor-model-parallel-size", "A key has no dashes: write tp=VALUE."),
    ("qwen3_toy --learning-rate 3e-4", "A key has no dashes: write lr=3e-4."),
    ("qwen3_toy --seed=\x1b]0;x", "A key has no dashes: write seed=\\x1b]0;x."),
    ("qwen3_toy --numerics stock", "A key has no dashes: write numerics=stock."),
    ("qwen3_toy tp 2", "tp 2: write tp=2"),
    ("qwen3_toy TP 2 seed=3", "TP 2: write tp=2"),
    ("qwen3_toy numerics stock", "numerics stock: write numerics=stock"),
    ("qwen3_toy num_layers 3", "num_layers 3: write model.num_layers=3"),
    ("qwen3_toy learning_rate=3", "unknown key 'learning_rate'; did you mean 'lr'?"),
    ("qwen3_toy global_batch_size=3", "unknown key 'global_batch_size'; did you mean 'gbs'?"),
    ("qwen3_toy batch_size=3", "unknown key 'batch_size'; did you mean 'mbs' or 'gbs'?"),
    ("qwen3_toy num_layers=3", "unknown key 'num_layers'; did you mean 'model.num_layers'?"),
    ("QWEN3_TOY", "unknown model 'QWEN3_TOY'; did you mean 'qwen3_toy'?"),
    ("Qwen/Qwen3-8B", "unknown model 'Qwen/Qwen3-8B'; did you mean 'qwen3_8b'?"),
    ("tp=2", "unknown model 'tp=2'; the model comes first: MODEL tp=2"),
)


@pytest.mark.parametrize("arguments, says", FORMS)
def test_the_message_has_the_nearest_correct_form(cli, here, no_gpus, arguments, says):
    ended = cli("train", *arguments.split())
    assert (ended.status, ended.out) == (2, "")
    assert says in " ".join(ended.err.replace("\u2502", " ").split())
    assert "problems" not in ended.err


@pytest.mark.parametrize("arguments", ("qwen3_toy --foo 3", "qwen3_toy foo=3", "qwen3_toy foo bar", "qwen3_toy x=3"))
def test_a_word_that_means_nothing_gets_no_hint(cli, here, no_gpus, arguments):
    ended = cli("train", *arguments.split())
    assert ended.status == 2
    assert "did you mean" not in ended.err
    assert "write" not in ended.err
