"""One meaning of a NullTokenizer's vocabulary size for every version of Megatron-Core.

Megatron-Core up to 0.17 adds the end-of-document id to the given size (eod = N, vocabulary N + 1); 0.19 includes it
(eod = N - 1, vocabulary N), as Megatron-LM does under `--null-tokenizer-vocab-includes-eod`. Runs are comparable only
under one convention, so `tokenizer.vocab_includes_eod` states it. This module tests the installed class with a number
instead of looking at its version.
"""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.errors import ConfigError


def eod_id(vocab_size: int, *, includes_eod: bool) -> int:
    """Return the end-of-document id: the last of `vocab_size` ids, or the one after them."""
    return vocab_size - 1 if includes_eod else vocab_size


def megatron_vocab_size(vocab_size: int, *, includes_eod: bool, tokenizer: Callable[[int], Any] | None = None) -> int:
    """Return the number to pass to Megatron's NullTokenizer so that its eod is `eod_id(vocab_size, …)`.

    tokenizer: the class to test; None: the installed one.
    Raises ConfigError when the class follows neither known convention.
    """
    if tokenizer is None:
        from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

        tokenizer = NullTokenizer
    eod = eod_id(vocab_size, includes_eod=includes_eod)
    for given in (eod, eod + 1):
        probe = tokenizer(given)
        if probe.eod == eod and probe.vocab_size == eod + 1:
            return given
    raise ConfigError(
        "this Megatron-Core's NullTokenizer counts its end-of-document id neither in nor on top of vocab_size; "
        "tokenizer.vocab_includes_eod has no meaning here (tpi doctor shows the versions that work)"
    )
