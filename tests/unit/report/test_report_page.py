# SPDX-License-Identifier: Apache-2.0
"""`tpi report`: one file that asks nothing of the network, escapes what it shows, and is the same bytes each time."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import ledgers
from tp_invariant_recipes.ledger.digests import Parameter
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.ledger.run_files import Restart, RunFile
from tp_invariant_recipes.report import page
from tp_invariant_recipes.report.figures import COLOURS
from tp_invariant_recipes.report.runs import gather

NAMES = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.$x$<b>.weight")
HOSTILE = "</td></svg><script>alert(1)</script>&amp;\"'"


def write_run(
    folder: Path, steps: int = 6, differs_from: int | None = None, names=NAMES, every: int = 1, **header
) -> Path:
    """A run directory. differs_from: the step from which loss, last gradient and weights are others."""
    folder.mkdir(parents=True)
    parameters = tuple(Parameter(name, (2, 4), "float32", "bfloat16") for name in names)
    start = {"identity": {"rng.seed": 1234}, "layout": {"tp": 1}, "parameters": parameters}
    records = []
    for step in range(1, steps + 1):
        other = differs_from is not None and step >= differs_from
        digests = dict.fromkeys(names, f"{step:032x}") if step % every == 0 else None
        changed = digests | {names[-1]: "f" * 32} if digests and other else digests
        loss = f"f32:40{'c9' if other else 'c8'}{step:04x}"
        records.append(ledgers.record(step, loss=loss, gradients=changed, weights=changed))
    ledgers.write(folder, Header(**start | header), records)
    whole = {"loss": 6.0, "seconds": 0.5, "tokens": 64}
    lines = [whole | {"step": n, "peak_memory": n << 30} for n in range(1, steps + 1)]
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run_file(run: Path, *attempts: Restart) -> None:
    file = RunFile(
        model="qwen3_8b", overrides=("lr=1", "data.path=/text"), device="gpu", layout={}, identity={},
        identity_hash="0" * 64, attempts=attempts,
    )  # fmt: skip
    (run / "run.json").write_text(json.dumps(file.as_json()))


def html_of(*runs: Path) -> str:
    report = gather(runs)
    return page.page(report, page.sections(report))


def text_of(*runs: Path) -> "Reader":
    """Their page without its figures: drawing them takes a second."""
    report = gather(runs)
    return Reader(page.page(report, tuple(replace(part, drawings=()) for part in page.sections(report))))


class Reader(HTMLParser):
    """All tags, with their attributes, and the text between."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] or "" for _, attributes in self.tags if attribute in attributes]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Two runs that differ, for tests that change neither."""
    folder = tmp_path_factory.mktemp("different")
    return write_run(folder / "tp1"), write_run(folder / "tp2", differs_from=4, layout={"tp": 2})


@pytest.fixture(scope="module")
def html(pair) -> str:
    """Their page, drawn once for the tests that read it."""
    return html_of(*pair)


# --- what is on the page ------------------------------------------------------------------------------------


def test_a_different_pair(html):
    read = Reader(html)
    assert "tp1 compared with tp2" in read.text
    assert "B tp2 : different at step 4: loss" in read.text
    assert "the loss differs at 3 of 6 steps, by at most 65,536 ULP" in read.text
    assert "weight differs from step at steps decoder.layers.1.$x$<b>.weight 4 4 3" in read.text
    assert re.search(r"layout\.tp</th>\s*<td>1</td><td><mark>2</mark></td>", html)
    assert "A tp1: the median step took 0.5 s." in read.text
    assert "6.00 GiB" in read.text


