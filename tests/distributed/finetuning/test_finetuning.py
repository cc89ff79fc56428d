# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on examples: a user's recipe of Bridge's defaults for it, with a loss mask, trained on the CPU."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.scenario import Scenario, stock_differs, unequal
from tests.examples import example, write
from tests.recipe_files import TUNED
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.data.examples import read_examples, try_tokens
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.ledger.bits import bits_float

pytestmark = pytest.mark.usefixtures("families")

MINE = (
    TUNED
    + """
def tuned():
    return small(_sft_common())


def experts():
    cfg = tuned()
    cfg.model.num_moe_experts, cfg.model.moe_router_topk, cfg.model.moe_ffn_hidden_size = 8, 2, 128
    cfg.model.moe_router_load_balancing_type, cfg.model.moe_aux_loss_coeff = "aux_loss", 1e-2
    cfg.model.moe_token_dispatcher_type, cfg.model.moe_router_dtype = "alltoall", "fp32"
    cfg.model.expert_tensor_parallel_size = 1
    return cfg


def packed():
    from megatron.bridge.data.packing import PackedSequenceSpecs

    cfg = tuned()
    cfg.dataset.enable_offline_packing = True
    cfg.dataset.offline_packing_specs = PackedSequenceSpecs(packed_sequence_size=32)
    return cfg

"""
)
RECIPE = ("recipe=mine.py:tuned", "dataset.dataset_root=examples", "tokenizer.tokenizer_model=tokenizer")


@pytest.fixture(scope="module")
def mine(bridge, shared):
    """The folder of the runs, with a recipe, a tokenizer of 34 words and examples."""
    write(shared.folder)
    (shared.folder / "mine.py").write_text(MINE)
    return shared.folder


@pytest.fixture(scope="module")
def tuned(mine, shared):
    """The scenario of a recipe: `tuned("experts", "gbs=4")`."""
    (mine / "both").mkdir()
    lines = (mine / "examples" / "training.jsonl").read_text().splitlines(keepends=True)
    for name, chosen in {"training": lines, "validation": lines[-40:]}.items():
        (mine / "both" / f"{name}.jsonl").write_text("".join(chosen))
    return lambda function, *words: Scenario(shared, mine / "runs")(f"recipe=mine.py:{function}", *RECIPE[1:], *words)


# A recipe, what is held fixed, and layouts that must agree. Data-parallel ranks have examples of other numbers of
# tokens; the loss mask counts on the last stage alone. Validation is a second pass over 40 examples in another order.
SHORT = "iters=2 gbs=4 numerics.data_shards=2"
PER_TOKEN = "model.calculate_per_token_loss=true"  # one division by the tokens of all ranks, not one a sequence
VALIDATED = (
    "dataset.dataset_root=both iters=3 numerics.data_shards=2 validation.eval_iters=3 validation.eval_interval=1"
)
ROWS = (
    ("tuned", SHORT, ("tp=1", "tp=2", "dp=2 mbs=2", "pp=2", "tp=2 pp=2")),
    ("tuned", VALIDATED, ("tp=1", "dp=2 mbs=2")),
    ("tuned", f"{SHORT} {PER_TOKEN}", ("tp=1", "tp=2", "dp=2", "tp=2 dp=2")),
    ("experts", "iters=3 numerics.data_shards=2", ("tp=1", "tp=2", "dp=2 ep=2")),
)


@pytest.mark.release
@pytest.mark.parametrize("function, fixed, layouts", ROWS)
def test_tuning_has_one_result_in_every_layout(tuned, function, fixed, layouts):
    first, *others = (tuned(function, fixed, layout) for layout in layouts)
    for other in others:
        assert unequal(other.ledger(), first.ledger()) == [], other.words
    identity, last = first.header().identity, first.ledger()[-1]
    assert identity["data.digest"]
    assert not {"dataset.dataset_root", "tokenizer.tokenizer_model"} & identity.keys()
    assert ("validation/48:72" in last.evaluations) == (fixed == VALIDATED)
    if PER_TOKEN in fixed:
        assert first.ledger()[0].grad_norm != tuned("tuned", SHORT, "tp=1").ledger()[0].grad_norm


@pytest.mark.release
@pytest.mark.parametrize("function", ("tuned", "experts"))
def test_with_stock_numerics_it_has_not(tuned, function):
    assert "different at step 1" in stock_differs(tuned(function, "iters=1 gbs=1"), ("tp=1", "tp=2"))


