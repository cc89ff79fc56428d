"""Right command lines with one or two slips: each ends with 0 or 2 (tests/unit/cli/wrong_commands.py: with 2)."""

import random
from collections.abc import Callable

import pytest

SEED = 31
FEW, ALL = 20, 400

VALID = (
    "train qwen3_toy tp=2 seq=32 iters=4 --dry-run",
    "train qwen3_moe_toy tp=2 ep=2 gbs=4 --dry-run --json",
    "train qwen3_toy data=text data.path=a.txt data.tokenizer=byte --dry-run",
    "train --resume run iters=6 --dry-run",
    "train qwen3_toy run.dir=new --continue --trace 1:2 --dry-run",
    "verify qwen3_toy tp=1,2 dp=1,2 iters=2 --dir cells",
    "verify qwen3_toy tp=1,2 --against run",
    "sweep qwen3_toy lr=1e-3,3e-4 seed=1,2 --dir cells",
    "compare run other",
    "compare --all run other --json",
    "certify run --out a.tpicert",
    "report run other --out page.html --no-png",
    "runs . --json",
    "bisect run other --dir parts",
    "bench qwen3_toy --modes stock,tree --rounds 1 --steps 2 --dir b",
    "audit qwen3_toy cuda_graph=te iters=2 --dir c",
    "submit qwen3_8b tp=4 cluster=h100 slurm.time=5 --dry-run",
    "submit qwen3_8b tp=2,4 cluster=h100 slurm.time=5 --verify --dry-run",
    "show qwen3_8b tp=4 optimizer.lr=1e-3",
    "show --from run --diff --json",
    "models --family",
    "check run --step 1 --module decoder",
    "export run out --step 2",
    "data prepare a.txt --output out --tokenizer byte",
    "jobs --all",
    "logs 12 --rank 0",
    "doctor --json",
)
VALUES = (
    "",
    "0",
    "-1",
    "1.5",
    "nan",
    "1e999",
    "9" * 40,
    "true",
    "null",
    "[]",
    "{a: 1}",
    "[1,",
    "'",
    '"',
    "${a}",
    "\x1b[31m",
)
VALUES += (
    "２",
    "\udcff",
    "a b",
    "~",
    "../..",
    "/",
    "n" * 300,
    "1,2",
    "1:2",
    "last",
    "none",
    "=",
    "%s",
    "{}",
    "\\",
    "\u202e",
)


def _value(rng: random.Random, word: str) -> str:
    key, equals, _ = word.partition("=")
    return f"{key}={rng.choice(VALUES)}" if equals else rng.choice(VALUES)


def _letter(rng: random.Random, word: str) -> str:
    at = rng.randrange(len(word))
    return word[:at] + rng.choice(("", word[at] * 2, rng.choice("abz_.-=0,"))) + word[at + 1 :]


def _case(rng: random.Random, word: str) -> str:
    return rng.choice((word.upper(), word.title(), word.swapcase()))


def _dashes(rng: random.Random, word: str) -> str:
    plain = word.lstrip("-")
    return rng.choice((f"-{plain}", f"--{plain}", f"---{plain}", plain, f"+{plain}", f"++{plain}", f"~{plain}"))


def _under(rng: random.Random, word: str) -> str:
    return word.replace("-", "_") if "-" in word else f"{rng.choice(('model', 'train', 'numerics', 'x'))}.{word}"


SLIPS: tuple[Callable[[random.Random, str], str], ...] = (_value, _value, _letter, _case, _dashes, _under)


def lines(count: int) -> list[list[str]]:
    """So many lines with a word changed, left out, repeated, moved or added; every right line has its turn."""
    rng, result = random.Random(SEED), []
    while len(result) < count:
        words = VALID[len(result) % len(VALID)].split()
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(words))
            action = rng.randrange(8)
            if action == 0 and len(words) > 1:
                del words[at]
            elif action == 1:
                words.insert(at, words[at])
            elif action == 2:
                words.insert(rng.randrange(len(words) + 1), rng.choice(VALUES))
            elif words[at]:
                words[at] = rng.choice(SLIPS)(rng, words[at])
        result.append(words)
    return result


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", (FEW, pytest.param(ALL, marks=pytest.mark.release)))
def test_a_line_with_a_slip_is_a_line_or_one_message(attack, run, monkeypatch, count):
    monkeypatch.setenv("PATH", str(run.absolute()))
    (run.parent / "a.txt").write_text("a text\n")
    wrong = {}
    for words in lines(count):
        if result := attack(*words, allowed=(0, 1, 2) if words[0] in ("compare", "bisect") else (0, 2)):
            wrong[" ".join(map(ascii, words))] = result
    assert wrong == {}
