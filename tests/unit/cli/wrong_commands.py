"""Command lines that are wrong, made by a script: the same ones for the same seed.

A class of mistakes is a function that returns words after `tpi`, or a table of texts. Every line is wrong in the folder
that the fixture of `test_wrong_commands.py` makes.
"""

import itertools
import json
import random
from collections.abc import Callable

from tp_invariant_recipes.check import typed as typed_rules
from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.schema import BRIDGE_SECTIONS, PROVIDERS
from tp_invariant_recipes.settings.tables import field_table

Words = list[str]

FIELDS: dict[str, dict[str, list[str] | None]] = json.loads(field_table.of_the_locks().read_text())["classes"]
SECTIONS = {name: FIELDS[PROVIDERS[0] if name == "model" else path] for name, path in BRIDGE_SECTIONS.items()}
# The sections that every run has.
COMMON = ("model", "train", "optimizer", "scheduler", "ddp", "dataset", "tokenizer", "checkpoint", "logger", "dist")

PLAIN = {f"{s}.{n}": types for s, fields in SECTIONS.items() for n, types in fields.items() if types}
ALONE = [  # what comes before the overrides of a command that composes a run
    ["train", "qwen3_toy"],
    ["train", "qwen3_moe_toy", "seq=32"],
    ["train", "qwen3_toy", "tp=2", "--json"],
    ["show", "qwen3_toy"],
    ["show", "nemotron3_nano_toy", "device=gpu"],
    ["submit", "qwen3_toy", "slurm.time=5", "device=cpu", "--dry-run"],
    ["verify", "qwen3_toy", "pp=1,2"],
    ["bench", "qwen3_toy", "--modes", "stock,tree"],
    ["audit", "qwen3_toy", "--against", "pp=2"],
]
COMMANDS = "train compare verify certify report bisect bench audit submit jobs logs wait cancel show models doctor data"


def lines(count: int, seed: int) -> list[Words]:
    """So many different command lines, as many of each class as of any other."""
    rng = random.Random(seed)
    results: dict[tuple[str, ...], None] = {}
    for make in itertools.cycle((*CLASSES, *map(_of_texts, TEXTS))):
        results.setdefault(tuple(make(rng)))
        if len(results) == count:
            return [list(words) for words in results]
    raise AssertionError


def _typo(rng: random.Random, word: str, taken: Callable[[str], bool]) -> str:
    """The word with a slip of the keyboard, which is none of the words that are taken."""
    while True:
        at = rng.randrange(len(word))
        other = rng.choice("abcdefghijklmnopqrstuvwxyz_0")
        made = rng.choice(
            (
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
                word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],
                word[:at] + other + word[at + 1 :],
            )
        )
        if made != word and made and not taken(made):
            return made


def _composing(rng: random.Random, *overrides: str) -> Words:
    return [*rng.choice(ALONE), *overrides]


def _of_texts(texts: tuple[str, ...]) -> Callable[[random.Random], Words]:
    return lambda rng: _composing(rng, rng.choice(texts), *rng.choice(([], ["iters=3"], ["seed=5"])))


def commands(rng: random.Random) -> Words:
    known = COMMANDS.split()
    return [_typo(rng, rng.choice(known), known.__contains__), "qwen3_toy"]


def option_typos(rng: random.Random) -> Words:
    known = ("--json", "--trace", "--resume", "--continue", "--launcher", "--verbose", "--dir", "--steps", "--help")
    taken = {*known, "--seq"}
    option = _typo(rng, rng.choice(known)[2:], lambda made: f"--{made}" in taken or not made.strip("-"))
    return _composing(rng, f"--{option}", rng.choice(("1", "runs/a", "x")))


