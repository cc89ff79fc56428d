# SPDX-License-Identifier: Apache-2.0
"""Examples for fine-tuning are checked, each line of them, before ranks start."""

import json
import shutil

import pytest

from tests.examples import write
from tp_invariant_recipes.data.examples import read_examples
from tp_invariant_recipes.errors import ConfigError

ASK = {"role": "user", "content": "1 + 1"}
GOOD = (
    {"messages": [ASK, {"role": "assistant", "content": "2"}]},
    {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]},
    {"conversation": [{"role": "user", "content": [{"type": "text", "text": "1"}]}]},
    {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
)
BAD = {
    "no role": ([{"content": "a"}], "turn 1 has no role and content (or from and value); its keys: 'content'"),
    "no content": ([ASK, {"role": "assistant"}], "turn 2 has no role and content"),
    "half of ShareGPT": ([{"from": "gpt", "content": "a"}], "turn 1 has no role and content"),
    "text for a turn": ([ASK, "2"], "turn 2 is no object with role and content"),
    "a list for a turn": ([[ASK]], "turn 1 is no object"),
    "a number as content": ([{"role": "user", "content": 2}], "turn 1 has a content that is no text"),
    "no content at all": ([{"role": "assistant", "content": None}], "turn 1 has a content that is no text"),
    "a picture": ([{"role": "user", "content": [{"type": "image"}]}], "turn 1 has a content that is no text"),
    "no text as role": ([{"role": None, "content": "a"}], "turn 1 has a role that is no text"),
    "text": ("user: a", "no conversation under any of messages"),
    "nothing": ([], "no conversation under any of messages"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_conversation_is_named_by_file_and_line(tmp_path, name):
    file = tmp_path / "training.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    read_examples(tmp_path, [file.name], None, (), chat=True)  # the control
    turns, message = BAD[name]
    file.write_text("".join(json.dumps(row) + "\n" for row in (*GOOD, {"messages": turns})))
    with pytest.raises(ConfigError) as refused:
        read_examples(tmp_path, [file.name], None, (), chat=True)
    assert str(refused.value).startswith(f"{file}, line {len(GOOD) + 1}: {message}")


@pytest.mark.parametrize("name", ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "spiece.model",
                                  "vocab.bpe", "tokenizer.model.v3", "tekken.json", "chat_template.json"))  # fmt: skip
def test_every_file_that_decides_a_token_is_part_of_the_digest(tmp_path, name):
    write(tmp_path)
    folder, file = tmp_path / "tokenizer", tmp_path / "tokenizer" / name
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    digests = []
    for content in ("{{ messages }}", "{{ messages }} "):
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        (folder / "README.md").write_text(content)
        digests.append(
            read_examples(
                tmp_path / "examples", ["training.jsonl"], str(folder), ("input", "output"), chat=False
            ).digest
        )
    assert digests[0] != digests[1]


def test_a_chat_template_of_its_own_stands_in_the_tokenizers_place(tmp_path):
    write(tmp_path)
    (tmp_path / "examples" / "training.jsonl").write_text(json.dumps(GOOD[0]) + "\n")

    def read(**template):
        return read_examples(
            tmp_path / "examples", ["training.jsonl"], str(tmp_path / "tokenizer"), (), chat=True, **template
        ).digest

    with pytest.raises(ConfigError, match="has no chat template"):
        read()
    assert read(template="{{ messages }}")
    file = tmp_path / "chat.jinja"
    with pytest.raises(ConfigError, match=r"tokenizer.chat_template_path=.*chat.jinja: No such file"):
        read(template_file=file)
    digests = set()
    for text in ("a", "b"):
        file.write_text(text)
        digests.add(read(template_file=file))
    assert len(digests) == 2
