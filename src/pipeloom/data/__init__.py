"""Training data: text tokenized once, memory-mapped, in an order that does not depend on ranks, batches and resumes.

Needs no torch until batches are made, and no numpy until a corpus is.
"""

from pipeloom.common.lazy_exports import lazy_exports

TYPE_CHECKING = False
if TYPE_CHECKING:
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

# Module -> its public names, loaded at first use.
_LAZY = {
    "pipeloom.data.corpus": "Corpus MixedCorpus prepare_corpus",
    "pipeloom.data.sampler": "Mixture Sampler",
    "pipeloom.data.tokenizers": "ByteTokenizer FileTokenizer Tokenizer",
}
__getattr__ = lazy_exports(__name__, _LAZY)
