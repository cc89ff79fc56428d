"""From text to the indexed datasets that Megatron trains on.

source.py     which files count, their digests, how they are cut in parts
documents.py  the documents of a part, and what is wrong with them
tokenizer.py  bytes of a document -> token ids
files.py      files that are either whole or absent, also after SIGKILL or on a full disk
prepared.py   what a finished dataset consists of; load and check it
parts.py      write the parts that are missing, merge them
prepare.py    the story: scan, write, merge, publish
"""
