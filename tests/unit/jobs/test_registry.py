# SPDX-License-Identifier: Apache-2.0
"""Which jobs there are, and which one is meant."""

import threading

import pytest

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.jobs import registry


def test_the_registry_gives_ids_their_directories_the_later_of_two(tmp_path):
    registry.remember(tmp_path / "a", ["12"])
    registry.remember(tmp_path / "b", ["13", "12"])
    assert dict(registry.registered()) == {"12": tmp_path / "b", "13": tmp_path / "b"}
    assert registry.registry() == tmp_path / "state" / "tpi" / "jobs.jsonl"


TORN = ('{"job": "13', '{"job": "13"}', "[]", "null", '{"job": "13", "directory": 5}', "\xff")


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_line_costs_no_other(tmp_path, torn):
    registry.remember(tmp_path / "a", ["12"])
    with registry.registry().open("a", encoding="latin-1") as stream:
        stream.write(torn)
    registry.remember(tmp_path / "c", ["14"])
    assert dict(registry.registered()) == {"12": tmp_path / "a", "14": tmp_path / "c"}


def test_submissions_at_the_same_time_do_not_mix(tmp_path):
    def submit(first: int) -> None:
        for n in range(first, first + 100, 2):
            registry.remember(tmp_path / str(n), [str(n), str(n + 1)])

    threads = [threading.Thread(target=submit, args=(100 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(registry.registered()) == {str(n): tmp_path / str(n - n % 2) for n in range(800)}


def test_a_registry_that_cannot_be_written_is_reported(tmp_path):
    registry.registry().mkdir(parents=True)
    with pytest.raises(RunError, match=r"cannot write .*jobs\.jsonl: Is a directory"):
        registry.remember(tmp_path, ["12"])


# Finding


@pytest.mark.parametrize("name", ("12", "a", "runs/a", "./runs/a/", "~/a"))
def test_a_job_is_located_by_its_id_its_name_and_its_directory(submitted, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path / "runs"))
    made = submitted("a")
    submitted("b", "14")
    (result,) = registry.find([name])
    assert result.directory == made.directory
    assert [(part.id, part.role, part.run.path, part.current) for part in result.parts] == [
        ("12", "train", made.directory, True)
    ]


def test_a_directory_needs_no_registry(submitted):
    made = submitted("a", known=False)
    assert registry.find(["runs/a"])[0].directory == made.directory
    with pytest.raises(RunError, match="no job a"):
        registry.find(["a"])


def test_a_verify_is_an_array_and_a_judge(submitted):
    made = submitted("v", cells=("tp1", "tp2"))
    for name in ("12", "13", "v"):
        (result,) = registry.find([name])
        assert [(part.id, part.role, part.run.path) for part in result.parts] == [
            ("12_0", "cell", made.directory / "tp1"),
            ("12_1", "cell", made.directory / "tp2"),
            ("13", "judge", made.directory),
        ]
    (result,) = registry.find(["12_1"])
    assert [part.name for part in result.parts] == ["v/tp2"]


UNKNOWN = (
    ("qwen3_toy-tp2-202602", "no job qwen3_toy-tp2-202602; did you mean 'qwen3_toy-tp2-202601'?"),
    ("99", "job 99 was not submitted by tpi from this account"),
    ("13_2", "job 13_2 is none of "),
    ("runs/x", "runs/x was not submitted: there is no submission.json in it"),
    ("two", "two is the name of 2 runs; say which:\n  {runs}/a/two\n  {runs}/b/two"),
)


@pytest.mark.parametrize("name, says", UNKNOWN, ids=[name for name, _ in UNKNOWN])
def test_an_unknown_job_is_named_with_near_ones(submitted, tmp_path, name, says):
    submitted("qwen3_toy-tp2-202601", "12")
    submitted("v", "13", cells=("tp1", "tp2"))
    submitted("a/two", "15")
    submitted("b/two", "16")
    (tmp_path / "runs" / "x").mkdir()
    with pytest.raises(RunError) as refused:
        registry.find(["v", name])
    assert str(refused.value).startswith(says.format(runs=tmp_path / "runs"))