def keys(rng: random.Random) -> Words:
    known = [*SHORT_KEYS, *conf_files.group_names(), *PLAIN, *SECTIONS]
    taken = {*known, *(f"+{key}" for key in known), "run", "numerics", "data", "device", "ledger", "cluster", "slurm"}
    key = _typo(rng, rng.choice([*SHORT_KEYS, *SECTIONS, *rng.sample([*PLAIN], 20)]), taken.__contains__)
    return _composing(rng, f"{key}={rng.choice(('1', '2', 'true', 'x'))}")


def field_typos(rng: random.Random) -> Words:
    section = rng.choice(COMMON)
    known = SECTIONS[section]
    name = _typo(rng, rng.choice([*known]), lambda made: made in known or made[0] == "_")
    return _composing(rng, f"{section}.{name}=1")


def models(rng: random.Random) -> Words:
    known = conf_files.groups()["model"]
    command = rng.choice(("train", "show", "submit", "verify", "bench"))
    return [command, _typo(rng, rng.choice(known), known.__contains__), "tp=2"]


def choices(rng: random.Random) -> Words:
    groups = {name: known for name, known in conf_files.groups().items() if name != "model"}
    group = rng.choice([*groups])
    return _composing(rng, f"{group}={_typo(rng, rng.choice(groups[group]), groups[group].__contains__)}")


# tpi takes the text of these as typed.
DECIDED = (
    "checkpoint.pretrained_checkpoint",
    "checkpoint.load",
    "checkpoint.save",
    "dataset.path_to_cache",
    "tokenizer.tokenizer_model",
)


WRONG_TYPES = {
    "int": ("abc", "1.5", "[1,2]", "{a:1}", "true", "'x y'", "1e-3"),
    "float": ("abc", "[0.1]", "{a:1}", "true", "1,5.5", "0.1.2"),
    "bool": ("maybe", "2", "[true]", "3.5", "{a:true}"),
    "str": ("[a]", "{a:b}"),
}
# Field of a section that every run has -> its only type.
TYPED = {
    key: kind
    for key, allowed in PLAIN.items()
    for kind in WRONG_TYPES
    if {*(allowed or ())} - {"null"} == {kind} and key not in DECIDED and key.partition(".")[0] in COMMON
}


def types(rng: random.Random) -> Words:
    key = rng.choice([*TYPED])
    return _composing(rng, f"{key}={rng.choice(WRONG_TYPES[TYPED[key]])}")


def ranges(rng: random.Random) -> Words:
    numbers = [
        key for key, types in PLAIN.items() if {"int", "float"} & {*(types or ())} and "bool" not in (types or ())
    ]
    values = (-1, -5, 0, 1, 2, 70000, -(2**40), 2**70)
    while True:
        key, value = rng.choice(numbers), rng.choice(values)
        section, _, name = key.partition(".")
        if section in COMMON and typed_rules.wrong({section: {name: value}}):
            return _composing(rng, f"{key}={value}")


def short_numbers(rng: random.Random) -> Words:
    values = ("-1", "nan", "inf", "-inf", "1e400", "9" * 26, "1.5", "abc", "[1]", "true", "null", "0x")
    key = rng.choice([key.name for key in SHORT_KEYS.values() if key.type is int])
    return _composing(rng, f"{key}={rng.choice(values)}")


def infinities(rng: random.Random) -> Words:
    floats = [key for key, types in PLAIN.items() if types and "float" in types and key not in typed_rules.INFINITE]
    key = rng.choice(["lr", *(key for key in floats if key.partition(".")[0] in COMMON)])
    return _composing(rng, f"{key}={rng.choice(('nan', 'inf', '-inf', '1e400', '-1e999'))}")


