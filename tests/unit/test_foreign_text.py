# SPDX-License-Identifier: Apache-2.0
"""Text of strangers controls neither a terminal nor a page: no ESC leaves a command, wherever it came in."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.comparison.ledgers import HEADER, PARAMETERS, record, trace
from tests.unit.jobs.conftest import _state, slurm, submitted  # noqa: F401 -- fixtures
from tests.unit.jobs.fake_slurm import now, row
from tp_invariant_recipes.launch import plan, ranks
from tp_invariant_recipes.ledger.record import LedgerWriter
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.text import LONGEST, shortened, single_line, visible

DIGEST = "0" * 32
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x7f"
CONTROLS = ("\x1b", "\x07", "\x9b", "\x7f", "\u202e")


@given(st.text(st.characters(codec=None)))
def test_no_control_character_remains_and_other_text_is(text):
    shown = visible(text)
    shown.encode()  # no lone surrogate
    assert not any(control in shown for control in CONTROLS)
    if text.isprintable():
        assert shown == text
    assert "\n" not in single_line(text)


def test_a_control_character_shows_as_its_escape():
    assert visible("a\tb\n\x1b[1m\x7f\x9b\u202e\udc80") == "a\tb\n\\x1b[1m\\x7f\\x9b\\u202e\\udc80"
    assert single_line("a\nb") == "a\\nb"


def clean(ended) -> None:
    """Nothing that a command printed controls a terminal, and it did print what was planted."""
    for text in (ended.out, ended.err):
        assert not any(control in text for control in CONTROLS), repr(text)
    assert "\\x1b" in ended.out + ended.err or "\\u001b" in ended.out + ended.err


def write_run_of(folder, name: str, header, **changes) -> None:
    (folder / name).mkdir()
    with LedgerWriter(folder / name / "ledger.jsonl").create(header) as writer:
        for step in (1, 2, 3):
            whole = record(step, traced=True)
            digests = {
                kind: {name: getattr(whole, kind).get(name, DIGEST) for name in header.digested(kind)}
                for kind in ("gradients", "weights")
            }
            writer.append(replace(whole, **(digests | (changes if step == 2 else {}))))


@pytest.fixture
def runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    write_run_of(tmp_path, "a", HEADER)
    return tmp_path


def with_evil_module(digest: str) -> dict:
    return {"trace": tuple(replace(item, module=item.module + EVIL, digest=digest) for item in trace(2))}


# What no ledger may hold: reading it is an error, which shows nothing of it either. Header, and changes at step 2.
REFUSED = {
    "a value of the layout": (replace(HEADER, layout={"tp": EVIL}), {}),
    "a parameter": (
        replace(HEADER, parameters=(*PARAMETERS, replace(PARAMETERS[0], name=EVIL))),
        {"weights": record(2).weights | {EVIL: DIGEST}},
    ),
    "a trace": (HEADER, with_evil_module(DIGEST)),
    "diverged": (HEADER, {"diverged": (("weights", PARAMETERS[0].name + EVIL, ((0,), (1,))),)}),
}


def test_names_with_control_characters_are_refused(cli, runs_folder):
    for n, (header, changes) in enumerate(REFUSED.values()):
        write_run_of(runs_folder, f"b{n}", header, **changes)
        commands = [("compare", "a", f"b{n}"), ("compare", "a", f"b{n}", "--json"), ("report", "a", f"b{n}")]
        for command in commands[: 1 if n else 3]:
            ended = cli(*command)
            assert ended.status == 2
            assert "ledger.jsonl line" in ended.out + ended.err
            assert not any(control in ended.out + ended.err for control in CONTROLS)


# A label, and keys and values of what a ledger notes.
LABEL = f"b{EVIL}"
PLANTED = (
    {"identity": {"rng.seed": 1234, f"x{EVIL}": 1}},
    {"identity": {"rng.seed": EVIL}},
    {"layout": {f"tp{EVIL}": 1}, "versions": {"torch": EVIL}, "notes": {EVIL: EVIL}},
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: ",".join(planted))
def test_compare_shows_no_control_character_of_a_ledger(cli, runs_folder, planted):
    write_run_of(runs_folder, LABEL, replace(HEADER, **planted), loss="f32:3f800000")
    clean(cli("compare", "a", LABEL, "a"))
    as_json = cli("compare", "a", LABEL, "--json")
    clean(as_json)
    json.loads(as_json.out)


def test_a_page_shows_what_was_planted_as_text_and_no_control_character(cli, runs_folder):
    """One page: drawing one takes a second."""
    everything = PLANTED[0] | PLANTED[2]
    write_run_of(runs_folder, LABEL, replace(HEADER, **everything))
    reported = cli("report", "a", LABEL, "--out", "page.html")
    assert reported.status == 0, reported.err
    page = (runs_folder / "page.html").read_text()
    for text in (reported.out, reported.err, page):
        assert not any(control in text for control in CONTROLS)
    assert "tp\\x1b]0;owned" in page


def test_a_ledger_cannot_write_a_verdict(cli, runs_folder):
    """A line break in a name does not begin a line."""
    write_run_of(runs_folder, "b", replace(HEADER, identity={"rng.seed": 1, "x\nidentical: 3 steps": 1}))
    ended = cli("compare", "a", "b")
    assert ended.status == 2
    assert not any(line.startswith("identical") for line in ended.out.splitlines())


def test_a_dead_ranks_log_and_reason_control_nothing(cli, tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.rank_log(1).write_text(f"last words {EVIL}\n")
    for dead in ({1: -9}, {0: 1}):
        run.failure(0).parent.mkdir(exist_ok=True)
        facts = {"rank": 0, "time": 1.0, "kind": "ValueError", "message": EVIL, "user_error": False, "errno": None}
        run.failure(0).write_text(json.dumps(facts))
        failure = ranks._failure(run, dead)
        assert "\x1b" in str(failure)

        def fail(*_args, error=failure, **_kwargs):
            raise error

        monkeypatch.setattr(plan, "new", fail)
        ended = cli("train", "qwen3_toy")
        assert ended.status == 2
        clean(ended)


def test_a_traceback_controls_nothing(cli, monkeypatch):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError(EVIL)

    monkeypatch.setattr(plan, "new", fail)
    clean(cli("train", "qwen3_toy"))


def test_jobs_and_logs_control_nothing(cli, slurm, submitted):  # noqa: F811
    made = submitted()
    slurm.scene(row("12", "PENDING", EVIL))
    now(made.attempt(outcome="failed", why=EVIL))
    now(made.put(made.directory / "logs" / "job-12.log", f"10 %\r20 %\n{EVIL}\n"))
    now(f"printf '\\377\\n' >>{made.directory}/logs/job-12.log")
    shown = cli("logs", "12")
    clean(shown)
    assert shown.out.startswith("10 %\n20 %\n\\x1b]0;owned\\x07")
    assert shown.out.endswith("\\xff\n")
    clean(cli("jobs"))
    slurm.scene()
    clean(cli("jobs", "12"))
    clean(cli("wait", "12"))


def test_a_shortened_message_keeps_what_comes_on_later_lines():
    assert shortened(" must match.\n  model: 128,\tdataset: 64\n") == "must match. model: 128, dataset: 64"
    assert shortened("x" * LONGEST) == "x" * LONGEST
    assert shortened("x" * (LONGEST + 1)) == "x" * LONGEST + " …"