def test_the_first_table_says_what_was_trained_where_and_how_it_ended(tmp_path):
    run = write_run(tmp_path / "tp1", device={"name": "NVIDIA H200"}, numerics={"mode": "tree"}, layout={"tp": 2})
    attempt = {
        "host": "node7", "time": "2026-01-02T03:04:05+0000", "to_step": 6, "outcome": "failed", "why": "a reason",
    }  # fmt: skip
    run_file(run, Restart(**attempt), Restart(**attempt | {"host": "node8"}))
    (read,) = gather([run]).runs
    facts = {
        "model": "qwen3_8b", "data": "data.path=/text", "numerics": "tree", "layout": "tp=2",
        "machine": "NVIDIA H200, node7, node8", "begun": "2026-01-02 03:04:05+0000", "starts": "2",
        "time of all steps": "3 s", "end": "failed: a reason", "steps": "6", "peak memory": "6.00 GiB",
    }  # fmt: skip
    assert facts.items() <= read.facts.items()
    html = page.page(gather([run]), ())
    assert html.index("node8") < html.index("<details>") < html.index("rng.seed")  # fields are folded, and come later
    (run / "run.json").write_text("{}")
    assert "model" not in gather([run]).runs[0].facts


def reports(folder: Path) -> Iterator[tuple[str, tuple[Path, ...]]]:
    """Pages, and the runs on each."""
    first = write_run(folder / "tp1")
    yield "an identical pair", (first, write_run(folder / "same"))
    yield "runs that are not comparable", (first, write_run(folder / "seed", identity={"rng.seed": 7}))
    yield "one run alone", (first,)
    begun = write_run(folder / "begun", steps=0)
    yield "a run that has only begun", (begun,)
    yield "a run that has only begun, and another", (first, begun)
    differing = write_run(folder / "tp2", differs_from=4, layout={"tp": 2})
    yield "three runs", (first, differing, write_run(folder / "tp4", steps=5))
    yield "a run without digests at a common step", (write_run(folder / "seldom", every=7), first)
    torn = write_run(folder / "torn")
    run_file(torn, Restart(to_step=9), Restart(to_step=20))
    with (torn / "ledger.jsonl").open("a") as stream:
        stream.write('{"step": 7, "sam')
    yield "an unfinished torn run", (torn,)


def test_a_page_says_what_is_expected(tmp_path, data_regression):
    """As pages.yml has it; `--regen-all` writes it anew. Drawing the figures would take a second each."""
    pages = {}
    for title, runs in reports(tmp_path):
        report = gather(runs)
        content = {"title": page.headline(report), "boxes": page._boxes(report)}
        content["remarks"] = {run.label: run.remarks for run in report.runs if run.remarks}
        content["sections"] = {
            part.name: [*part.sentences, *(drawing.alt for drawing in part.drawings), *(t.rows for t in part.tables)]
            for part in page.sections(report)
        }
        pages[title] = json.loads(json.dumps(content).replace(f"{tmp_path}/", ""))
    data_regression.check(pages, fullpath=Path(__file__).parent / "pages.yml")


# --- runs ---------------------------------------------------------------------------------------------------


def test_of_a_step_that_ran_twice_the_last_time_counts(tmp_path):
    run = write_run(tmp_path / "tp1", steps=2)
    with (run / "progress.jsonl").open("a") as stream:
        stream.write('{"step": 2, "sec{"step": 3, "seconds": 8}\n')  # killed in the middle of a line, then resumed
        stream.write('{"step": 2, "loss": 6.0, "seconds": 9.0, "tokens": 64, "peak_memory": 0}\n')
    (read,) = gather([run]).runs
    assert [(timing.step, timing.seconds) for timing in read.timings] == [(1, 0.5), (2, 9.0)]
    assert "incomplete lines of progress.jsonl, left out: 1" in read.remarks


def test_a_ledger_file_of_another_name_has_no_times_of_its_neighbour(tmp_path):
    run = write_run(tmp_path / "tp1")
    (run / "ledger.replaced-1.jsonl").write_bytes((run / "ledger.jsonl").read_bytes())
    (read,) = gather([run / "ledger.replaced-1.jsonl"]).runs
    assert (read.name, read.timings) == ("ledger.replaced-1.jsonl", ())


# --- one file -----------------------------------------------------------------------------------------------


def test_the_page_asks_nothing_of_the_network(html):
    read = Reader(html)
    assert not re.search(r"https?:|//[a-z]|@import|<!ENTITY", html)
    assert not {tag for tag, _ in read.tags} & {"script", "link", "iframe", "object", "embed", "base", "img"}
    assert all(target.startswith("#") for target in read.values("href") + read.values("src"))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", html))


