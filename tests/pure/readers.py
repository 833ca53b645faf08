"""Everything in pipeloom that reads files which others may have written or damaged: `READERS`, and who covers what."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from pipeloom.chaos.comparison import compare
from pipeloom.chaos.record import Record
from pipeloom.cli import chaos as chaos_command
from pipeloom.cli.partition import parse_profile_file
from pipeloom.cli.planned.model import planned_model
from pipeloom.cli.train import parse
from pipeloom.common.checkpoint_key import SIGNATURE_NAME, CheckpointKey
from pipeloom.common.json_reader import parse_file
from pipeloom.common.recorded_file import FileRecord
from pipeloom.common.tensor_file import stored_tensors, tensor_sources
from pipeloom.data.parts import ABOUT
from pipeloom.data.sampler import Sampler
from pipeloom.data.shards import Shard, read_lines, read_texts
from pipeloom.data.token_cache import cached_tokens, write_tokens
from pipeloom.data.tokenizers import FileTokenizer
from pipeloom.errors import InputError, PipeloomError
from pipeloom.integrations.ray.run_files import RunFiles
from pipeloom.ir import check
from pipeloom.ir.text import from_json
from pipeloom.ir.torch_csv import from_csv
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.huggingface_config import architecture_of
from pipeloom.plan.memory.memory_file import FILE, read_memory
from pipeloom.plan.plan import Plan
from pipeloom.plan.slicing.slice_costs import parse_slice_costs
from pipeloom.pretrained.checked_tensors import CheckedTensors
from pipeloom.pretrained.files import find_tensors, mapped
from pipeloom.report import run_files, write_report
from pipeloom.report.run_files import read_configuration, read_environment, read_metrics, read_timelines
from pipeloom.sim import parse_costs
from pipeloom.train.checkpoint.convert import model_tensors
from pipeloom.train.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SEAL_NAME,
    missing_or_cut,
    read_manifest,
    seal,
    verify,
)
from pipeloom.train.checkpoint.reader import Checkpoint
from pipeloom.train.checkpoint.state import random_state as checkpoint_random_state
from pipeloom.train.checkpoint.state import restore_random_state
from pipeloom.train.config.model_directory import model_facts
from pipeloom.train.data.documents import Documents, prepare_documents
from pipeloom.train.data.records import check_no_array, documents
from pipeloom.train.output.directory import read_entries
from pipeloom.train.output.recent_band import RecentBand
from pipeloom.train.output.reporters import run_name
from pipeloom.train.output.rewinds import read_rewinds
from pipeloom.train.output.saved_state import check_saved_state
from pipeloom.training.loss_scaler import LossScaler
from pipeloom.watch.rank_states import read_states

CORPUS = Path(__file__).parent / "corpus"
CHECKPOINT = CORPUS / "checkpoint-3"
_MODEL_NAME = "model-00001-of-00002.safetensors"


class Reader(NamedTuple):
    """A reader of a file.

    Attributes:
        file: the name of the file that it reads.
        read: reads the file with this path, and raises PipeloomError.
        modules: the modules of pipeloom that it runs, below src/pipeloom.
        around: a directory with files that lie beside it; empty: none do.
        refuses: whether it must refuse content that is no file of its kind, rather than ignore it.
        names_file: whether its errors name the file; those of a configuration may name the option instead.
    """

    file: str
    read: Callable[[Path], object]
    modules: tuple[str, ...]
    around: str = ""
    refuses: bool = True
    names_file: bool = True


def answer(reader: Reader, content: bytes) -> str | None:
    """The error about a file with `content`, without the directory; None where it is read."""
    with TemporaryDirectory() as home:
        path = Path(home, "checkpoint-3" if reader.around else "run", reader.file)
        if reader.around:
            shutil.copytree(CORPUS / reader.around, path.parent)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        try:
            reader.read(path)
        except PipeloomError as error:
            return str(error).replace(home, "")
        return None


@functools.cache
def valid_files(name: str) -> list[bytes]:
    """The files that a reader must read."""
    around = CORPUS / READERS[name].around / READERS[name].file
    own = [path.read_bytes() for path in sorted((CORPUS / name).glob("valid*"))]
    return [around.read_bytes(), *own] if READERS[name].around else own


def _text(parse: Callable[[str], object]) -> Callable[[Path], object]:
    return lambda path: parse_file("file", path, parse)


def _configuration(read: Callable[[str], object]) -> Callable[[Path], object]:
    def reader(path: Path) -> object:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                return read(str(path))
        except SystemExit:  # the parser of the command line prints its errors
            raise InputError(said.getvalue().strip()) from None

    return reader


def _architecture(path: Path) -> object:
    given = {"model": {"config": str(path)}, "vocabulary_size": None}
    return planned_model(given, 8, "adamw")


def _facts(path: Path) -> object:
    return architecture_of(model_facts(str(path.parent)).content, str(path))


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    kept = checkpoint_random_state()
    try:
        yield
    finally:
        restore_random_state(kept)


def _manifest(path: Path) -> None:
    (path.parent / SEAL_NAME).write_bytes(seal(path.read_bytes()))
    _checkpoint(path)


def _trainer_state(path: Path) -> None:
    (path.parent / SEAL_NAME).write_bytes(seal(path.read_bytes()))
    state = read_manifest(path.parent).state
    check_saved_state(path.parent, state)
    saved = state["sampler"]
    sampler = Sampler(9, saved["seed"], [tuple(each) for each in saved.get("passed_over", ())])
    sampler.batch(saved["samples_seen"], 2)
    if "recent_steps" in state:
        band = RecentBand()
        band.load(state["recent_steps"])
        band.observe(1.0, 1.0)
    if "loss_scaler" in state:
        LossScaler().load(state["loss_scaler"])


def _checkpoint(path: Path) -> None:
    found = Checkpoint(path.parent, verify_files=False)
    missing_or_cut(path.parent, found.manifest)
    for name in found.names:
        found.tensor(name)
    for name in (*found.manifest.ties, "no such name"):
        with contextlib.suppress(PipeloomError):
            found.tensor(name)
    found.optimizer_state(read=False)
    found.optimizer_state()
    for rank in range(found.num_parts):
        random_state = found.random(rank, found.num_parts)
        if random_state is not None:
            with kept_generators():
                restore_random_state(random_state)
    for tensor in model_tensors(path.parent, verify_files=False).values():
        assert len(tensor.source.read()) == tensor.source.size_bytes
    verify(path.parent)


def _weights(path: Path) -> None:
    content = path.read_bytes()
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    for stored in stored_tensors(path).values():
        assert mapped(stored).nbytes == len(stored.read())
    for source in tensor_sources(path, record).values():
        source.read()
    checked = CheckedTensors(path, record)
    for name in checked.keys():  # noqa: SIM118
        assert checked.get_tensor(name).nbytes == len(stored_tensors(path)[name].read())


def _weight_index(path: Path) -> None:
    shutil.copyfile(CORPUS / "weights.safetensors" / "valid.safetensors", path.parent / "model-1.safetensors")
    find_tensors(path.parent)


def _signature(path: Path) -> None:
    verify(path.parent, CheckpointKey.read(path.parent / "key"))


def _metrics(path: Path) -> None:
    found = read_metrics(path)
    for row in (*found.steps, *found.evaluations):
        for name in row:
            found.series(name)
            found.median(name)
            found.per_rank(name)
    _ = found.skipped
    write_report(path.parent)


def _resumed_metrics(path: Path) -> None:
    read_entries(path.parent)
    files = RunFiles(path.parent, 0)
    files.news()
    compare(path.parent, path.parent)


def _timelines(path: Path) -> None:
    shutil.copyfile(CORPUS / "metrics.jsonl" / "valid.jsonl", path.parent / "metrics.jsonl")
    read_timelines(path)
    write_report(path.parent)


def _record(path: Path) -> None:
    found = Record(path)
    _ = found.ranks, found.strike, found.num_steps
    found.first_step(), found.restarted(0.0), found.begun_steps(9.0)
    found.actions(0), found.files(0)


class _Tokenizer:
    """What `documents` and `Documents` need of a tokenizer."""

    start, end, padding, vocabulary_size, fingerprint = (), (0,), 0, 256, b"x"

    def plain(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode(errors="surrogatepass")) for text in texts]

    def conversation(self, messages: list[Any], tools: Any) -> tuple[list[int], list[bool]]:
        return [1, 2], [False, True]


def _conversations(path: Path) -> None:
    for _ in documents(read_lines(path), _Tokenizer()):  # type: ignore[arg-type]
        pass


def _texts(path: Path) -> None:
    for _ in read_texts(Shard.of(path, path.parent), "text"):
        pass


_KEY = "x"
_BYTE = np.dtype(np.uint8)


def _about(path: Path) -> None:
    """Tokens are made again where the JSON about them is damaged."""

    def write(out: BinaryIO) -> dict[str, Any]:
        out.write(bytes(12))
        about: dict[str, Any] = json.loads((CORPUS / "tokens_about.json" / "valid.json").read_bytes())
        del about["checksums"]
        return about

    (path.parent / f"corpus-{_KEY}.bin").write_bytes(bytes(12))
    tokens, facts = cached_tokens(path.parent, _KEY, _BYTE, ABOUT, write)
    assert len(tokens) == facts["num_tokens"] == 12
    assert min(facts["num_train_tokens"], *facts["skipped"].values()) >= 0


def _document_tokens(path: Path) -> None:
    text = path.parent / "d.jsonl"
    text.write_text('{"text": "abc"}\n{"prompt": "q", "completion": "ab"}\n')
    shards, tokenizer = [Shard(str(text), "d.jsonl", 9, 0)], _Tokenizer()

    def prepared() -> tuple[Any, dict[str, Any]]:
        return prepare_documents(shards, "d", tokenizer, path.parent, 0.5)  # type: ignore[arg-type]

    _, about = prepared()
    [tokens] = path.parent.glob("corpus-*.bin")

    def write(out: BinaryIO) -> dict[str, Any]:
        out.write(path.read_bytes())
        return about

    write_tokens(path.parent, tokens.stem.removeprefix("corpus-"), write)  # with checksums that fit
    numbers, facts = prepared()
    for packing in (False, True):
        Documents(numbers, facts, tokenizer, 4, packing=packing)  # type: ignore[arg-type]


_SCHEDULES = ("common/json_reader.py", "ir/text.py", "schedules/user_defined.py")
_CLUSTERS = ("plan/cluster.py", "plan/costs/named_clusters.py", "plan/local/saved.py", "train/auto/measured_costs.py")
_PROFILES = ("plan/partition/profile.py", "cli/partition.py", "cli/planned/profile.py")
_METRICS = (
    *("train/output/directory.py", "integrations/ray/run_files.py", "chaos/campaign.py", "chaos/comparison.py"),
    "train/output/reporters.py",
)
READERS: dict[str, Reader] = {
    "schedule.json": Reader(
        "s.json",
        _text(lambda text: check(from_json(text))),
        _SCHEDULES,
    ),
    "schedule.csv": Reader("s.csv", _text(lambda text: check(from_csv(text))), ()),
    "plan": Reader("plan.json", Plan.load, ("plan/plan.py",)),
    "cluster": Reader(
        "c.json",
        lambda path: find_cluster(str(path), "--cluster"),
        _CLUSTERS,
    ),
    "model": Reader("m.json", _architecture, ("plan/named_architectures.py", "cli/planned/model.py")),
    "config.json": Reader("config.json", _facts, ("train/config/model_directory.py",)),
    "profile": Reader("p.json", _text(parse_profile_file), _PROFILES),
    "graph.txt": Reader("g.txt", _text(parse_profile_file), ()),
    "slice_costs": Reader("s.json", _text(parse_slice_costs), ("plan/slicing/slice_costs.py", "cli/slice.py")),
    "costs": Reader("c.json", _text(parse_costs), ("sim/costs_file.py", "cli/memory.py", "cli/simulation/inputs.py")),
    "configuration": Reader(
        "c.yaml",
        _configuration(lambda path: parse(["--config", path])),
        ("cli/common/train_options.py",),
        names_file=False,
    ),
    "chaos_configuration": Reader("c.yaml", _configuration(chaos_command._config), (), names_file=False),
    "manifest": Reader(MANIFEST_NAME, _manifest, ("train/checkpoint/manifest.py",), "checkpoint-3"),
    "trainer_state": Reader(MANIFEST_NAME, _trainer_state, (), "checkpoint-3"),
    "seal": Reader(SEAL_NAME, lambda path: verify(path.parent), (), "checkpoint-3"),
    "signature": Reader(SIGNATURE_NAME, _signature, ("common/checkpoint_key.py",), "checkpoint-3"),
    "key": Reader("key", _signature, (), "checkpoint-3"),
    "index": Reader(INDEX_NAME, _checkpoint, (), "checkpoint-3"),
    "checkpoint_tensors": Reader(_MODEL_NAME, _checkpoint, ("train/checkpoint/tensor_reader.py",), "checkpoint-3"),
    "weights.safetensors": Reader("w.safetensors", _weights, ("common/tensor_file.py", "common/recorded_file.py")),
    "weight_index.json": Reader(INDEX_NAME, _weight_index, ("pretrained/files.py",)),
    "rewinds.json": Reader("rewinds.json", lambda path: read_rewinds(path.parent), ("train/output/rewinds.py",)),
    "shown_rewinds.json": Reader("rewinds.json", run_files.read_rewinds, ()),
    "tracking.json": Reader("tracking.json", lambda path: run_name(path.parent), ("train/output/reporters.py",)),
    "processes.json": Reader(
        "processes.json", lambda path: read_states(path.parent), ("watch/rank_states.py",), refuses=False
    ),
    "metrics.jsonl": Reader("metrics.jsonl", _metrics, ("report/run_files.py",)),
    "resumed_metrics.jsonl": Reader(
        "metrics.jsonl",
        _resumed_metrics,
        _METRICS,
        refuses=False,
    ),
    "timelines.json": Reader("timelines.json", _timelines, ("sim/timeline.py",)),
    "environment.json": Reader("environment.json", read_environment, ()),
    "config.yaml": Reader("config.yaml", read_configuration, ()),
    "memory.json": Reader(FILE, lambda path: read_memory(path.parent), ("plan/memory/memory_file.py",)),
    "chaos_record": Reader("record", _record, ("chaos/record.py",), refuses=False),
    "documents.jsonl": Reader("d.jsonl", _texts, ("data/shards.py",)),
    "documents.jsonl.gz": Reader("d.jsonl.gz", _texts, ("data/opened.py",)),
    "documents.jsonl.zst": Reader("d.jsonl.zst", _texts, ()),
    "documents.parquet": Reader("d.parquet", _texts, ()),
    "text": Reader("d.txt", _texts, (), refuses=False),
    "text.gz": Reader("d.txt.gz", _texts, ()),
    "conversations.jsonl": Reader("d.jsonl", _conversations, ("train/data/records.py",)),
    "array.json": Reader("a.json", check_no_array, (), refuses=False),
    "tokens_about.json": Reader(f"corpus-{_KEY}.json", _about, ("data/token_cache.py",), refuses=False),
    "document_tokens": Reader("d.bin", _document_tokens, (), refuses=False),
    "tokenizer.json": Reader("tokenizer.json", FileTokenizer, ("data/tokenizers.py",)),
}