def relations(rng: random.Random) -> Words:
    toy, moe = ["qwen3_toy"], ["qwen3_moe_toy"]
    rows = (
        *([*toy, f"model.num_attention_heads={n}"] for n in (3, 5, 6, 7, 12)),
        *([*toy, f"model.num_query_groups={n}"] for n in (3, 5, 16)),
        *([*toy, f"model.hidden_size={n}"] for n in (7, 129, 100)),
        *([*moe, f"model.moe_router_topk={n}"] for n in (9, 100)),
        *([*moe, f"ep={n}"] for n in (3, 16)),
        *([*toy, f"tp={n}"] for n in (3, 5, 6, 7)),
        *([*toy, f"pp={n}"] for n in (3, 5)),
        *([*toy, f"mbs={n}"] for n in (3, 8)),
        *([*toy, f"dp={n}"] for n in (3, 5, 8)),
        *([*toy, f"scheduler.lr_warmup_iters={n}"] for n in (50, 51, 1000)),
        *([*toy, f"tokenizer.vocab_size={n}"] for n in (513, 100000)),
        [*toy, "lr=1e-9"],
        [*toy, "data.path=a.txt"],
        [*toy, "data=text"],
        [*toy, "ep=2"],
        [*toy, "sp=true"],
        [*toy, "cp=3"],
        [*toy, "ledger.trace=2:60"],
        [*toy, "validation.eval_interval=5"],
        [*toy, "numerics.virtual_shards=3"],
    )
    return ["train", *rng.choice(rows), *rng.choice(([], ["seed=7"], ["iters=50"], ["--json"]))]


CONTRADICTIONS = (
    "train qwen3_toy --trace 1:2 ledger.trace=2:3",
    "train qwen3_toy ledger.trace=1:1 --trace 1:2",
    "train qwen3_toy --launcher slurm launcher=local",
    "train qwen3_toy --launcher local launcher.kind=slurm",
    "train qwen3_toy --cluster-file site.yaml cluster=h100",
    "submit qwen3_toy --cluster-file site.yaml cluster=h200 slurm.time=5 --dry-run",
    "submit qwen3_toy --against a.txt slurm.time=5",
    "submit qwen3_toy --dir b slurm.time=5 --dry-run",
    "submit qwen3_toy launcher=local slurm.time=5 --dry-run",
    "train qwen3_toy --resume a --continue",
    "train qwen3_toy --continue",
    "train --resume a run.dir=b",
    "train qwen3_toy checkpoint.ckpt_step=5",
    "train qwen3_toy checkpoint.load=a",
    "train qwen3_toy checkpoint.save=a",
    "train qwen3_toy mixed_precision.fp8=e4m3",
    "verify qwen3_toy tp=1,2 run.dir=x",
    "verify qwen3_toy tp=2",
    "bench qwen3_toy iters=5",
    "bench qwen3_toy --modes stock,nothing",
    "audit qwen3_toy --against tp=2 ledger.trace=1:2",
    "train",
    "train tp=2",
    "train qwen3_toy tp=1,2",
    "train qwen3_toy tp=range(1,4)",
    "train qwen3_toy seed=choice(1,2)",
    "show",
    "models qwen3_toyy",
    "doctor now",
    "compare a.txt",
    "cancel",
)


def contradictions(rng: random.Random) -> Words:
    more = rng.choice(([], ["--json"], ["-v"], ["--nothing"], ["seed=4x"], [""]))
    return rng.choice(CONTRADICTIONS).split() + more


MISSING = (
    "compare {0} {1}",
    "compare a.txt {0}",
    "certify {0}",
    "report {0}",
    "bisect {0} {1}",
    "train --resume {0}",
    "train --resume a.txt",
    "train qwen3_toy cluster={0}.yaml",
    "train qwen3_toy --cluster-file {0}",
    "train qwen3_toy data=text data.path={0}",
    "train qwen3_toy checkpoint.pretrained_checkpoint={0}",
    "train qwen3_toy checkpoint.pretrained_checkpoint=a.txt",
    "train qwen3_toy checkpoint.pretrained_checkpoint=.",
    "verify qwen3_toy tp=1,2 --against {0}",
    "submit qwen3_toy cluster={0}/site.yml slurm.time=5 --dry-run",
    "data prepare {0}",
    "logs {0}",
)