def test_every_reference_on_the_page_has_its_one_target(html):
    read = Reader(html)
    ids = read.values("id")
    assert len(ids) == len(set(ids))
    assert all("href" in attributes for tag, attributes in read.tags if tag == "use")
    targets = [*read.values("href"), *re.findall(r"url\(([^)]*)", html)]
    assert {target[1:] for target in targets} | set(read.values("aria-labelledby")) <= set(ids)


def test_every_figure_is_whole_has_a_text_beside_it_and_the_colours_of_the_page(html):
    figures = re.findall(r"<svg viewBox.*?</svg>", html, re.DOTALL)
    assert len(figures) == 3
    for figure in figures:
        root = ElementTree.fromstring(figure)
        assert root.get("role") == "img"
        words = re.search(rf'id="{root.get("aria-labelledby")}">([^<]*)<', html)[1]
        assert len(words) > 20
        assert not re.search(r"#[0-9a-f]{6}\b", figure), "a colour of its own does not follow a dark page"
        assert set(re.findall(r"var\(--([^)]*)\)", figure)) <= set(COLOURS)


def test_what_comes_from_ledgers_is_escaped(tmp_path):
    runs = [
        write_run(tmp_path / name, notes={"note": HOSTILE}, names=("decoder.layers.0.x", HOSTILE), differs_from=differs)
        for name, differs in (("<i>a", None), ("<script>b", 3))
    ]
    report = gather(runs)
    drawn = [part for part in page.sections(report) if part.name in ("training", "parameters")]
    html = page.page(report, tuple(drawn))
    read = Reader(html)
    assert not {"script", "i", "b"} & {tag for tag, _ in read.tags}
    assert HOSTILE in read.text.replace("\\", "")
    assert html.count("</svg>") == html.count("<svg")
    for figure in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(figure)


# Steps, parameters, digests every so many steps, and the limit of the page.
MUCH = (
    pytest.param(501, 65, 2, 600, id="more parameters than places"),
    pytest.param(10_000, 300, 50, 600, id="steps"),
    pytest.param(12, 12_000, 1, 400, id="parameters"),
)


@pytest.mark.release
@pytest.mark.parametrize("steps, parameters, every, kib", MUCH)
def test_a_page_of_much_stays_small(tmp_path, steps, parameters, every, kib):
    names = [f"decoder.layers.{n % 48}.mlp.experts.linear_fc1.weight{n // 48}" for n in range(parameters)]
    runs = [
        write_run(tmp_path / "a", steps, None, names, every),
        write_run(tmp_path / "b", steps, steps // 2, names, every),
    ]
    assert len(html_of(*runs)) < kib * 1024


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_writes_a_page(cli, pair, html, monkeypatch, tmp_path):
    folder = tmp_path / "reports"  # beside the cache of bytecode
    folder.mkdir()
    monkeypatch.chdir(folder)
    done = cli("report", *pair)
    assert done.status == 0, done.err
    assert "B tp2: different at step 4" in done.out
    assert "wrote report.html" in done.out
    assert (folder / "report.html").read_text() == html
    assert [file.name for file in folder.iterdir()] == ["report.html"]


def test_nothing_is_written_over_unless_told(cli, tmp_path):
    run = write_run(tmp_path / "tp1", steps=1)
    out = tmp_path / "x.html"
    out.write_text("mine")
    refused = cli("report", run, "--out", out)
    assert refused.status == 2
    assert f"{out} exists already: give another file by --out, or overwrite it by --force" in refused.err
    assert out.read_text() == "mine"
    assert cli("report", run, "--out", out, "--force").status == 0
    assert out.read_text().startswith("<!DOCTYPE html>")


def test_a_page_that_cannot_be_written_leaves_nothing(cli, tmp_path):
    (tmp_path / "file").touch()
    done = cli("report", write_run(tmp_path / "tp1", steps=1), "--out", tmp_path / "file" / "x.html")
    assert done.status == 2
    assert "cannot write" in done.err
    assert {file.name for file in tmp_path.iterdir()} == {"tp1", "file"}
