"""Every message that the documents quote is one that the code prints."""

import re

from tests.unit.docs.markdown import CODE, DOCUMENTS
from tests.unit.docs.messages import Template, templates, unexplained

QUOTED = re.compile(r"^- `([^`]+)`", re.MULTILINE)  # what a list explains
SENTENCE = re.compile(r"[^\s|]+(?: [^\s|]+){3,}")


def quotations() -> list[tuple[str, str]]:
    """Document and message: the first column of tables of messages, and what begins an item of a list."""
    results = []
    for document in DOCUMENTS:
        cells = [row[0] for header, rows in document.tables if header[0] == "message" for row in rows]
        texts = [*(text for cell in cells for text in CODE.findall(cell)), *QUOTED.findall(document.prose)]
        texts = [re.sub(r"\s+", " ", text) for text in texts]
        results += [(document.name, text) for text in texts if SENTENCE.fullmatch(text)]
    return results


def test_a_quoted_message_is_one_of_the_code():
    assert len([name for name, _ in quotations() if name == "slurm/README.md"]) > 5
    results = {(name, text): unexplained(text, templates()) for name, text in quotations()}
    assert {quoted: missing for quoted, missing in results.items() if missing} == {}


# Of a code that can print these: what is quoted, and what of it is not known.
CODE_PRINTS = (
    "\0: there is no data of this name\0",
    "; did you mean \0?",
    "the nodes wait for \0 seconds; set \0 or leave it",
    "\0: expected a value\0",
    "that is a whole number",
)
QUOTES = (
    ("data=x: there is no data of this name; did you mean 'y'?", None),
    ("data=x: there is no data of this name; do you mean 'y'?", "do you mean 'y'?"),
    ("data=x: there are no data of this name", "data=x: there are no data of this name"),
    ("the nodes wait for 600 seconds", None),
    ("the nodes wait for 600 …", None),
    ("the nodes wait …", None),
    ("the hosts wait …", "the hosts wait …"),
    ("slurm.tries=x: expected a value that is a whole number", None),
    ("slurm.tries=x: expected a value that is one whole number", "that is one whole number"),
)


def test_drift_is_seen():
    for text, missing in QUOTES:
        assert unexplained(text, map(Template, CODE_PRINTS)) == missing
