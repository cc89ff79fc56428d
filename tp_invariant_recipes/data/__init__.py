"""From text to the indexed datasets that Megatron trains on.

source.py     select the files, digest them, cut them into parts
documents.py  the documents of a part and the problems in them
tokenizer.py  bytes of a document -> token ids
files.py      atomic files: whole or absent, also after SIGKILL or on a full disk
prepared.py   the files of a finished dataset; load and check them
parts.py      write the missing parts, merge them
prepare.py    the whole procedure: scan, write, merge, publish
"""
