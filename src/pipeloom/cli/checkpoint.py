"""`pipeloom checkpoint ls|verify|convert`: lists, verifies and converts checkpoints."""

import json
from pathlib import Path
from textwrap import indent
from typing import Any

from pipeloom.cli.common.parser import Parser, did_you_mean
from pipeloom.cli.common.resharding import print_resharded
from pipeloom.cli.common.upcycling import add_upcycle_options, check_no_upcycling, print_upcycled
from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.quantities import bytes_text, table_lines
from pipeloom.errors import CheckpointError, InputError
from pipeloom.train.checkpoint.convert import convert, has_configuration, model_tensors
from pipeloom.train.checkpoint.directory import CheckpointEntry, is_ours, list_checkpoints, resolve
from pipeloom.train.checkpoint.manifest import (
    MANIFEST_NAME,
    SEAL_NAME,
    is_misnamed,
    missing_or_cut,
    read_manifest,
    verify,
)
from pipeloom.train.checkpoint.pieces import Piece

_EXAMPLES = """\
pipeloom checkpoint ls runs/corpus                       the checkpoints of a run
pipeloom checkpoint ls runs/corpus/checkpoint-200        the tensors of one checkpoint
pipeloom checkpoint verify runs/corpus                   compare the hashes of all files of the latest checkpoint
pipeloom checkpoint convert runs/corpus exported         write one model.safetensors, for Hugging Face and others
pipeloom checkpoint convert runs/tuned tuned --config DIR   a directory that transformers reads; DIR has config.json
pipeloom checkpoint convert runs/corpus runs/eight --plan plan.json     as the processes of a plan would have saved it
pipeloom checkpoint convert runs/corpus runs/mixture --upcycle 8 --experts_every 2      a mixture of 8 experts
"""
_KEY_HELP = "file of the key that the checkpoint must be signed with (default: signatures are not read)"
_DIR_HELP = "a checkpoint-N directory, or the output directory of a run"


def main(argv: list[str]) -> int:
    """Run `pipeloom checkpoint ARGV`; returns the exit code. Raises InputError for bad input."""
    commands = {"ls": _ls, "verify": _verify, "convert": _convert}
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: pipeloom checkpoint ls DIR [--json] | verify DIR\n"
            "       pipeloom checkpoint convert DIR OUT "
            "[--ranks P | --single | --config DIR | --plan FILE | --upcycle E]\n\n"
            f"DIR is {_DIR_HELP} (its latest checkpoint).\n\nexamples:\n{indent(_EXAMPLES, '  ')}",
            end="",
        )
        return 0 if argv else 2
    if argv[0] not in commands:
        hint = did_you_mean(argv[0], commands) or "see `pipeloom checkpoint --help`"
        raise InputError(f"checkpoint command {argv[0]!r} is unknown: must be one of {', '.join(commands)}; {hint}")
    return commands[argv[0]](argv[1:])


def _ls(argv: list[str]) -> int:
    parser = _parser("ls", "List the checkpoints of an output directory, or the tensors of one checkpoint.")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    options = parser.parse_args(argv)
    directory = Path(options.dir)
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory. Pass {_DIR_HELP}.")
    if (directory / MANIFEST_NAME).is_file():
        answer = _describe_one(directory)
        table = [["tensor", "dtype", "shape", "size", "file"]]
        for row in answer["tensors"]:
            shape, more = " x ".join(map(str, row["shape"])) or "scalar", len(row["pieces"]) - 1
            file = f"{row['file']} and {more} more" if more > 0 else row["file"]
            table.append([row["name"], row["dtype"], shape, bytes_text(row["bytes"]), file])
    else:
        answer = {"path": str(directory), "checkpoints": [_describe(entry) for entry in list_checkpoints(directory)]}
        table = [["step", "size", "layout", "status", "path"]]
        for row in answer["checkpoints"]:
            table.append([str(row["step"]), bytes_text(row["bytes"]), _layout(row), row["status"], row["path"]])
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join(table_lines(table)) if table[1:] else f"no checkpoint in {directory}")
    return 0


def _verify(argv: list[str]) -> int:
    parser = _parser("verify", "Read every file of a checkpoint and compare its size and SHA-256.")
    parser.add_argument("--checkpoint_key_file", metavar="FILE", default=None, help=_KEY_HELP)
    options = parser.parse_args(argv)
    checkpoint = resolve(Path(options.dir))
    key = CheckpointKey.read(options.checkpoint_key_file)
    manifest = verify(checkpoint, key)
    model_tensors(checkpoint, verify_files=False, key=key)  # check that no element is missing or duplicated
    total_bytes = sum(record.bytes for record in manifest.files.values())
    step = f"step {manifest.step}{' (its name has another step)' if is_misnamed(checkpoint, manifest.step) else ''}"
    signed = "" if key is None else ", signed"
    print(f"{checkpoint}: ok{signed}, {step}, {len(manifest.files)} files, {bytes_text(total_bytes)}")
    return 0


