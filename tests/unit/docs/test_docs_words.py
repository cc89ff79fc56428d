"""The pages stay short: README, CONTRIBUTING and docs/ have at most 25,000 words."""

import re

from tests.unit.docs.markdown import DOCUMENTS

MOST = 25_000
ELSEWHERE = {"SECURITY.md", "slurm/README.md"}


def words(text: str) -> int:
    """What stands between spaces and has a letter or a digit; the bars of a table are no words."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_bars_and_dashes_are_no_words():
    assert words("| a key | – |\n| --- | --- |\n| `run.dir=a` | 1,2 |") == 4


def test_the_pages_are_within_their_words():
    assert sum(words(page.text) for page in DOCUMENTS if page.name not in ELSEWHERE) <= MOST
