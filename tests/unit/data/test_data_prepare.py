# SPDX-License-Identifier: Apache-2.0
"""Text becomes an indexed dataset whose documents are the text's bytes and eod, whole or not at all."""

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tp_invariant_recipes.cli.train import data_app
from tp_invariant_recipes.data import text
from tp_invariant_recipes.data.text import find_prepared, prepare, read_index, select
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


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_folder_of_text_in_sorted_order(tmp_path):
    folder = write_texts(
        tmp_path / "in", b__txt="zwei\r\n", a___z__md="# eins é", c__py="", d__png=b"\x89PNG", __hidden="no"
    )
    write_texts(folder, __git___x__txt="hidden", f__txt__gz=gzip.compress(b"gepackt"), package__json="{}")
    made = prepare(folder, tmp_path / "out" / "my.set")
    want = ids("# eins é".encode(), b"zwei\r\n", b"gepackt")
    assert read_back(tmp_path / "out" / "my.set") == want
    assert (made.documents, made.tokens, made.largest) == (3, sum(map(len, want)), EOD)
    assert {*files_of(tmp_path / "out")} == {"my.set.bin", "my.set.idx"}
    assert select(folder).left == ("d.png", "package.json")


def test_the_bytes_are_those_of_megatrons_builder(tmp_path):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prepare(write_texts(tmp_path / "in", a__txt="abc", b__txt="de"), tmp_path / "ours")
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(257))
    for document in ids(b"abc", b"de"):
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    made = files_of(tmp_path)
    assert (made["ours.bin"], made["ours.idx"]) == (made["theirs.bin"], made["theirs.idx"])


def test_of_a_folder_with_jsonl_nothing_else_is_read_and_the_rest_is_listed(tmp_path):
    folder = write_texts(
        tmp_path / "in", README__md="no", a__ndjson='{"text": "drei"}\n\n{"text": ""}\n{"text": "vier"}'
    )
    write_texts(folder, b__jsonl__gz=gzip.compress(b'{"text": "\xc3\xa9"}'))
    prepare(folder, tmp_path / "out")
    assert read_back(tmp_path / "out") == ids(b"drei", b"vier", "é".encode())
    assert str(select(folder)) == f"{folder}: 2 files, 0.0 MiB; left out: README.md"


@pytest.mark.parametrize("name", ("b.json", "b.json.gz", "b.jsonl.zst", "b.parquet", "b.jsonl.xz", "deep/b.jsonl.bz2"))
def test_a_part_of_a_corpus_that_tpi_cannot_read_is_refused(tmp_path, name):
    folder = write_texts(tmp_path / "in", a__jsonl='{"text": "a"}')
    write_texts(folder, **{name.replace("/", "___").replace(".", "__"): "{}"})
    with pytest.raises(DataError, match=f"cannot read {name}: make them JSONL"):
        find_prepared(folder, tmp_path / "cache", make=False)


@pytest.fixture
def hf_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"<unk>": 0, "ein": 1, "haus": 2, "</s>": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "words"
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ("LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "T5Tokenizer"))
def test_a_tokenizer_that_lost_its_vocabulary_is_refused(tmp_path, kind):
    """transformers loads it, and makes no token of any text."""
    (tmp_path / "lost").mkdir()
    tokens = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    (tmp_path / "lost" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} | tokens))
    with pytest.raises(DataError, match=r"lost: it makes no token of any text.*tokenizer.model|lost: cannot load it"):
        prepare(write_texts(tmp_path / "in", a__txt="abc"), tmp_path / "out", str(tmp_path / "lost"))
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    "model, message",
    (("BPE", "letters makes no token of the text in"), ("WordLevel", "cannot make tokens of the text: .*UNK")),
)
def test_text_without_a_token_is_refused(tmp_path, model, message):
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"a": 0, "b": 1, "</s>": 2}
    made = tokenizers.models.BPE(words, []) if model == "BPE" else tokenizers.models.WordLevel(words)
    raw = tokenizers.Tokenizer(made)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(tmp_path / "letters")
    with pytest.raises(DataError, match=message):
        prepare(write_texts(tmp_path / "in", a__txt="xyz"), tmp_path / "out", str(tmp_path / "letters"))


def _edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_only_the_files_that_make_tokens_distinguish_tokenizers(tmp_path, hf_folder):
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        shutil.copytree(hf_folder, folder)
    (same / "model.safetensors").write_bytes(b"weights")
    _edit(other / "tokenizer.json", lambda c: c["model"]["vocab"].update(ein=2, haus=1))
    folder, cache = write_texts(tmp_path / "in", a__txt="ein haus", b__txt="haus anders ein"), tmp_path / "cache"
    made = [find_prepared(folder, cache, str(path), make=True) for path in (hf_folder, same, other)]
    assert made[0] == made[1]
    assert read_back(made[0].prefix) == [[1, 2, 3], [2, 0, 1, 3]]
    assert read_back(made[2].prefix) == [[2, 1, 3], [1, 0, 2, 3]]
    assert (made[0].vocab_size, made[0].eod) == (4, 3)


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
    folder = write_texts(tmp_path / "in", a__txt="ein haus")
    mend(hf_folder)
    with pytest.raises(DataError, match=message):
        prepare(folder, tmp_path / "out", tokenizer=str(hf_folder))
    assert not list(tmp_path.glob("*out*"))


