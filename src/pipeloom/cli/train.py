"""``pipeloom train``: from the words of the command line to a configuration, and from there to ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from pipeloom.cli.parser import Parser, did_you_mean
from pipeloom.errors import InputError, unwrapped
from pipeloom.plan.plan import Plan
from pipeloom.plan.train_options import options_of_plan
from pipeloom.train.config.train_config import TrainConfig, as_utf8, options

ENV_PREFIX = "PIPELOOM_"
_DESCRIPTION = """\
Train a GPT on text through a pipeline. Without options: a small model, two ranks, Python's own source code.

Options also come from the environment (PIPELOOM_MODEL__LAYERS=8) and from a YAML file (--config). A file counts less
than the environment, the environment less than an option. The output directory holds metrics.jsonl, config.yaml,
report.html, timeline.json.gz (for https://ui.perfetto.dev) and checkpoint-N/."""
_EXAMPLES = """
pipeloom train
pipeloom train --parallel.pipeline 4 --schedule gpipe --batch.size 64 --batch.microbatches 16
pipeloom train --parallel.data 2 --parallel.data_strategy zero2 --precision.dtype bf16
pipeloom train --data.path '/usr/share/doc/**/*.txt' --steps 1000 --output_dir runs/doc
pipeloom train --resume_from_checkpoint latest --output_dir runs/doc
pipeloom train --config runs/doc/config.yaml --seed 1 --output_dir runs/doc-seed1
torchrun --nproc-per-node 2 -m pipeloom train
"""


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key stands once: of two, the first would count for nothing without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(
                    f"the key in line {key.start_mark.line + 1} is no word; a key is one, such as steps"
                )
            if key.value in seen:
                raise yaml.YAMLError(f"key {key.value} stands twice, again in line {key.start_mark.line + 1}; drop one")
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def make_parser(prog: str = "pipeloom train", description: str = _DESCRIPTION, examples: str = _EXAMPLES) -> Parser:
    """The parser of ``pipeloom train``, or of a command with its options; keys are those of `TrainConfig`."""
    parser = Parser(prog, description, examples=examples, default_env=True, env_prefix=ENV_PREFIX[:-1])
    parser.may_be_empty = frozenset({"--sample_prompt"})
    parser.add_argument("--config", action="config", help="YAML file with these options")
    for key, kind, default, text in options():
        action = parser.add_argument(f"--{key}", type=kind, default=default, help=text)
        if kind is bool:  # `--local` alone means true
            action.nargs, action.const = "?", True
    return parser


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that config files < environment < flags give.

    Raises:
        SystemExit: code 2 after one line, where a key is unknown or a value is not of its type.
    """
    parser = make_parser()
    words = read_words(parser, argv)
    plain = [word for word in words if not word.startswith("--print_config")]
    config = read_config(parse_values(parser, plain))
    if plain != words:
        from pipeloom.train.config.validate import validate_settings

        validate_settings(config)
        parser.parse_args(words, env=False)  # prints and exits
    return config


def read_words(parser: Parser, argv: Sequence[str]) -> list[str]:
    """`argv` with config files in front, and the environment before what is given by hand.

    Raises:
        SystemExit: code 2 after one line, where a file or a variable is wrong.
    """
    files, flags = _take_config_files(parser, argv)
    for file in files:
        _check_keys_of_file(parser, file)
    environment = list(_from_environment(parser, os.environ))
    return [word for file in files for word in ("--config", file)] + environment + flags


def parse_values(parser: Parser, words: Sequence[str]) -> dict[str, Any]:
    """The values of all options, with those of the plan that ``--plan`` names.

    Raises:
        InputError: the plan cannot be read, or an option, a variable or a configuration file contradicts it.
    """
    values: dict[str, Any] = parser.parse_args(words, env=False).as_dict()
    path = values["plan"]
    if path is None:
        return values
    planned = options_of_plan(Plan.load(path), path)
    parser.set_defaults(planned)  # so that what is given beside the plan can be told from a default
    values = parser.parse_args(words, env=False).as_dict()
    for key, value in planned.items():
        group, _, name = key.rpartition(".")
        given = (values[group] if group else values)[name]
        if given != value:
            raise InputError(f"{key}={given}: plan {path} has {_text(value)}. Remove {key}, or make a plan with it.")
    return values


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def read_config(values: dict[str, Any]) -> TrainConfig:
    """The configuration among the values of a parser that `make_parser` made."""
    own = {key.partition(".")[0] for key, *_ in options()}
    mapping = {key: value for key, value in values.items() if key in own}
    mapping["sample_prompt"] = as_utf8(mapping["sample_prompt"])  # paths keep the bytes that the system knows them by
    return TrainConfig.from_mapping(mapping)


def _take_config_files(parser: Parser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take ``--config FILE`` out of `argv`, so that files can be read first wherever they stand."""
    files, flags = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            file = next(words, None)
            if file is None:
                parser.error("option --config needs a file: name one")
            files.append(file)
        elif word.startswith("--config="):
            files.append(word.partition("=")[2])
        else:
            flags.append(word)
    if not files and f"{ENV_PREFIX}CONFIG" in os.environ:
        files = [os.environ[f"{ENV_PREFIX}CONFIG"]]
    return files, flags


def _check_keys_of_file(parser: Parser, file: str) -> None:
    """Answer an unknown key of a YAML file with the nearest right one."""
    kinds = {key: kind for key, kind, *_ in options()}
    known = list(kinds)
    groups = {key.rpartition(".")[0] for key in known}
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):  # it may never end, or never come
        parser.error(f"configuration {file} is a device or a pipe: it is read several times; name a file")
    try:
        with open(file, encoding="utf-8") as stream:
            content = yaml.load(stream, _UniqueKeys)
        rows = list(_flat_keys(content, groups)) if isinstance(content, Mapping) else []
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: no UTF-8, no such date
        parser.error(f"configuration {file} cannot be read: {unwrapped(str(error))}; it must be a YAML file")
    if not rows:
        parser.error(f"configuration {file} holds no keys: write some, such as `steps: 100`")
    names = [key for key, _ in rows]
    for key, value in rows:
        if names.count(key) > 1:
            parser.error(f"configuration {file}: key {key} stands twice, nested and with a dot; drop one")
        if value == "" and f"--{key}" not in parser.may_be_empty:
            parser.error(f"configuration {file}: {key} has an empty value: give one, or leave it out")
        if value is None and type(None) not in get_args(kinds.get(key, None | int)):
            parser.error(f"configuration {file}: {key} is null: it needs a value; give one, or leave the key out")
        if isinstance(value, list):
            parser.error(
                f"configuration {file}: {key} is {value!r}: no key holds a list; write {','.join(map(str, value))}"
            )
        if key in groups:
            inside = next(name for name in known if name.startswith(f"{key}."))
            parser.error(f"configuration {file}: {key} is {value!r}: it holds keys such as {inside}; nest them")
        if key not in known:
            hint = did_you_mean(key, known) or "see `pipeloom train --print_config`"
            parser.error(f"configuration {file}: key {key} is unknown: {hint}")


