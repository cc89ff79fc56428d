# SPDX-License-Identifier: Apache-2.0
"""`tpi score --against` says what it did not compare and refuses what it cannot assign; a changed OUT is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from tp_invariant_recipes.data.sequences import Sequence
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.score import against as score_against
from tp_invariant_recipes.features.score import workflow as score

IDS, LENGTH = [f"s{n}" for n in range(5)], 6
VALUES = np.random.default_rng(0).uniform(-3, -0.1, (len(IDS), LENGTH)).astype(np.float32)
TOKENS = [list(range(n, n + LENGTH)) for n in range(len(IDS))]


@pytest.fixture
def scores(tmp_path) -> Path:
    rows = [
        output.line(Sequence(name, [0, *tokens], 1), values[None].astype(np.float64), ("logprobs",))
        for name, tokens, values in zip(IDS, TOKENS, VALUES, strict=True)
    ]
    (tmp_path / "out.jsonl").write_bytes(b"".join(rows))
    return tmp_path / "out.jsonl"


def engine_rows() -> list[dict]:
    """What an engine returns that computes the reference's bits."""
    return [
        {"id": name, "token_ids": tokens, "logprobs": [float(str(x)) for x in values]}
        for name, tokens, values in zip(IDS, TOKENS, VALUES, strict=True)
    ]


def judged(scores: Path, rows, **options) -> dict:
    file = scores.with_name("engine.jsonl")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = score_against.compare(scores, file, **options)
    return result.as_json() | {"exit_status": result.exit_status}


def first_only(rows):
    return rows[:1]


def last_token(rows):
    return [row | {"token_ids": row["token_ids"][-1:], "logprobs": row["logprobs"][-1:]} for row in rows]


def single_value(rows):
    return [row | {"logprobs": [None] * (LENGTH - 1) + row["logprobs"][-1:]} for row in rows]


def additional(rows):
    return [*rows, rows[0] | {"id": "t"}]


# What the file lacks -> the end of the verdict, before and after the number of differences.
PARTIAL = (
    (first_only, "6", "; not compared, of 30 scored tokens: 4 sequences that the file lacks"),
    (last_token, "5", "; not compared, of 30 scored tokens: 25 tokens without a value"),
    (single_value, "5", "; not compared, of 30 scored tokens: 25 tokens without a value"),
    (
        lambda rows: first_only(last_token(rows)),
        "1",
        "; not compared, of 30 scored tokens: 4 sequences that the file lacks and 5 tokens without a value",
    ),
    (additional, "all 30", "; 1 row of sequences that were not scored"),
)


@pytest.mark.parametrize("change, count, end", PARTIAL)
def test_a_verdict_says_what_was_not_compared(scores, change, count, end):
    result = judged(scores, change(engine_rows()))
    text = f"{count} log-probabilities, 0 differences by bits{end}"
    assert result["text"].splitlines() == [
        f"equal in part: {scores.with_name('engine.jsonl')}: {text}",
        "only a part was compared: exit status 2; --partial accepts it",
    ]
    assert result["exit_status"] == 2
    accepted = judged(scores, change(engine_rows()), partial=True)
    assert (accepted["exit_status"], len(accepted["text"].splitlines())) == (0, 1)


def test_a_difference_also_says_what_was_not_compared(scores):
    rows = first_only(engine_rows())
    rows[0]["logprobs"][0] -= 1
    result = judged(scores, rows)
    assert result["exit_status"] == 1
    omitted = "not compared, of 30 scored tokens: 4 sequences that the file lacks"
    assert result["text"].splitlines()[0].endswith(f"; {omitted}")


def without(rows, key):
    return [{k: v for k, v in row.items() if k != key} for row in rows]


REFUSED = (
    (lambda rows: [*rows, rows[1]], "line 6: id 's1' is there twice"),
    (lambda rows: [*rows[:2], *without(rows[2:], "id")], "line 3: it has no id, and the first row has one"),
    (lambda rows: [*without(rows[:2], "id"), *rows[2:]], "line 3: the row has an id, and the first has none"),
    (lambda rows: without(rows[:2], "id"), "have not as many rows"),
)


@pytest.mark.parametrize("change, why", REFUSED)
def test_rows_that_no_sequence_can_be_told_of_are_refused(scores, change, why):
    with pytest.raises(ConfigError, match=why):
        judged(scores, change(engine_rows()))


def test_scores_with_an_id_twice_are_refused(scores):
    scores.write_bytes(scores.read_bytes().replace(b'"s1"', b'"s0"'))
    with pytest.raises(ConfigError, match="has the id 's0' twice"):
        judged(scores, [row for row in engine_rows() if row["id"] != "s1"])


CHANGED = (
    lambda data: b"".join(data.splitlines(keepends=True)[:2]),
    lambda data: data.replace(b'"logprobs": [-', b'"logprobs": [-9', 1),
)


@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_out_is_not_taken_for_ones_own(scores, change):
    identity = {"schema": 1, "sequences": {"count": 5}}
    scoring = score.Scoring(None, None, scores, None, identity, scores, score.ScoreRequest(scores), 0)
    output.meta(scores).write_text(json.dumps(identity | {output.WRITTEN: output.described(scores)}))
    assert score.finished(scoring)
    output.check_unchanged(scores)
    scores.write_bytes(change(scores.read_bytes()))
    for refusing in (lambda: score.finished(scoring), lambda: output.check_unchanged(scores)):
        with pytest.raises(RunError, match=r"was changed since tpi wrote it: it has [25] lines and another hash"):
            refusing()