BAD = {
    "missing": ({}, "No such file"),
    "nothing that counts": ({"a__png": b"x"}, "no file to read; known suffixes are .jsonl"),
    "empty": ({"a__txt": "", "b__txt": ""}, "2 files, every document is empty"),
    "not UTF-8": ({"a__txt": b"ab\xffc"}, "a.txt: not UTF-8, from byte 3 on"),
    "not UTF-8 in a line": ({"a__jsonl": b'{"text": "a"}\n{"text": "\xff"}'}, "line 2: not UTF-8, from byte 11 on"),
    "not JSON": ({"a__jsonl": '{"text": "a"}\n\n{"text'}, "a.jsonl, line 3: not JSON"),
    "too deep": ({"a__jsonl": "[" * 100000}, "line 1: nested too deeply"),
    "huge number": ({"a__jsonl": '{"text": ' + "1" * 5000 + "}"}, "line 1: "),
    "no key": ({"a__jsonl": '{"body": "a"}'}, "line 1: no key 'text' (--json-key, data.json_key); its keys: 'body'"),
    "no string": ({"a__jsonl": '{"text": null}'}, "'text' holds no text"),
    "half a character": ({"a__jsonl": '{"text": "a\\ud800"}'}, "lone surrogate"),
    "byte order mark": ({"a__jsonl": b'\xef\xbb\xbf{"text": "a"}'}, "line 1: it begins with a byte order mark"),
    "no gzip": ({"a__txt__gz": "plain"}, "a.txt.gz: Not a gzipped file"),
    "cut-off gzip": ({"a__txt__gz": gzip.compress(b"abc" * 99)[:-9]}, "a.txt.gz: Compressed file ended"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_and_leaves_nothing(tmp_path, name):
    files, message = BAD[name]
    with pytest.raises(DataError) as caught:
        prepare(write_texts(tmp_path / "in", **files), tmp_path / "out")
    assert message in str(caught.value)
    assert not list(tmp_path.glob("*out*"))


def test_all_problems_at_once_with_file_and_line(tmp_path):
    folder = write_texts(tmp_path / "in", a__jsonl='{"text": "good"}\n{}\n[]\n', b__jsonl="x")
    (folder / "c.jsonl").mkdir()
    with pytest.raises(DataError) as caught:
        prepare(folder, tmp_path / "out")
    listed = [line.split(":")[0].rpartition("/")[2] for line in str(caught.value).splitlines()[1:]]
    assert listed == ["a.jsonl, line 2", "a.jsonl, line 3", "b.jsonl, line 1"]
    for name in ("d.jsonl", "e.jsonl"):
        (folder / name).symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"d.jsonl: No such file(?s:.*)e.jsonl: No such file"):
        prepare(folder, tmp_path / "out")


def test_too_long_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LARGEST_DOCUMENT", 30)
    with pytest.raises(DataError, match=r"a.txt: a document of more than 30"):
        prepare(write_texts(tmp_path / "in", a__txt="x" * 31, c__txt="x" * 30), tmp_path / "out")


def test_input_that_changes_meanwhile(tmp_path):
    folder = write_texts(tmp_path / "in", a__txt="one", b__txt="two")
    change = lambda done, total: done and write_texts(folder, b__txt="2!!")  # noqa: E731
    with pytest.raises(DataError, match=r"it changed meanwhile"):
        prepare(folder, tmp_path / "out", progress=change)
    assert not list(tmp_path.glob("*out*"))


def test_the_same_data_is_written_again_and_other_data_is_never_overwritten(tmp_path):
    folder = write_texts(tmp_path / "in", a__txt="a")
    made, before = prepare(folder, tmp_path / "out"), files_of(tmp_path)
    assert prepare(folder, tmp_path / "out") == made
    (tmp_path / "out.idx").unlink()  # a kill between the two renames
    assert prepare(folder, tmp_path / "out") == made
    write_texts(folder, a__txt="other")
    with pytest.raises(DataError, match=r"out.bin, .*out.idx: other data is in the way.*--output"):
        prepare(folder, tmp_path / "out")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("step", (1, 2))
def test_an_error_of_the_disk_leaves_no_dataset(tmp_path, monkeypatch, step):
    real, calls = os.replace, iter(range(10))

    def replace(*names):
        if next(calls) == step:
            raise OSError(28, "No space left on device")
        real(*names)

    folder = write_texts(tmp_path / "in", a__txt="a")
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(DataError, match=r"cannot write .*out: No space left"):
        prepare(folder, tmp_path / "out")
    assert not (tmp_path / "out.idx").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_dataset_of_megatron_needs_nothing_but_its_two_files(tmp_path, hf_folder):
    prepare(write_texts(tmp_path / "in", a__txt="abc"), tmp_path / "out")
    found = [find_prepared(tmp_path / name, tmp_path / "cache", make=False) for name in ("out", "out.bin", "out.idx")]
    assert found[0] == found[1] == found[2]
    assert (found[0].documents, found[0].tokens, found[0].source) == (1, 4, "")
    with pytest.raises(DataError, match=r"out.bin holds token 256, and data.tokenizer=.*words has 4 ids"):
        find_prepared(tmp_path / "out", tmp_path / "cache", str(hf_folder), make=False)
    (tmp_path / "out.bin").write_bytes(np.array([1, 2, 3, 4], "u2"))
    assert find_prepared(tmp_path / "out", tmp_path / "cache", make=False).digest != found[0].digest


DAMAGE = {
    "a shorter .bin": (lambda b, i: (b[:-2], i), "tells of 4 tokens, and the .bin has 6 bytes"),
    "no index": (lambda b, i: (b, b"x" * 50), "no index of token ids"),
    "a cut index": (lambda b, i: (b, i[:30]), "no index of token ids"),
    "numbers of floats": (lambda b, i: (b, i[:17] + b"\x06" + i[18:]), "no index of token ids"),
    "2**60 sequences": (lambda b, i: (b, i[:18] + (2**60).to_bytes(8, "little") + i[26:]), "no index of token ids"),
    "nothing": (lambda b, i: (b"", i[:18] + bytes(16)), "0 tokens, and the .bin has 0 bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_datasets(tmp_path, name):
    damage, message = DAMAGE[name]
    prepare(write_texts(tmp_path / "in", a__txt="abc"), tmp_path / "out")
    binary, index = damage((tmp_path / "out.bin").read_bytes(), (tmp_path / "out.idx").read_bytes())
    (tmp_path / "out.bin").write_bytes(binary)
    (tmp_path / "out.idx").write_bytes(index)
    with pytest.raises(DataError, match=message):
        read_index(tmp_path / "out")


def test_text_is_kept_by_content_tokenizer_and_key_and_foreseeing_writes_nothing(tmp_path):
    cache = tmp_path / "cache"
    lines = write_texts(tmp_path / "lines", a__jsonl='{"text": "one", "body": "two"}\n')
    planned = find_prepared(lines, cache, make=False)
    assert (planned.documents, planned.digest, planned.vocab_size, cache.exists()) == (0, None, EOD + 1, False)
    made = [find_prepared(lines, cache, "byte", key, make=True) for key in ("text", "body")]
    assert [read_back(data.prefix) for data in made] == [ids(b"one"), ids(b"two")]
    assert find_prepared(lines, cache, make=False) == made[0]
    with pytest.raises(DataError, match="no file or folder of text and no dataset"):
        find_prepared(tmp_path / "nowhere", cache, make=False)
    (tmp_path / "half.idx").touch()
    with pytest.raises(DataError, match=r"half.bin is missing"):
        find_prepared(tmp_path / "half", cache, make=False)


def test_tokenizer_must_be_byte_or_a_folder_and_an_output_needs_a_name(tmp_path):
    folder = write_texts(tmp_path / "in", a__txt="abc")
    with pytest.raises(DataError, match="tpi downloads nothing"):
        prepare(folder, tmp_path / "out", tokenizer="Qwen/Qwen3-8B")
    with pytest.raises(DataError, match="needs a name"):
        prepare(folder, Path("."))


def test_command_says_what_it_reads_before_it_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "in", corpus__jsonl='{"body": "abc"}', notes__md="")
    shown = CliRunner().invoke(data_app, ["prepare", "in", "--json-key", "body", "--json"])
    assert shown.exit_code == 0, shown.output
    assert shown.stderr.splitlines()[0] == "reading in: 1 file, 0.0 MiB; left out: notes.md"
    want = {"prefix": "data/in", "tokenizer": "byte", "left_out": ["notes.md"]}
    assert json.loads(shown.stdout) == want | read_index(Path("data/in")).as_json()
    repeated = CliRunner().invoke(data_app, ["prepare", "in", "--json-key", "body"])
    assert "data/in: 1 document, 4 tokens" in repeated.stdout
    assert "tpi train MODEL data=text data.path=data/in" in repeated.stdout
    assert isinstance(CliRunner().invoke(data_app, ["prepare", "in"]).exception, DataError)
