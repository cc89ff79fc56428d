# SPDX-License-Identifier: Apache-2.0
"""Examples to fine-tune on, and a tokenizer of their words."""

import json
from pathlib import Path

EXAMPLES = 240


def example(number: int) -> str:
    """A sum of small numbers and up to two signs: examples differ in their tokens, and in those that count."""
    terms = [number % 7, number // 7 % 7, *([1] * (number % 5))]
    answer = " ".join([str(sum(terms)), *["="] * (number % 3)])
    return json.dumps({"input": " + ".join(map(str, terms)) + " =", "output": answer})


def write(folder: Path) -> None:
    """Write `tokenizer`, of 34 words, and `examples` with its file into a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", "<unk>", "+", "=", *map(str, range(30))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder / "tokenizer")
    (folder / "examples").mkdir()
    (folder / "examples" / "training.jsonl").write_text("\n".join(map(example, range(EXAMPLES))) + "\n")