def _convert(argv: list[str]) -> int:
    parser = _parser("convert", "Rewrite a checkpoint: for Hugging Face, for another plan, or as a mixture.")
    parser.add_argument("out", metavar="OUT", help="new directory")
    parser.add_argument("--ranks", type=int, default=None, metavar="P", help="number of files (default: one)")
    parser.add_argument("--single", action="store_true", help="one file, model.safetensors (the default)")
    config_help = (
        "the model's config.json, or its directory (default: the checkpoint's own): write what transformers reads"
    )
    parser.add_argument("--config", metavar="DIR", default=None, help=config_help)
    plan_help = "plan file: the checkpoint as the processes of this plan would have saved it"
    parser.add_argument("--plan", metavar="FILE", default=None, help=plan_help)
    parser.add_argument("--checkpoint_key_file", metavar="FILE", default=None, help=_KEY_HELP)
    add_upcycle_options(parser)
    options = parser.parse_args(argv)
    if options.plan is not None:
        return print_resharded(options)
    if options.upcycle is not None:
        return print_upcycled(options)
    check_no_upcycling(options)
    if options.single and options.ranks not in (None, 1):
        raise InputError(f"--single and --ranks {options.ranks} contradict each other. Pass only one of them.")
    checkpoint, out, number = (
        resolve(Path(options.dir)),
        Path(options.out),
        1 if options.ranks is None else options.ranks,
    )
    key = CheckpointKey.read(options.checkpoint_key_file)
    config = has_configuration(checkpoint, key) if options.config is None else Path(options.config)
    if config is None:
        written = convert(checkpoint, out, number, key)
    else:
        from pipeloom.train.checkpoint.huggingface import convert_to_directory  # loads torch

        written = convert_to_directory(checkpoint, out, config, number, key)
    for path in written:
        print(f"{path}  {bytes_text(path.stat().st_size)}")
    return 0


def _parser(command: str, description: str) -> Parser:
    parser = Parser(f"pipeloom checkpoint {command}", description, examples=_EXAMPLES)
    parser.add_argument("dir", metavar="DIR", help=_DIR_HELP)
    return parser


def _describe(entry: CheckpointEntry) -> dict[str, Any]:
    """One row of `ls`. Checks the hash of the manifest and the sizes of the files; `verify` checks their content."""
    row: dict[str, Any] = {"step": entry.step, "path": str(entry.path), "bytes": entry.size_bytes}
    row |= {"ranks": None, "layout": None}
    if entry.path.name.startswith("."):
        return row | {"status": "partial"}
    try:
        manifest = read_manifest(entry.path)
    except CheckpointError:
        if not is_ours(entry.path):
            return row | {"status": "foreign"}
        return row | {"status": "damaged" if entry.complete else f"damaged: {SEAL_NAME}"}
    bad = missing_or_cut(entry.path, manifest)
    status = f"damaged: {bad}" if bad else f"renamed: of step {manifest.step}" if entry.step != manifest.step else "ok"
    return row | {"ranks": len(manifest.parts), "layout": manifest.layout, "status": status}


def _describe_one(checkpoint: Path) -> dict[str, Any]:
    manifest = read_manifest(checkpoint)
    tensors = [
        {
            "name": name,
            "dtype": tensor.source.dtype,
            "shape": list(tensor.source.shape),
            "bytes": tensor.source.size_bytes,
            "file": tensor.pieces[0].file,
            "pieces": [_described_piece(piece) for piece in tensor.pieces if piece.range is not None],
        }
        for name, tensor in model_tensors(checkpoint, verify_files=False).items()
    ]
    answer = {"path": str(checkpoint), "step": manifest.step, "ranks": len(manifest.parts), "layout": manifest.layout}
    return {**answer, "compute_type": manifest.compute_type, "ties": manifest.ties, "tensors": tensors}


def _described_piece(piece: Piece) -> list[Any]:
    """File, start and stop: numbers in the flattened tensor, or of a block one per dimension."""
    assert piece.range is not None
    start, stop = piece.range[:2]
    return [piece.file, *(list(each) if isinstance(each, tuple) else each for each in (start, stop))]


def _layout(row: dict[str, Any]) -> str:
    """`2 ranks, schedule 1f1b`: the number of ranks that wrote it, and the scalars of the layout."""
    if row["ranks"] is None:
        return "-"
    scalars = {key: value for key, value in row["layout"].items() if isinstance(value, str | int | float)}
    return ", ".join([f"{row['ranks']} ranks", *(f"{key} {scalars[key]}" for key in scalars if key != "ranks")])
