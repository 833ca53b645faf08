"""`open_samples`: the data of a run: its tokenizer, its tokens in the output directory, and its samples."""

from collections.abc import Sequence
from pathlib import Path

from pipeloom.errors import DataError
from pipeloom.train.config.inside_stage import tokens_multiple
from pipeloom.train.config.model_directory import model_directory
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.corpus import prepare_corpus
from pipeloom.train.data.documents import Documents, prepare_documents
from pipeloom.train.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.train.data.records import SUFFIX, check_no_array
from pipeloom.train.data.samples import Samples, Windows
from pipeloom.train.data.text import ByteTokenizer, FileTokenizer, Tokenizer, find_files
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
    data, output_dir = config.data, Path(config.output_dir)
    if config.facts is not None and data.path is not None:
        root, files, passed_over, _ = find_files(data.path, output_dir / "data", output_dir)
        lines = [file for file in files if file.suffix == SUFFIX]
        if lines:
            found = _open_documents(config, root, files, len(lines), tokenizer)
            found.notices += skipped_notice({reason: number for reason, number in passed_over.items() if number})
            return found
        if len(files) == 1 and files[0].suffix == ".json":
            check_no_array(files[0])
    if data.packing:
        raise DataError(
            f"data.packing=true: has no effect on text, whose windows are full. Remove it, or use {SUFFIX} files."
        )
    corpus = prepare_corpus(data.path, tokenizer, output_dir / "data", data.validation_fraction, output_dir=output_dir)
    return Windows(
        corpus,
        config.model.sequence_length,
        labelled=config.facts is not None,
        found=found_text(corpus),
        notices=skipped_notice(corpus.skipped),
    )


def _open_documents(
    config: TrainConfig, root: Path, files: Sequence[Path], num_lines: int, tokenizer: Tokenizer
) -> Documents:
    data = config.data
    if num_lines < len(files):
        other = next(file for file in files if file.suffix != SUFFIX)
        raise DataError(
            f"data path {data.path!r} has {num_lines} {SUFFIX} files and others, such as {other.name}: must be either. "
            f"Use a glob pattern, such as '{root}/*{SUFFIX}'."
        )
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise DataError(
            f"data.tokenizer={data.tokenizer}: {SUFFIX} files need the tokenizer of a directory, which has special "
            "tokens and a chat template. Remove it, or name a directory."
        )
    numbers, facts = prepare_documents(
        files, root, tokenizer, Path(config.output_dir) / "data", data.validation_fraction
    )
    return Documents(
        numbers,
        facts,
        tokenizer,
        config.model.sequence_length,
        packing=data.packing,
        multiple=tokens_multiple(config),
    )


def run_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of a run: as given, else that of ``model.pretrained``, else bytes. Raises DataError."""
    given = config.data.tokenizer
    if given is not None and not Path(given).is_dir():
        return FileTokenizer(Path(given))
    home = given or config.model.pretrained
    return ByteTokenizer() if home is None else PretrainedTokenizer(model_directory(home))
