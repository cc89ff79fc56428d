# SPDX-License-Identifier: Apache-2.0
"""Sequences to score as they are read, and how they share forward passes."""

import json

import pytest

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.inference import rank as inference
from tp_invariant_recipes.features.rollouts import prompts
from tp_invariant_recipes.features.rollouts.requests import Sampling


def encode(text, special):
    return [1] * special + [*text.encode()]


def template(messages, answer):
    return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>" * answer


CODEC = sequences.Codec(encode, str, "", None, template)


def parsed(row, codec=CODEC):
    return [(item.id, item.tokens, item.first) for item in sequences.parse(json.dumps(row).encode(), 7, 256, codec)]


TALK = [{"role": "user", "content": "a"}]


# A row -> id, tokens, first scored position.
READ = (
    ({"tokens": [5, 6, 7]}, [(7, [5, 6, 7], 1)]),
    ({"tokens": [5, 6, 7], "id": "a", "prompt_length": 2}, [("a", [5, 6, 7], 2)]),
    ({"tokens": [0, 0, 5, 6, 0], "attention_mask": [0, 0, 1, 1, 0]}, [(7, [5, 6], 1)]),
    ({"tokens": [5, 6, 7, 8, 9], "cu_seqlens": [0, 2, 5]}, [("7[0]", [5, 6], 1), ("7[1]", [7, 8, 9], 1)]),
    ({"text": "ab"}, [(7, [1, 97, 98], 1)]),
    ({"prompt": "a", "response": "bc"}, [(7, [1, 97, 98, 99], 2)]),
    ({"prompt": [], "response": [5, 6]}, [(7, [5, 6], 1)]),
    ({"messages": TALK}, [(7, [*b"<user>a"], 1)]),
    ({"messages": TALK, "response": "b"}, [(7, [*b"<user>a<assistant>b"], 18)]),
)


@pytest.mark.parametrize("row, expected", READ, ids=lambda value: str(value)[:40])
def test_rows_that_are_read(row, expected):
    assert parsed(row) == expected


WRONG = (
    ({"tokens": [5]}, "no token to score"),
    ({"tokens": [5, 6], "prompt_length": 2}, "no token to score"),
    ({"tokens": [5, 256]}, "token 256 is outside the model's vocabulary of 256"),
    ({"tokens": [5, -1]}, "token -1 is outside the model's vocabulary"),
    ({"tokens": [5, True]}, "tokens must be a list of token ids"),
    ({"tokens": [5, 6], "attention_mask": [1]}, "attention_mask has another length"),
    ({"tokens": [5, 6], "cu_seqlens": [1, 2]}, "cu_seqlens must rise from 0"),
    ({"id": 1.5, "tokens": [5, 6]}, "id must be text or a whole number"),
    ({"token": [5, 6]}, "none of tokens, text, messages, prompt with response; its keys: 'token'"),
    ({"messages": [{"role": "user"}]}, "messages: the chat template refuses them: 'content'"),
    ({"conversations": TALK}, "a conversation is messages: "),
    ([5, 6], "not an object"),
)


@pytest.mark.parametrize("row, why", WRONG, ids=lambda value: str(value)[:40])
def test_rows_that_are_refused(row, why):
    with pytest.raises(ValueError, match=why):
        parsed(row)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="--tokenizer FOLDER"):
        parsed({"text": "ab"}, None)
    with pytest.raises(ValueError, match="messages need a tokenizer with a chat template"):
        parsed({"messages": TALK}, None)


def test_a_survey_lists_lines(tmp_path):
    file = tmp_path / "s.jsonl"
    file.write_text('{"tokens": [1, 2]}\n\n{"tokens": [1]}\nno json\n{"tokens": [1, 2, 3]}\n')
    with pytest.raises(ConfigError) as error:
        sequences.survey(file, 256, None)
    assert [problem.partition(": ")[0] for problem in error.value.problems] == [f"{file}, line {n}" for n in (3, 4)]
    file.write_text('{"tokens": [1, 2]}\n{"tokens": [1, 2, 3]}\n')
    read = sequences.survey(file, 256, None)
    assert (read.sequences, read.longest) == (2, 3)


def test_a_padded_length_depends_on_the_length_alone_and_wastes_an_eighth():
    for length in range(2, 5000):
        size = inference.padded(length, 8)
        assert size >= length
        assert size % 64 == 0
        assert size - length <= max(63, length / 8)
    assert len({inference.padded(n, 8) for n in range(1025, 65537)}) == 6 * 8


def test_passes_cover_every_sequence_once_and_ranks_have_as_many():
    lengths = [5, 700, 64, 65, 64, 1000, 3, 64]
    for tokens in (0, 128, 4096):
        for ranks in (1, 2, 4):
            each = [inference.plan(lengths, 8, tokens, ranks, rank) for rank in range(ranks)]
            assert len({len(passes) for passes in each}) == 1
            places = sorted({batch.places for passes in each for batch in passes})
            assert sorted(place for batch in places for place in batch) == [*range(8)]
            assert all(
                len(batch.places) == 1 or len(batch.places) * batch.length <= tokens for p in each for batch in p
            )
            assert all(
                inference.padded(lengths[place], 8) == batch.length
                for p in each
                for batch in p
                for place in batch.places
            )
            assert {len(batch.places).bit_count() for p in each for batch in p} == {1}


def test_a_window_is_bounded():
    many = [sequences.Sequence(n, [0] * 1000, 1) for n in range(3000)]
    windows = [*inference.windows(many, 1 << 18)]
    assert [item.id for window in windows for item in window] == [*range(3000)]
    assert max(sum(len(item.tokens) for item in window) for window in windows) < (1 << 18) + 1000


def test_a_file_without_sequences_is_refused(tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_bytes(b"\n \n")
    with pytest.raises(ConfigError, match="no sequences in it"):
        sequences.survey(file, 256, None)


def test_prompts_name_the_line_of_the_file_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": [1]}\n\n \nno json\n')
    with pytest.raises(ConfigError, match=r"p.jsonl, line 4: not JSON"):
        prompts.read(file, None, Sampling())
    file.write_bytes(b'\xef\xbb\xbf{"prompt": [1]}\n')
    with pytest.raises(ConfigError, match=r"line 1: it begins with a byte order mark"):
        prompts.read(file, None, Sampling())
