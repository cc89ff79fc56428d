"""The work itself: write the parts that are missing, then merge all of them into the published result."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.data.documents import SegmentReader, documents
from tp_invariant_recipes.data.files import beside, indexed, publish_index
from tp_invariant_recipes.data.prepared import SCHEMA_VERSION, describe, metadata_text
from tp_invariant_recipes.data.source import Corpus, TextBatch, sha256_of
from tp_invariant_recipes.data.tokenizer import Identity, Tokenizer
from tp_invariant_recipes.errors import DataError

# As many as fit on one screen; the rest is most likely the same mistake.
MAX_PROBLEMS = 20

# Called with (bytes done, bytes of text in all).
PartProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Input:
    """Text and how it is read: all that decides the result. json_key: "" where there are no JSONL lines."""

    corpus: Corpus
    identity: Identity
    json_key: str

    @property
    def fingerprint(self) -> str:
        """64 hex digits for all of it."""
        return sha256_of([SCHEMA_VERSION, self.corpus.sha256, self.identity.sha256, self.json_key])

    def parts(self, folder: Path) -> list[tuple[Path, TextBatch]]:
        """Each part with the prefix of its files, whose name digests the part's text and how it is read."""
        how = (str(SCHEMA_VERSION), self.identity.sha256, self.json_key)
        return [(folder / part.key(*how), part) for part in self.corpus.parts]


def write_parts(text: Input, folder: Path, tokenizer: Tokenizer, progress: PartProgress | None) -> None:
    """Write the parts that are not in `folder` yet and remove those of other input.

    After the first bad document the rest is only checked, so that all problems are seen soon.
    Raises DataError with the list. Parts written before stay: mending a line does not cost the work on them.
    """
    parts = text.parts(folder)
    wanted = {beside(path, suffix) for path, _ in parts for suffix in (".bin", ".idx")}
    for path in set(folder.iterdir()) - wanted:
        path.unlink()
    problems: list[str] = []
    reader = SegmentReader()
    done = 0
    try:
        for path, part in parts:
            if progress:
                progress(done, text.corpus.size)
            if not beside(path, ".idx").exists():
                _write_part(path, part, tokenizer, reader, text.json_key, problems)
            if len(problems) >= MAX_PROBLEMS:
                break
            done += part.size
    finally:
        reader.close()
    if problems:
        more = ["... and maybe more"] if len(problems) >= MAX_PROBLEMS else []
        raise DataError("\n".join(["documents that cannot be used:", *problems[:MAX_PROBLEMS], *more]))
    if progress:
        progress(done, text.corpus.size)


def _write_part(
    path: Path, part: TextBatch, tokenizer: Tokenizer, reader: SegmentReader, json_key: str, problems: list[str]
) -> None:
    """Tokenize one part, unless it or one before has problems."""
    texts = list(documents(reader, part, json_key, problems))
    if problems:
        return
    building = path.with_name("building")
    with indexed(building, tokenizer.vocab_size) as builder:
        for ids in tokenizer.encode(texts):
            builder.add_document(ids, [len(ids)])
    publish_index(building, path)


def merge(text: Input, folder: Path, prefix: Path, tokenizer: Tokenizer) -> None:
    """Join the parts in `folder` in source order, publish the result at `prefix`, remove the folder.

    Raises DataError when there is no token in it.
    """
    building = folder / "building"
    with indexed(building, tokenizer.vocab_size) as builder:
        for path, _ in text.parts(folder):
            builder.add_index(str(path))
    # The merged lengths are numpy.int32, whose sum would overflow at 2**31 tokens.
    lengths = list(map(int, builder.sequence_lengths))
    if not lengths:
        shutil.rmtree(folder)
        raise DataError(f"no text in {text.corpus.name!r}: {len(text.corpus.files)} file(s), every document is empty")
    described = describe(text.corpus, text.json_key)
    metadata = metadata_text(building, text.identity, tokenizer, len(lengths), sum(lengths), described)
    publish_index(building, prefix, metadata)
    shutil.rmtree(folder, ignore_errors=True)
