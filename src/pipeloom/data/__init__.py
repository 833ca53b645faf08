"""Training data: text tokenized once, memory-mapped, in an order that does not depend on ranks, batches and resumes.

Needs no torch until batches are made.
"""

from pipeloom.data.corpus import Corpus, MixedCorpus, prepare_corpus
from pipeloom.data.sampler import Mixture, Sampler
from pipeloom.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "MixedCorpus",
    "Mixture",
    "Sampler",
    "Tokenizer",
    "prepare_corpus",
]
