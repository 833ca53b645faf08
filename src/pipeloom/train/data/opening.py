"""`open_samples`: the data of a run: its tokenizer, its tokens in the output directory, and its samples."""

from pathlib import Path

from pipeloom.data.corpus import Corpus, MixedCorpus, prepare_corpus
from pipeloom.data.files import Found, find_files, weighted_paths
from pipeloom.data.opened import is_url
from pipeloom.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.data.shards import JSON_LINES
from pipeloom.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer
from pipeloom.errors import DataError
from pipeloom.train.config.inside_stage import tokens_multiple
from pipeloom.train.config.model_directory import model_directory
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.documents import Documents, prepare_documents
from pipeloom.train.data.records import check_no_array
from pipeloom.train.data.samples import Samples, Windows
from pipeloom.train.data.written import writer_in
from pipeloom.train.output.display import found_text, skipped_notice


def open_samples(config: TrainConfig) -> Samples:
    """The samples of a run; tokenized at the first call, mapped from the output directory afterwards.

    Text gives windows of a stream. For a model of a Hugging Face directory, JSON lines give documents.

    Raises:
        DataError: data or tokenizer is missing, unreadable or empty, text and JSON lines are mixed, the only
            file is a JSON array of records, or a token is unknown to the model.
    """
    samples = _open(config, run_tokenizer(config))
    most = None if config.facts is None else config.facts.vocabulary_size
    if most is not None and most < samples.tokenizer.vocabulary_size and most <= (largest := samples.largest_id()):
        raise DataError(
            f"the data has token id {largest}, and the model of {config.model.pretrained} knows ids below {most}. "
            "Use the tokenizer of the model."
        )
    return samples


def _open(config: TrainConfig, tokenizer: Tokenizer) -> Samples:
    data = config.data
    if config.facts is not None and data.path is not None:
        found = find_files(data.path, _cache(config), writer_in(Path(config.output_dir)))
        lines = [shard for shard in found.shards if shard.kind]
        if lines and data.field == "text":
            return _open_documents(config, found, len(lines), tokenizer)
        if len(found.shards) == 1 and (only := found.shards[0].path).endswith(".json") and not is_url(only):
            check_no_array(Path(only))
    if data.packing:
        raise DataError(
            f"data.packing=true: has no effect on text, whose windows are full. Remove it, or use {JSON_LINES} files."
        )
    if data.mixture is None:
        corpora = [_corpus(config, data.path, tokenizer)]
    else:
        corpora = [_corpus(config, path, tokenizer) for path, _ in weighted_paths(data.mixture)]
    weights = [weight for _, weight in weighted_paths(data.mixture)] if data.mixture is not None else []
    skipped: dict[str, int] = {}
    for corpus in corpora:
        skipped = {
            reason: skipped.get(reason, 0) + corpus.skipped.get(reason, 0) for reason in (*skipped, *corpus.skipped)
        }
    return Windows(
        MixedCorpus(corpora, weights) if weights else corpora[0],
        config.model.sequence_length,
        labelled=config.facts is not None,
        found=found_text(corpora),
        notices=skipped_notice(skipped),
    )


def _corpus(config: TrainConfig, path: str | None, tokenizer: Tokenizer) -> Corpus:
    return prepare_corpus(
        path,
        tokenizer,
        _cache(config),
        config.data.validation_fraction,
        field=config.data.field,
        workers=config.data.workers,
        writer_in=writer_in(Path(config.output_dir)),
    )


def _cache(config: TrainConfig) -> Path:
    return Path(config.output_dir) / "data" if config.data.cache is None else Path(config.data.cache).expanduser()


def _open_documents(config: TrainConfig, found: Found, num_lines: int, tokenizer: Tokenizer) -> Documents:
    data = config.data
    if num_lines < len(found.shards):
        other = next(shard for shard in found.shards if not shard.kind)
        raise DataError(
            f"data path {data.path!r} has {num_lines} {JSON_LINES} files and others, such as {other.name}: must be "
            f"either. Use a glob pattern, such as '{found.root}/*{JSON_LINES}'."
        )
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise DataError(
            f"data.tokenizer={data.tokenizer}: {JSON_LINES} files need the tokenizer of a directory, which has special "
            "tokens and a chat template. Remove it, or name a directory."
        )
    numbers, facts = prepare_documents(found.shards, found.root, tokenizer, _cache(config), data.validation_fraction)
    made = Documents(
        numbers,
        facts,
        tokenizer,
        config.model.sequence_length,
        packing=data.packing,
        multiple=tokens_multiple(config),
    )
    made.notices += skipped_notice({reason: number for reason, number in found.passed_over.items() if number})
    return made


def run_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of a run: as given, else that of ``model.pretrained``, else bytes. Raises DataError."""
    given = config.data.tokenizer
    if given is not None and not Path(given).is_dir():
        return FileTokenizer(Path(given))
    home = given or config.model.pretrained
    return ByteTokenizer() if home is None else PretrainedTokenizer(model_directory(home))
