# SPDX-License-Identifier: Apache-2.0
"""What a run reads: text, examples for fine-tuning, sequences to score.

text.py       files of text -> Megatron's indexed datasets
tokenizer.py  documents -> token ids
examples.py   JSONL for fine-tuning, checked before ranks start
sequences.py  JSONL to score
"""