def missing(rng: random.Random) -> Words:
    names = [rng.choice(("none", "no/such", "ä", "n o", "-x/..", "runs", "*.jsonl", "~nobody/x")) for _ in "ab"]
    return [word.format(*names) for word in rng.choice(MISSING).split()]


def controls(rng: random.Random) -> Words:
    code = rng.choice(("\x1b[31m", "\x1b]0;owned\x07", "\x07", "\r", "\x9b31m", "\x7f", "\b\b\b"))
    words = ["tp={}", "{}=2", "model.{}=2", "--{}", "numerics={}", "--trace={}", "--launcher={}", "cluster={}.yaml"]
    composing = _composing(rng, rng.choice(words).format(code))
    return rng.choice((composing, [f"{code}train"], ["compare", f"{code}a", "b"]))


def interpolations(rng: random.Random) -> Words:
    texts = (
        *("oc.env:HOME", "oc.env:NOT_SET", "oc.env:A,b", "now:%Y", "hydra:runtime.cwd", "oc.decode:1"),
        *("nothing.there", "x:1", "."),
    )
    key = rng.choice(("run.dir", "data.json_key", "cluster.environment.A", "tp", "lr", "logger.wandb_project"))
    return _composing(rng, f"{key}=${{{rng.choice(texts)}}}")


WITH_VALUES = (
    *(f"bench qwen3_toy --{option} {{}}" for option in ("steps", "warmup", "rounds", "modes")),
    *("audit qwen3_toy --reference {}", "audit qwen3_toy --against {}", "verify qwen3_toy tp=1,2 --against {}"),
    *(f"train qwen3_toy --{option} {{}}" for option in ("trace", "launcher", "cluster-file")),
    "train --resume {}",
)


def option_values(rng: random.Random) -> Words:
    values = ("x", "-1", "1.5", "none", "1:0", "3:", "[1]", "tree+", ",", "9" * 30, "=")
    return rng.choice(WITH_VALUES).format(rng.choice(values)).split()


CLASSES = (
    commands, option_typos, keys, field_typos, models, choices, types, ranges, short_numbers, infinities,
    relations, contradictions, missing, controls, interpolations, option_values,
)  # fmt: skip
# Texts in the place of an override: characters that are none of tpi's, empty ones, quotes, and words of a shell.
TEXTS = (
    (
        "ｔｐ=2", "tp=２", "tр=2", "tp\u200b=2", "\u202etp=2", "tp=2\u00a0", "tp＝2", "🎉=1", "seed=٣", "tp=½", "е=1",
        "model.num_layers=二", "tp=\udcff", "\udcfe=1", "tp=2\u2028pp=2", "ﬁeld=1", "tp=−2", "lr=1e−3", "lr=1，5",
    ),
    (
        "", "=", "=2", "tp=", "tp", " ", "\t", "tp= =2", "==", "lr=", "model.=1", ".num_layers=1", "model=",
        "numerics=", "model..num_layers=2", "data=", "model.num_layers=", "seed=", "+", "++", "++=1", 
        "mixed_precision.=x",
    ),
    (
        "tp=2 pp=2", "'tp=2'", '"tp=2"', "tp='2", 'tp="2', "tp=[1,", "tp={a", "tp=(2)", "tp=2)", "tp=${", "tp=${x",
        "tp=$(2)", "tp=`2`", "tp=\\2", "tp=%2", "tp=2'", "'tp'=2", "tp='", 'tp="', "model.num_layers='2", "tp={}",
        "tp=[]", "tp=2\n",
    ),
    (
        "|", "&&", ">", ">log", "2>&1", ";", "tp=2;", "tp=2,", "#", "# tp=2", "\\", "*", "~", "~tp", "-", "$HOME",
        "!", "tp", "..", "tp=2&", "tp:2", "tp==2", "tp->2", "--tp=2", "-tp=2", "tp+=2", "~lr",
    ),
)  # fmt: skip
