# SPDX-License-Identifier: Apache-2.0
"""`tpi score --vocab`: which rows and columns a rank writes, and what a comparison counts."""

import json

import numpy as np
import pytest
import torch

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.score import vocabulary

LENGTHS = {"a": 3, "b": 5}


def written(file, table, lengths=LENGTHS, *, named=True):
    """Scores whose file of the vocabulary is `table`."""
    rows = [{"token_ids": [1] * count, "logprobs": [-1.0] * count} for count in lengths.values()]
    named_rows = [row | ({"id": name} if named else {}) for name, row in zip(lengths, rows, strict=True)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in named_rows))
    np.save(vocabulary.beside(file), table)
    return file


@pytest.fixture
def table():
    return np.random.default_rng(1).standard_normal((8, 10), dtype=np.float32)


def test_ranks_write_their_rows_and_columns_and_no_padding(tmp_path, table):
    file = tmp_path / "out.vocab.npy"
    vocabulary.create(file, 8, 10)
    padded = torch.from_numpy(np.pad(table, ((0, 0), (0, 2))))
    for rows in (torch.tensor([0, 2, 4, 6]), torch.tensor([7, 5, 3, 1])):
        for column in (0, 6):  # of two ranks, whose twelve columns are ten and padding
            ranks = vocabulary.VocabularyRows(file)
            ranks.write(rows, padded[rows, column : column + 6], column)
    assert np.array_equal(np.load(file), table)
    vocabulary.create(file, 8, 10)  # goes on
    assert np.array_equal(np.load(file), table)


@pytest.mark.parametrize("named", (True, False))
def test_differing_entries_are_counted_by_bits_and_rows_by_id(tmp_path, table, named):
    other = table.copy()
    other[1, 3] = np.nextafter(table[1, 3], np.float32(9))
    other[6] += 1
    actual = written(tmp_path / "a.jsonl", table, named=named)
    if named:  # in another order
        expected = written(tmp_path / "b.jsonl", np.vstack([other[3:], other[:3]]), {"b": 5, "a": 3})
    else:
        expected = written(tmp_path / "b.jsonl", other, named=False)
    comparison = vocabulary.compare(actual, expected)
    assert comparison == pytest.approx(
        {"tokens": 8, "differing_tokens": 2, "entries": 80, "differing": 11, "largest": 1.0}, rel=1e-6
    )
    assert "11 of 80 entries differ in 2 of 8 tokens, at most by 1" in vocabulary.text(comparison)


def test_equal_infinities_are_equal_and_others_are_far(tmp_path, table):
    table[0, 0] = -np.inf
    actual, other = written(tmp_path / "a.jsonl", table), table.copy()
    equal = vocabulary.compare(actual, written(tmp_path / "b.jsonl", other))
    assert equal["differing"] == 0
    assert vocabulary.text(equal).endswith("0 of 80 entries differ in 0 of 8 tokens")
    other[0, 1] = np.nan
    assert vocabulary.compare(actual, written(tmp_path / "b.jsonl", other))["largest"] == np.inf


def test_a_file_that_does_not_fit_is_refused(tmp_path, table, monkeypatch):
    actual = written(tmp_path / "a.jsonl", table)
    with pytest.raises(ConfigError, match="must have float32"):
        vocabulary.compare(actual, written(tmp_path / "b.jsonl", table[:7]))
    with pytest.raises(ConfigError, match="9 entries a token"):
        vocabulary.compare(actual, written(tmp_path / "b.jsonl", np.ascontiguousarray(table[:, :9])))
    assert "which tpi score --vocab writes" in vocabulary.check(tmp_path / "c.jsonl")[0]
    monkeypatch.setattr(vocabulary, "free_bytes", lambda path: 100)
    with pytest.raises(ConfigError, match="score fewer sequences"):
        vocabulary.create(tmp_path / "new.npy", 8, 10)