@pytest.mark.release
def test_tuning_lowers_the_loss(mine, shared):
    shared("train", *RECIPE, "iters=24", "ledger.digests=0", "run.dir=long", status=0)
    results = [bits_float(step.loss) for step in shared.ledger("long")]
    assert len(results) == 24
    assert results[-1] < results[0] / 2, results


# What is wrong with the settings of a run, before anything is read.
SETTINGS = {
    "tuned": "needs dataset.dataset_root=FOLDER, which has training.jsonl",
    "packed numerics.adjust=false": "its padding is told apart; dataset.offline_packing_specs.pad_seq_to_mult=8",
    "tuned data=text data.path=.": "data=text: this recipe trains on examples",
    "tuned dataset.dataset_kwargs.pad_to_max_length=false": "pad_to_max_length=true",
    "tuned train.num_epochs=1": "tpi counts steps; leave it unset, iters=N",
    "tuned dataset.dataloader_type=single": "dataset.dataloader_type=batch",
    "tuned dataset.drop_last=false": "dataset.drop_last=true",
    "tuned numerics=portable": "fine-tuning is covered by numerics=tree only",
    "tuned model.calculate_per_token_loss=true numerics=gather": "a loss divided by the tokens of a step is covered",
    "tuned model.calculate_per_token_loss=true cp=2": "context-parallel ranks would count a sequence's tokens",
    "tuned cp=2 numerics.context_shards=2": "fine-tuning with context parallelism is not covered",
    "tuned dataset.hf_dataset.dataset_name=squad": "tpi downloads no examples",
    "tuned dataset._target_=a.B": "a recipe decides what its dataset is",
}
# These set what another one sets, or are all that is said.
OWN_RUNS = ("numerics=gather", "numerics.context_shards=2", "hf_dataset")


@pytest.mark.parametrize(
    "separate", (OWN_RUNS, pytest.param(("",), marks=pytest.mark.release)), ids=("together", "each")
)
def test_settings_that_are_refused(mine, separate):
    """In one test: what a recipe says is kept for the same environment alone."""
    assert not_refused(mine, SETTINGS, separate) == {}


def not_refused(
    folder: Path, settings: dict[str, str], separate: Sequence[str], more: tuple[str, ...] = ()
) -> dict[str, str]:
    """The settings that are not refused with their words, and what is said of them instead.

    All settings of a recipe are one command, whose message lists them; those that have one of the texts in `apart` are
    commands of their own.
    """
    commands: dict[str, list[str]] = {}
    for words in settings:
        commands.setdefault(words if any(text in words for text in separate) else words.split()[0], []).append(words)
    wrong = {}
    for batch in commands.values():
        overrides = [override for words in batch for override in words.split()[1:]]
        try:
            compose(f"recipe={folder}/mine.py:{batch[0].split()[0]}", [*overrides, *more], device="cpu")
            wrong |= dict.fromkeys(batch, "composes")
        except ConfigError as error:
            wrong |= {words: str(error) for words in batch if settings[words] not in str(error)}
    return wrong


