"""Text becomes an indexed dataset whose documents are the text's bytes and eod, however it was cut."""

import gzip
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.unit.data.indexed_data import SUFFIXES, cheap_garbage_collection, count_parts, files_of  # noqa: F401
from tp_invariant_recipes.cli.data import data_app
from tp_invariant_recipes.data import source
from tp_invariant_recipes.data.prepare import ensure_prepared, find_prepared, prepare
from tp_invariant_recipes.data.prepared import is_prepared, load
from tp_invariant_recipes.errors import DataError

EOD = 256


def read_back(prefix: Path) -> list[list[int]]:
    """Every document as Megatron's own reader gives it."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def ids(*documents: bytes) -> list[list[int]]:
    return [[*document, EOD] for document in documents]


def write_texts(folder: Path, **files: str | bytes) -> Path:
    """Files of a folder; in names `__` stands for `.` and `___` for `/`."""
    for name, content in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_folder_in_sorted_order_and_only_files_that_count(tmp_path):
    folder = write_texts(
        tmp_path / "in",
        b__txt="zwei\r\n",
        a___z__md="# eins é",
        c__py="",
        d__png=b"\x89PNG",
        e__ndjson='{"text": "drei"}\n\n{"text": ""}\n{"text": "vier"}',
        _hidden="no",
    )
    write_texts(folder, **{"__git___x__txt": "hidden"})
    (folder / "f.txt.gz").write_bytes(gzip.compress(b"gepackt"))
    made = prepare(folder, tmp_path / "out" / "my.set")
    want = ids("# eins é".encode(), b"zwei\r\n", b"drei", b"vier", b"gepackt")
    assert read_back(made.prefix) == want
    assert (made.documents, made.tokens) == (5, sum(map(len, want)))
    assert (made.tokenizer, made.vocab_size, made.eod) == ("byte", 257, EOD)
    assert load(made.prefix, verify=True) == made
    assert sorted(p.name for p in made.prefix.parent.iterdir()) == ["my.set.bin", "my.set.idx", "my.set.json"]


texts = st.text(st.characters(codec="utf-8"), max_size=12)
lines = st.lists(st.one_of(st.none(), texts), max_size=4)


@settings(max_examples=12)
@given(lines_a=lines, lines_b=lines, text=texts, part_bytes=st.integers(1, 90), ascii_only=st.booleans())
def test_any_cut_gives_the_same_documents_and_files(lines_a, lines_b, text, part_bytes, ascii_only):
    want = ids(*(t.encode() for t in (*lines_a, text, *lines_b) if t))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "in")
        as_lines = [
            "".join(json.dumps({"text": t}, ensure_ascii=ascii_only) + "\n" if t is not None else " \r\n" for t in x)
            for x in (lines_a, lines_b)
        ]
        write_texts(folder, a__jsonl=as_lines[0], b__txt=text, c__jsonl=as_lines[1])
        if not want:
            with pytest.raises(DataError, match="every document is empty"):
                prepare(folder, Path(name, "cut"), part_bytes=part_bytes)
            assert not list(Path(name).glob("cut*"))
            return
        cut = prepare(folder, Path(name, "cut"), part_bytes=part_bytes)
        assert read_back(cut.prefix) == want
        whole = prepare(folder, Path(name, "whole"))
        assert files_of(cut.prefix) == files_of(whole.prefix)
        assert cut.digest == whole.digest


def test_large_gz_jsonl_is_cut_and_read_in_one_sweep(tmp_path, monkeypatch):
    documents = [f"document {i}" for i in range(200)]
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"t": d}) + "\n" for d in documents).encode()))
    opened = []
    monkeypatch.setattr(source.gzip, "open", lambda p: opened.append(p) or gzip.GzipFile(p))
    made = prepare(path, tmp_path / "out", json_key="t", part_bytes=300)
    assert read_back(made.prefix) == ids(*(d.encode() for d in documents))
    assert len(opened) == 2  # the scan, and one pass over all parts


def test_progress_counts_bytes_of_text(tmp_path):
    folder = write_texts(tmp_path / "in", a__txt="12345", b__txt="123")
    seen = []
    prepare(folder, tmp_path / "out", part_bytes=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 8), (5, 8), (8, 8)]


@pytest.fixture
def hf_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"<unk>": 0, "ein": 1, "haus": 2, "</s>": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "words"
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return folder


def test_hugging_face_folder(tmp_path, hf_folder):
    text = write_texts(tmp_path / "in", a__txt="ein haus", b__txt="haus anders ein")
    made = prepare(text, tmp_path / "out", tokenizer=str(hf_folder))
    assert read_back(made.prefix) == [[1, 2, 3], [2, 0, 1, 3]]
    assert (made.tokenizer, made.vocab_size, made.eod, made.tokens) == ("hf:words", 4, 3, 7)
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()
    with pytest.raises(DataError, match="made from another tokenizer"):
        prepare(text, tmp_path / "out")
    assert read_back(prepare(text, tmp_path / "bytes").prefix)[0][-1] == EOD


def test_only_the_files_that_make_tokens_distinguish_tokenizers(tmp_path, hf_folder):
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        shutil.copytree(hf_folder, folder)
    (same / "model.safetensors").write_bytes(b"weights")
    _edit(other / "tokenizer.json", lambda c: c["model"]["vocab"].update(ein=2, haus=1))
    text = write_texts(tmp_path / "in", a__txt="ein haus")
    made = prepare(text, tmp_path / "out", tokenizer=str(hf_folder))
    assert prepare(text, tmp_path / "out", tokenizer=str(same)) == made
    with pytest.raises(DataError, match="made from another tokenizer"):
        prepare(text, tmp_path / "out", tokenizer=str(other))


@pytest.mark.parametrize(
    "mend, message",
    (
        (lambda folder: [p.unlink() for p in folder.iterdir()], "no tokenizer files"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot load it"),
        (lambda folder: [_edit(folder / "tokenizer_config.json", lambda c: c.pop("eos_token")),
                         (folder / "special_tokens_map.json").unlink(missing_ok=True)], "no eos token"),
        (lambda folder: _edit(folder / "tokenizer.json", lambda c: c["model"]["vocab"].update(haus=70000)),
         "vocabulary"),
    ),
)  # fmt: skip
def test_bad_hugging_face_folder(tmp_path, hf_folder, mend, message):
    text = write_texts(tmp_path / "in", a__txt="ein haus")
    mend(hf_folder)
    with pytest.raises(DataError, match=message):
        prepare(text, tmp_path / "out", tokenizer=str(hf_folder))
    assert not list(tmp_path.glob("out*"))


def _edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


BAD = {
    "missing": ({}, "in: No such file"),
    "nothing that counts": ({"a__png": b"x"}, "no file to read; known suffixes are .txt"),
    "empty": ({"a__txt": "", "b__jsonl": '\n{"text": ""}\n'}, "every document is empty"),
    "not UTF-8": ({"a__txt": b"ab\xffc"}, "a.txt: not UTF-8 at byte 2"),
    "cut-off UTF-8": ({"a__txt": "é".encode()[:1]}, "a.txt: not UTF-8 at byte 0"),
    "not UTF-8 in a line": (
        {"a__jsonl": b'{"text": "a"}\n{"text": "\xff"}'},
        "line 2: not UTF-8 at byte 24 of the file",
    ),
    "not JSON": ({"a__jsonl": '{"text": "a"}\n\n{"text'}, "a.jsonl, line 3: not JSON"),
    "too deep": ({"a__jsonl": "[" * 100000}, "line 1: not JSON"),
    "huge number": ({"a__jsonl": '{"text": ' + "1" * 5000 + "}"}, "line 1: not JSON"),
    "no object": ({"a__jsonl": "[1]"}, "line 1: an array instead of an object"),
    "no key": (
        {"a__jsonl": '{"body": "a"}'},
        "line 1: no key 'text' (--json-key, data.json_key); this line has 'body'",
    ),
    "no string": ({"a__jsonl": '{"text": null}'}, "'text' holds null instead of a string"),
    "half a character": ({"a__jsonl": '{"text": "a\\ud800"}'}, "unpaired surrogate"),
    "no gzip": ({"a__txt__gz": "plain"}, "a.txt.gz: Not a gzipped file"),
    "cut-off gzip": ({"a__txt__gz": gzip.compress(b"abc" * 99)[:-9]}, "a.txt.gz: Compressed file ended"),
    "damaged gzip": ({"a__txt__gz": gzip.compress(b"abc" * 99)[:10] + b"\xff" * 40}, "a.txt.gz: Error -3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_and_leaves_nothing(tmp_path, name):
    files, message = BAD[name]
    with pytest.raises(DataError) as caught:
        prepare(write_texts(tmp_path / "in", **files), tmp_path / "out")
    assert message in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_too_long_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MAX_DOCUMENT_BYTES", 30)
    folder = write_texts(tmp_path / "in", a__txt="x" * 31, b__jsonl=json.dumps({"text": "x" * 60}), c__txt="x" * 30)
    with pytest.raises(DataError) as caught:
        prepare(folder, tmp_path / "out", part_bytes=8)
    assert "a.txt: a document of more than 30" in str(caught.value)
    assert "b.jsonl: a document of more than 30" in str(caught.value)
    assert "c.txt" not in str(caught.value)


def test_all_problems_at_once_and_good_parts_are_kept(tmp_path, monkeypatch):
    folder = write_texts(tmp_path / "in", a__txt="good", b__txt=b"\xff", c__jsonl="{}\n[]\n", d__txt="good too")
    with pytest.raises(DataError) as caught:
        prepare(folder, tmp_path / "out", part_bytes=1)
    listed = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].rpartition("/")[2] for line in listed] == [
        "b.txt",
        "c.jsonl, line 1",
        "c.jsonl, line 2",
    ]
    write_texts(folder, b__txt="mended", c__jsonl='{"text": "c"}')
    written = count_parts(monkeypatch)
    made = prepare(folder, tmp_path / "out", part_bytes=1)
    assert read_back(made.prefix) == ids(b"good", b"mended", b"c", b"good too")
    assert len(written) == 3  # all but a.txt


def test_unreadable_paths_are_listed_in_one_message(tmp_path):
    folder = write_texts(tmp_path / "in", a__txt="good")
    for name in ("b.txt", "c.md"):
        (folder / name).symlink_to(tmp_path / "gone")
    with pytest.raises(DataError) as caught:
        prepare(folder, tmp_path / "out")
    assert "b.txt: No such file" in str(caught.value)
    assert "c.md: No such file" in str(caught.value)


def test_input_that_changes_meanwhile(tmp_path):
    folder = write_texts(tmp_path / "in", a__txt="one", b__txt="two")
    with pytest.raises(DataError, match=r"b.txt changed while"):
        prepare(folder, tmp_path / "out", part_bytes=1, progress=lambda done, total: write_texts(folder, b__txt="2!!"))
    assert not (tmp_path / "out.idx").exists()


def test_finished_data_is_returned_and_other_data_never_overwritten(tmp_path, monkeypatch):
    folder = write_texts(tmp_path / "in", a__jsonl='{"text": "a", "b": "c"}')
    made = prepare(folder, tmp_path / "out")
    before = files_of(made.prefix)
    written = count_parts(monkeypatch)
    assert prepare(folder, tmp_path / "out") == made
    assert not written
    with pytest.raises(DataError, match="made from another --json-key"):
        prepare(folder, tmp_path / "out", json_key="b")
    write_texts(folder, a__jsonl='{"text": "other"}')
    with pytest.raises(DataError, match=r"made from other text.*--output"):
        prepare(folder, tmp_path / "out")
    assert files_of(made.prefix) == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_foreign_files_are_never_overwritten(tmp_path, suffix):
    folder = write_texts(tmp_path / "in", a__txt="a")
    (tmp_path / f"out{suffix}").write_text("mine")
    with pytest.raises(DataError, match="in the way"):
        prepare(folder, tmp_path / "out")
    assert (tmp_path / f"out{suffix}").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_load_finds_damage(tmp_path):
    prefix = prepare(write_texts(tmp_path / "in", a__txt="abc"), tmp_path / "out").prefix
    (tmp_path / "out.bin").write_bytes(b"\0" * 8)
    load(prefix)  # the size is right
    with pytest.raises(DataError, match="changed after it was prepared"):
        load(prefix, verify=True)
    (tmp_path / "out.bin").write_bytes(b"\0" * 6)
    with pytest.raises(DataError, match="6 bytes instead of 8"):
        load(prefix)
    metadata = json.loads((tmp_path / "out.json").read_text())
    for text, message in (
        ("{", "cannot read"),
        ("[]", "schema version None"),
        (json.dumps(metadata | {"schema_version": 99}), "schema version 99"),
        (
            json.dumps(metadata | {"tokens": "many"}),
            r"is not what tpi writes \(tokens: Input should be a valid integer\)",
        ),
    ):
        (tmp_path / "out.json").write_text(text)
        with pytest.raises(DataError, match=message):
            load(prefix)
    assert is_prepared(prefix)
    (tmp_path / "out.json").unlink()
    with pytest.raises(DataError, match=r"out.json missing"):
        load(prefix)
    assert not is_prepared(prefix)


@pytest.mark.parametrize("name", ("out", "out.idx", "out.bin"))
def test_ensure_prepared_takes_a_prefix(tmp_path, name):
    made = prepare(write_texts(tmp_path / "in", a__txt="abc"), tmp_path / "out")
    assert ensure_prepared(tmp_path / name, tmp_path / "cache") == made
    assert is_prepared(tmp_path / name)
    assert not (tmp_path / "cache").exists()


def test_ensure_prepared_caches_text_by_content_tokenizer_and_key(tmp_path, hf_folder):
    folder = write_texts(tmp_path / "in", a__txt="ein haus")
    cache = tmp_path / "cache"
    first = ensure_prepared(folder, cache)
    assert first.prefix.parent == cache
    assert first.prefix.name.startswith("in-")
    assert ensure_prepared(folder, cache) == first
    words = ensure_prepared(folder, cache, tokenizer=str(hf_folder))
    write_texts(folder, a__txt="other")
    other = ensure_prepared(folder, cache)
    lines = write_texts(tmp_path / "lines", a__jsonl='{"text": "one", "body": "two"}\n')
    by_key = [ensure_prepared(lines, cache, json_key=key) for key in ("text", "body")]
    assert [read_back(made.prefix) for made in by_key] == [ids(b"one"), ids(b"two")]
    assert len({made.prefix for made in (first, words, other, *by_key)}) == 5


def test_foreseeing_writes_nothing_and_finds_what_is_there(tmp_path):
    folder, cache = write_texts(tmp_path / "text", a__txt="one"), tmp_path / "cache"
    before = sorted(tmp_path.rglob("*"))
    assert find_prepared(folder, cache) == EOD + 1
    with pytest.raises(DataError, match="no file or folder of text"):
        find_prepared(tmp_path / "nowhere", cache)
    assert sorted(tmp_path.rglob("*")) == before
    made = ensure_prepared(folder, cache)
    assert find_prepared(folder, cache) == find_prepared(made.prefix, cache) == made


def test_ensure_prepared_with_dataset_beside_its_folder(tmp_path):
    folder = write_texts(tmp_path / "in", a__txt="abc")
    made = prepare(folder, folder)
    assert ensure_prepared(folder, tmp_path / "cache") == made
    write_texts(folder, a__txt="newer text")
    with pytest.raises(DataError, match=r"made from other text.*in.idx to use it"):
        ensure_prepared(folder, tmp_path / "cache")
    assert ensure_prepared(tmp_path / "in.idx", tmp_path / "cache") == made


def test_tokenizer_must_be_byte_or_a_folder(tmp_path):
    with pytest.raises(DataError, match="tpi downloads nothing"):
        prepare(write_texts(tmp_path / "in", a__txt="abc"), tmp_path / "out", tokenizer="Qwen/Qwen3-8B")


def test_output_needs_a_name(tmp_path):
    with pytest.raises(DataError, match="needs a name"):
        prepare(write_texts(tmp_path / "in", a__txt="abc"), Path("."))


def test_command_prints_and_lets_errors_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path, corpus__jsonl='{"body": "abc"}')
    run = CliRunner().invoke
    shown = run(data_app, ["prepare", "corpus.jsonl", "--json-key", "body", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == {
        "prefix": "data/corpus", "tokenizer": "byte", "vocab_size": 257, "eod": 256,
        "documents": 1, "tokens": 4, "digest": load(Path("data/corpus")).digest,
    }  # fmt: skip
    repeated = run(data_app, ["prepare", "corpus.jsonl", "--json-key", "body"])
    assert "data/corpus: 1 document, 4 tokens" in repeated.stdout
    assert isinstance(run(data_app, ["prepare", "corpus.jsonl", "--output", "x"]).exception, DataError)


def test_index_type_is_megatrons_choice(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    made = prepare(write_texts(tmp_path / "in", a__txt="abc"), tmp_path / "out")
    assert IndexedDataset(str(made.prefix))[0].dtype == np.uint16
