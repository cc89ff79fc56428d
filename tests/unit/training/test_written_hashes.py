# SPDX-License-Identifier: Apache-2.0
"""A stream that hashes what it passes on: the hash is that of the file, or there is none."""

import io
import pickle
import queue
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_invariant_recipes.runs.checkpoints import described
from tp_invariant_recipes.training import written_hashes
from tp_invariant_recipes.training.written_hashes import _Hashed, _hashing_writes, _telling, _told


@settings(max_examples=20)
@given(st.lists(st.binary(max_size=40)), st.integers(1, 30))
def test_the_hash_is_that_of_the_bytes_however_they_were_cut(tmp_path_factory, blocks, at_once):
    file = tmp_path_factory.mktemp("written") / "file"
    with pytest.MonkeyPatch.context() as patched, file.open("wb") as stream:
        patched.setattr(written_hashes, "AT_ONCE", at_once)  # small writes and large ones
        hashed = _Hashed(stream)
        assert [hashed.write(block) for block in blocks] == list(map(len, blocks))
    assert described(file.parent) == {"file": hashed.file}


def test_a_tensor_that_torch_saves_is_hashed(tmp_path):
    with (tmp_path / "file").open("wb") as stream:
        hashed = _Hashed(stream)
        torch.save(torch.arange(1 << 19), hashed)
    assert described(tmp_path) == {"file": hashed.file}
    assert hashed.file.bytes > 1 << 22


def test_a_file_that_is_not_only_appended_to_has_no_hash(tmp_path):
    with (tmp_path / "file").open("wb") as stream:
        hashed = _Hashed(stream)
        hashed.write(b"first")
        stream.seek(0)
        hashed.write(b"other")
        hashed.write(b"more")
    assert hashed.ended == -1
    assert (tmp_path / "file").read_bytes() == b"othermore"


def test_items_of_one_file_share_a_hash_and_a_file_rewritten_has_a_new_one(tmp_path):
    def write_item(stream: io.IOBase, data: bytes) -> None:
        stream.write(data)

    write, path = _hashing_writes(write_item), tmp_path / "file"
    for contents in ((b"old",), (b"new", b"er")):
        with path.open("wb") as stream:
            for data in contents:
                write(stream, data)
    written = {Path(name).name: item.file for name, item in written_hashes._written.items() if name == str(path)}
    assert written == described(tmp_path)


class Queue(queue.Queue):
    """Of another process: only what can be pickled arrives."""

    def put(self, item) -> None:
        super().put(pickle.dumps(item))

    def get_nowait(self):
        return pickle.loads(super().get_nowait())


class Writer:
    """Megatron's, as far as hashes go: it returns a function that another process may call."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint_dir, self.results_queue = str(folder), Queue()

    def get_save_function_and_args(self):
        buckets = [(str(Path(self.checkpoint_dir, name)), name, name.encode()) for name in ("a", "b")]
        return _write, None, [0, buckets, self.results_queue]

    def retrieve_write_results(self):
        return self.results_queue.get_nowait()


def _write(rank: int, buckets, results) -> None:
    write = _hashing_writes(lambda stream, data: stream.write(data))
    for path, _, data in buckets:
        with Path(path).open("wb") as stream:
            write(stream, data)
    results.put(["Megatron's"])


def test_a_process_that_writes_sends_the_hashes_behind_its_results(tmp_path, monkeypatch):
    """Two saves are under way. Each is finalized with the hashes of its own files."""
    saves = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        writer = Writer(tmp_path / name)
        write, _, arguments = _telling(Writer.get_save_function_and_args)(writer)
        write(*arguments)
        saves.append(writer)
    monkeypatch.setattr(written_hashes, "gathered_by_first", lambda item: [item])
    for writer in saves:
        assert _told(Writer.retrieve_write_results)(writer) == ["Megatron's"]
        folder = Path(writer.checkpoint_dir)
        assert written_hashes.finalized() == folder
        assert written_hashes.of_all_ranks(folder) == described(folder)
        assert written_hashes.of_all_ranks(folder) == {}