HALVES = ("logprobs", "digest_high", "digest_low")
DIGESTS = [[n, 2**32 - 1 - k] for n in range(len(IDS)) for k in range(LENGTH)]


def with_digests(tmp_path) -> Path:
    halves = np.array(DIGESTS, np.float64).reshape(len(IDS), LENGTH, 2)
    rows = [
        output.line(Sequence(name, [0, *tokens], 1), np.stack([values, *half.T]), HALVES)
        for name, tokens, values, half in zip(IDS, TOKENS, VALUES.astype(np.float64), halves, strict=True)
    ]
    (tmp_path / "out.jsonl").write_bytes(b"".join(rows))
    return tmp_path / "out.jsonl"


def test_digests_of_the_vocabulary_are_compared(tmp_path):
    scores = with_digests(tmp_path)
    equal = [
        row | {"digests": [f"{n:08x}{2**32 - 1 - k:08x}" for k in range(LENGTH)]} for n, row in enumerate(engine_rows())
    ]
    report = judged(scores, equal)
    assert report["text"].endswith(
        "30 log-probabilities, 0 differences by bits; of the whole vocabulary, digests of 0 of 30 tokens differ"
    )
    assert report["exit_status"] == 0
    equal[2]["digests"][3] = "0" * 16
    changed = judged(scores, equal)
    assert changed["digests"] == {"compared": 30, "differing": 1}
    assert changed["exit_status"] == 1  # another token's probability, where the drawn one's is equal
    assert judged(scores, engine_rows())["digests"] == {"compared": 0, "differing": 0}


def test_the_verdict_begins_with_the_numerics(scores):
    rollouts = scores.with_name("engine.jsonl")
    assert "numerics: " not in judged(scores, engine_rows())["text"]  # the control: nobody knows an engine's
    for file, mode, kind in ((scores, "tree", "sequences"), (rollouts, "portable", "requests")):
        output.meta(file).write_text(json.dumps({"schema": 1, kind: {}, "numerics": {"mode": mode}}))
    first, verdict = judged(scores, engine_rows())["text"].splitlines()
    assert first.startswith("numerics: tree here, portable in ")
    assert verdict.startswith("equal: ")
    assert output.numerics_of(rollouts, "requests") == "portable"
    assert output.numerics_of(scores, "requests") is None  # scores claim no bits of a trainer
    output.meta(rollouts).write_text('{"schema": 1, "requests": {}, "numerics": {"mode": "rm -rf"}}')
    assert output.numerics_of(rollouts) is None


# Words that are typed -> what is asked for: a run that was trained in tree generates in portable.
TYPED = (((), "numerics=portable"), (("numerics=tree",), "numerics=tree"))


@pytest.mark.parametrize("typed, expected", TYPED)
def test_scores_have_the_numerics_of_the_rollouts_unless_typed(scores, monkeypatch, typed, expected):
    class Planned(Exception):
        pass

    def model_of(source, words, *rest):
        raise Planned(*(word.text for word in words))

    rollouts = scores.with_name("rollouts.jsonl")
    rollouts.write_text("{}\n")
    output.meta(rollouts).write_text('{"requests": {}, "numerics": {"mode": "portable"}}')
    monkeypatch.setattr(score, "model_of", model_of)
    for file in (rollouts, scores):  # also where other sequences are compared with them
        with pytest.raises(Planned) as asked:
            score.plan(score.ScoreRequest(scores, file, typed, scores, against=rollouts), file)
        assert asked.value.args == (expected,)


def test_a_bit_is_a_difference(scores):
    rows = engine_rows()
    value = np.array(rows[1]["logprobs"], np.float32)
    value.view(np.int32)[2] ^= 1
    rows[1]["logprobs"] = [float(str(x)) for x in value]
    report = judged(scores, rows)
    assert report["differing"] == 1
    assert report["exit_status"] == 1
    assert judged(scores, engine_rows())["differing"] == 0


def test_a_folder_in_the_place_of_sequences_is_refused(cli, tmp_path):
    ended = cli("score", "sequences.jsonl", str(tmp_path))
    assert ended.status == 2
    assert ended.err == f"error: {tmp_path}: a folder, where a file of SEQUENCES comes: tpi score RUN SEQUENCES\n"


def test_the_speed_is_without_the_lines_that_come_first(tmp_path, monkeypatch):
    """Nor those of an earlier start; prompts count, and half a line does not."""
    (tmp_path / "part-0").write_text('{"token_ids": [1, 2]}\n')
    written, clock = output.Written(tmp_path, "part-*"), iter((10.0, 12.0))
    monkeypatch.setattr(output.time, "monotonic", clock.__next__)
    for text in ('{"first": 3, "token_ids": [1]}\n{"tok', 'en_ids": [1, 2]}\n', ""):
        with (tmp_path / "part-0").open("a") as stream:
            stream.write(text)
        written.look()
    assert (written.lines, written.tokens, written.seconds, written.speed) == (2, 6, 2.0, 1.0)
    assert written.speed_in_words == "1 tokens/s"