def examples(folder: Path, *lines: str) -> Path:
    folder.mkdir()
    (folder / "training.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


# Lines after eight examples, and what is said of them.
LINES = {
    '{"input": "1 + 1 =", "output": "2"': "training.jsonl, line 9: not JSON",
    "[1, 2]": "line 9: not an object in braces",
    '{"input": "1 + 1 ="}': "line 9: no key 'output'; its keys: 'input'",
    '{"input": 1, "output": "2"}': "line 9: 'input' holds no text",
    "": "line 9: an empty line",
}


def test_a_broken_line_is_named(mine, tmp_path):
    for number, (line, says) in enumerate(LINES.items()):
        folder = examples(tmp_path / str(number), *map(example, range(8)), line)
        with pytest.raises(ConfigError, match="line 9") as caught:
            read_examples(folder, ["training.jsonl"], f"{mine}/tokenizer", ("input", "output"), chat=False)
        assert says in str(caught.value)


# Overrides of a command whose examples or tokenizer cannot be used, and its message.
FILES = {
    "dataset.dataset_root=none": "none: no such folder",
    "validation.eval_iters=1": "validation.jsonl: no such file; validation.eval_iters=0 needs none",
    "gbs=256": "has 240 examples, and a step takes 256; lower gbs",
    "tokenizer.tokenizer_model=examples": "no tokenizer files in this folder",
    "model.vocab_size=32": "has 34 token ids and the model 32; the tokenizer of the model",
}


@pytest.mark.release
def test_files_that_do_not_fit_are_reported_before_ranks_start(cli, mine, monkeypatch):
    monkeypatch.chdir(mine)
    for override, says in FILES.items():
        kept = [word for word in RECIPE if word.partition("=")[0] != override.partition("=")[0]]
        ended = cli("train", *kept, override, "device=cpu", "run.dir=wrong")
        assert (ended.status, ended.out) == (2, ""), override
        assert says in ended.err
        assert "Traceback" not in ended.err
        assert not (mine / "wrong").exists()


def test_settings_and_files_that_are_wrong_come_in_one_list(cli, mine, monkeypatch):
    monkeypatch.chdir(mine)
    wrong = ("validation.eval_iters=1", "gbs=256", "tokenizer.tokenizer_model=none", "train.num_epochs=1")
    ended = cli("train", *RECIPE[:2], *wrong, "checkpoint.pretrained_checkpoint=none", "device=cpu")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: 5 problems in this configuration:")
    for key in ("train.num_epochs", "checkpoint.pretrained_checkpoint=none", "eval_iters=0", "lower gbs"):
        assert key in ended.err
    assert "tokenizer.tokenizer_model: " in ended.err
    assert "byte" not in ended.err


def test_conversations_need_a_template(mine, tmp_path):
    message = {"messages": [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]}
    folder = examples(tmp_path / "chat", json.dumps(message))
    with pytest.raises(ConfigError, match="has no chat template"):
        read_examples(folder, ["training.jsonl"], f"{mine}/tokenizer", (), chat=True)
    with pytest.raises(ConfigError, match="no conversation under any of messages"):
        read_examples(mine / "examples", ["training.jsonl"], f"{mine}/tokenizer", (), chat=True)


@pytest.mark.release
def test_tuning_begins_with_the_weights_of_a_checkpoint(mine, shared):
    assert shared("train", *RECIPE, "seed=7", "iters=1", "save=1", "run.dir=start").status == 0
    start = "checkpoint.pretrained_checkpoint=start/checkpoints"
    shared("verify", *RECIPE, "tp=1,2", "iters=2", start, "--dir", "from", status=0)
    shared("train", *RECIPE, "iters=2", "run.dir=new", status=0)
    assert shared.ledger("from/tp1")[0].loss != shared.ledger("new")[0].loss


@pytest.mark.release
def test_tuning_goes_on_through_a_second_epoch(mine, shared):
    """240 examples are 30 steps of 8. The third epoch begins after 60."""
    assert shared("train", *RECIPE, "iters=70", "save=0", "run.dir=whole").status == 0
    assert shared("train", *RECIPE, "iters=70", "save=25", "train.exit_interval=25", "run.dir=parts").status == 0
    for _ in range(2):
        shared("train", "--resume", "parts", status=0)
    assert shared("compare", "whole", "parts").status == 0


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
)
STRICT = "{% for m in messages %}{{ raise_exception('roles must alternate') if m.role == 'system' }}{% endfor %}"
ASKED = {"role": "user", "content": "1 + 1 ="}
TRIED = {
    "no marks": ("{{ messages[0].content }}", [[ASKED]], "line 1: the chat template .* does not mark answers"),
    "a template that raises": (STRICT, [[{**ASKED, "role": "system"}]], "line 1: roles must alternate"),
    "no answer": (MARKED, [[ASKED]] * 2, "2 of 2 examples have no token that counts"),
    "an empty answer": (MARKED, [[ASKED, {"role": "assistant", "content": ""}]], "1 of 1 examples have no token"),
    "beyond seq": (MARKED, [[{**ASKED, "content": "1 " * 40}, {"role": "assistant", "content": "2"}]], "within seq=32"),
}


@pytest.mark.parametrize("name", TRIED)
def test_examples_without_a_token_that_counts_are_found_before_the_start(bridge, tmp_path, name):
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.sft_processing import ChatSFTPreprocessingConfig
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    write(tmp_path)
    template, conversations, message = TRIED[name]
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    how = ChatSFTPreprocessingConfig()
    dataset = GPTSFTDatasetConfig(dataset_root=str(tmp_path / "examples"), seq_length=32, preprocessing=how)
    tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer"))

    def tried(rows: list) -> str:
        file = tmp_path / "examples" / "training.jsonl"
        file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        return try_tokens(dataset, tokenizer)

    with pytest.raises(ConfigError, match=message):
        tried(conversations)
    if template is MARKED:
        good = [ASKED, {"role": "assistant", "content": "2"}]
        assert tried([good]) == ""
        assert re.search("1 of 3 examples have no token that counts .*: lines 2", tried([good, conversations[0], good]))
