"""Write the missing parts, then merge all of them into the published result."""

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

# One screen of problems; the remaining ones are most likely the same mistake.
MAX_PROBLEMS = 20

# Called with (bytes done, bytes of text in all).
PartProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Input:
    """Everything that decides the result: the text and the way to read it. json_key: "" without JSONL files."""

    corpus: Corpus
    identity: Identity
    json_key: str

    @property
    def fingerprint(self) -> str:
        """64 hex digits that identify the whole input."""
        return sha256_of([SCHEMA_VERSION, self.corpus.sha256, self.identity.sha256, self.json_key])

    def parts(self, folder: Path) -> list[tuple[Path, TextBatch]]:
        """(file prefix, part) of each part. The prefix's name is a digest of the text, tokenizer and JSON key."""
        how = (str(SCHEMA_VERSION), self.identity.sha256, self.json_key)
        return [(folder / part.key(*how), part) for part in self.corpus.parts]


def write_parts(text: Input, folder: Path, tokenizer: Tokenizer, progress: PartProgress | None) -> None:
    """Write the parts missing from `folder` and remove those of other input.

    After the first bad document it only checks the remaining ones, so that all problems are reported soon.
    Raises DataError with the list. Finished parts stay, so a run after a corrected line reuses them.
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
        raise DataError("\n".join(["unusable documents:", *problems[:MAX_PROBLEMS], *more]))
    if progress:
        progress(done, text.corpus.size)


def _write_part(
    path: Path, part: TextBatch, tokenizer: Tokenizer, reader: SegmentReader, json_key: str, problems: list[str]
) -> None:
    """Tokenize one part, unless this part or an earlier one has problems."""
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

    Raises DataError when the result has no token.
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