def _flat_keys(content: Mapping[Any, Any], groups: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is no group with keys."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat_keys(value, groups, f"{key}.")
        else:
            yield key, value


def _from_environment(parser: Parser, environment: Mapping[str, str]) -> Iterator[str]:
    """``PIPELOOM_MODEL__LAYERS=8`` as ``--model.layers=8``; an unknown name is refused like a flag."""
    variables = {ENV_PREFIX + key.upper().replace(".", "__"): key for key in [key for key, *_ in options()]}
    for variable in sorted(environment):
        if variable in variables:
            if environment[variable] == "" and f"--{variables[variable]}" not in parser.may_be_empty:
                parser.error(f"environment variable {variable} has an empty value: give one, or unset it")
            yield f"--{variables[variable]}={environment[variable]}"
        elif variable.startswith(ENV_PREFIX) and variable != f"{ENV_PREFIX}CONFIG":
            hint = did_you_mean(variable, variables) or "see `pipeloom train --help`"
            parser.error(f"environment variable {variable} is unknown: {hint}")


def main(argv: Sequence[str]) -> int:
    """Check the configuration, then train: as one rank, as all ranks, or as the launcher of the ranks."""
    from pipeloom.processes import launcher

    member = launcher.membership(os.environ)
    with launcher.last_words(member):
        from pipeloom.train.config.data_parallel import process_names, settled
        from pipeloom.train.config.validate import validate

        config = settled(parse(argv), member.world_size if member else None)
        validate(
            config,
            world_size=member.world_size if member else None,
            locked=member is not None and member.black_box is not None,
        )
        if member is None and not config.local:
            from pipeloom.train.checkpoint.directory import clean
            from pipeloom.train.output.directory import in_use

            output_dir = Path(config.output_dir)
            with in_use(output_dir):
                try:
                    return launcher.launch(process_names(config), ["-m", "pipeloom", "train", *argv])
                finally:
                    clean(output_dir)  # of a save that the end cut short
        from pipeloom.train.loop import train

        train(config, member)
        if member is not None:
            launcher.leave(0)
    return 0
