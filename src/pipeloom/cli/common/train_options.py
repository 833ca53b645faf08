"""The options of `pipeloom train`, also those of `pipeloom memory`: plan < config file < environment < command line.

The dataclasses of `pipeloom.train.config` are the schema; jsonargparse reads, merges and type-checks the values. Two
things are done here, because jsonargparse does not: the environment overrides a config file wherever `--config` stands,
and a mistake in a file or a variable (a duplicate key, an unknown name, an empty value) is an error of one line
that names the place.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import yaml
from jsonargparse import Namespace

from pipeloom.cli.common.parser import Parser, did_you_mean, metavar_of
from pipeloom.errors import InputError, folded, shortened, unwrapped
from pipeloom.train.config.option_list import Option, options
from pipeloom.train.config.train_config import TrainConfig, as_utf8, flat

ENV_PREFIX = "PIPELOOM_"
ENV_RULE = """\
Options also come from a YAML file (--config FILE) and from environment variables: PIPELOOM_, the option in capitals
and __ for each dot, as in PIPELOOM_MODEL__LAYERS=8. The command line overrides the environment, the environment
overrides the file."""
MOST_USED = (
    "data.path",
    "model.layers",
    "model.width",
    "parallel.pipeline",
    "parallel.data",
    "schedule",
    "batch.size",
    "steps",
    "optimizer.learning_rate",
    "output_dir",
)
# In the help.
_TITLES = ("most used", "data", "model", "parallel", "batch", "optimizer", "memory", "output", "device", "faults")
_HELP_WIDTH = 74  # of the text behind an option, on a terminal of 120 columns
_GROUP, _AUTO = "--parallel", "auto"  # a group of options, and the value of all of it
_GROUP_VARIABLE = f"{ENV_PREFIX}PARALLEL"
_MOST_ALIASES = 16  # in a file of options
_MAY_BE_EMPTY = frozenset({"sample_prompt"})


def make_parser(prog: str, description: str, examples: str) -> Parser:
    """The parser of a command with the options of `pipeloom train`; keys are those of `TrainConfig`."""
    parser = Parser(prog, f"{description}\n\n{ENV_RULE}", examples=examples, add_help=False, print_config=None)
    parser.may_be_empty = frozenset(f"--{key}" for key in _MAY_BE_EMPTY)
    groups = {title: parser.add_argument_group(title) for title in _TITLES}
    groups["precision"] = groups["optimizer"]
    known = {option.key: option for option in options()}
    for key in dict.fromkeys((*MOST_USED, *known)):
        add_option(groups["most used" if key in MOST_USED else known[key].group], known[key])
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", action="config", metavar="FILE", help="YAML file with options")
    printed = "print the configuration as YAML and exit; skip_default: changes only"
    group.add_argument("--print_config", nargs="?", const="all", choices=("all", "skip_default"), help=printed)
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    return parser


def add_option(group: Any, option: Option) -> None:
    """Add an option of `pipeloom train` to a group of a parser."""
    shown, default = option.help_with_choices, f" (default: {option.default_text})"
    if len(shown + default) > _HELP_WIDTH:  # the reference has all choices
        some = shown[: _HELP_WIDTH - len(default) - 4].rpartition(", ")[0]
        shown = f"{some}, ..." if some else option.help
    text = shown + default
    shown = option.value or metavar_of(option.kind)
    action = group.add_argument(f"--{option.key}", type=option.kind, default=option.default, help=text, metavar=shown)
    if bool in (option.kind, *get_args(option.kind)):  # `--local` alone means true
        action.nargs, action.const = "?", True


def read_options(parser: Parser, argv: Sequence[str]) -> Namespace:
    """The options of `parser`: config files < environment < `argv`.

    Raises InputError for a wrong file or variable, SystemExit with code 2 and one line for a value of a wrong type.
    """
    files, flags = _take_config_files(parser, _of_groups(argv))
    layers = [(f"--config={file}: ", _read_file(file)) for file in files]
    given = None  # the options that were given, without defaults
    for parser.place, layer in [*layers, ("environment: ", _read_environment(os.environ))]:
        if layer:
            given = parser.parse_object(layer, namespace=given, env=False, defaults=False)
    parser.place = ""
    given = parser.parse_args(flags, namespace=given, env=False, defaults=False)
    if given.get("parallel.auto") and (pipeline := given.get("parallel.pipeline")) is not None:
        raise InputError(f"parallel.pipeline={pipeline}: --parallel auto chooses it. Remove one of them.")
    if (path := given.get("plan")) is not None:
        given = parser.parse_object(given, namespace=_read_plan(parser, path, given), env=False, defaults=False)
    values: Namespace = parser.get_defaults(skip_validation=True)
    values.update(given)
    return values


def _read_plan(parser: Parser, path: str, given: Namespace) -> Namespace:
    """The options of a plan; they override defaults alone. Raises InputError if a given option contradicts one."""
    from pipeloom.plan.plan import Plan
    from pipeloom.plan.train_options import options_of_plan

    planned: Namespace = parser.parse_object(options_of_plan(Plan.load(path), path), env=False, defaults=False)
    for key, value in planned.items():
        if key in given and given[key] != value:
            own, shown = ("none" if each is None else each for each in (given[key], value))
            raise InputError(
                f"{key}={own}: plan {path} has {shown}, and options must not contradict the plan. Remove {key}, or "
                "make a new plan."
            )
    return planned


def to_config(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration among the nested values of a parser that `make_parser` made."""
    own = {option.key.partition(".")[0] for option in options()}
    mapping = {key: value for key, value in values.items() if key in own}
    mapping["sample_prompt"] = as_utf8(mapping["sample_prompt"])  # paths keep the bytes that the system knows them by
    return TrainConfig.from_mapping(mapping)


def print_config(config: TrainConfig, asked: str) -> None:
    """Print `config` as the YAML of a config file: all of it, or with `asked` skip_default what differs."""
    mapping = config.to_mapping()
    if asked == "skip_default":
        mapping = difference(mapping, TrainConfig().to_mapping())
    print(yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True), end="")


def difference(mapping: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a nested mapping that differ from those of `other`."""
    return {
        key: difference(value, other[key]) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
        if value != other[key]
    }


class _UniqueKeys(yaml.SafeLoader):
    """YAML without duplicate keys; the default loader silently ignores the first of two.

    It has few aliases: with many, a small file can stand for gigabytes.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self._aliases += 1
            if self._aliases > _MOST_ALIASES:
                line = self.line + 1
                raise yaml.YAMLError(f"line {line}: more than {_MOST_ALIASES} aliases. Write the values out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(
                    f"line {line}: the key is a list or a mapping: a key must be a word, such as steps. Quote it, or "
                    "remove the brackets"
                )
            if key.value in seen:
                raise yaml.YAMLError(f"line {line}: key {shortened(key.value, 60)} is duplicated. Remove one")
            if key.tag != "tag:yaml.org,2002:merge":
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _of_groups(argv: Sequence[str]) -> list[str]:
    """``--parallel auto``, a value of a whole group, as the option that it stands for.

    Raises:
        InputError: another value.
    """
    found: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != _GROUP:
            found.append(word)
            continue
        value = value if equals else next(words, "")
        if value != _AUTO:
            raise InputError(f"{_GROUP}={value}: must be {_AUTO}, or an option of the group, such as {_GROUP}.data.")
        found.append(f"{_GROUP}.auto=true")
    return found


def _take_config_files(parser: Parser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take ``--config FILE`` out of `argv`."""
    files, flags = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            file = next(words, None)
            if file is None:
                parser.error("option --config needs a value: the path of a YAML file.")
            files.append(file)
        elif word.startswith("--config="):
            files.append(word.partition("=")[2])
        else:
            flags.append(word)
    variable = os.environ.get(f"{ENV_PREFIX}CONFIG")
    return [variable] if variable is not None and not files else files, flags


def _read_file(file: str) -> dict[str, Any]:
    """The options of a YAML file by dotted key; all of them exist and have a value."""
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):  # it may never end, or never come
        raise InputError(
            f"--config={file}: must be a file, not a device or a pipe. Write the YAML to a regular file and pass its "
            "path."
        )
    try:
        with open(file, encoding="utf-8") as stream:
            content = yaml.load(stream, _UniqueKeys)
        if isinstance(content, dict) and content.get("parallel") == _AUTO:
            content["parallel"] = {"auto": True}
        rows = list(flat(content)) if isinstance(content, Mapping) else []
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: no UTF-8, no such date
        raise InputError(f"--config={file}: cannot be read as YAML: {unwrapped(str(error))}.") from error
    if not rows:
        raise InputError(f"--config={file}: has no keys. Write some, such as `steps: 100`.")
    kinds = {option.key: option.kind for option in options()}
    names = [key for key, _ in rows]
    for key, value in rows:
        inside = next((name for name in kinds if name.startswith(f"{key}.")), None)
        if names.count(key) > 1:
            problem = f"key {key} is duplicated, nested and with a dot. Remove one."
        elif value == "" and key not in _MAY_BE_EMPTY:
            problem = f"{key} has an empty value. Give a value, or remove the key."
        elif value is None and type(None) not in get_args(kinds.get(key, None | int)):
            problem = f"{key}=null: must have a value. Give one, or remove the key."
        elif isinstance(value, list):
            written = shortened(",".join(map(str, value[:8])), 60)
            problem = f"{key}={folded(value)}: lists are unsupported. Write {written}."
        elif inside is not None:
            problem = f"{key}={folded(value)}: must hold keys, such as {inside}. Nest them."
        elif key not in kinds:
            hint = did_you_mean(key, kinds) or "see `pipeloom train --print_config`"
            problem = f"key {shortened(key, 60)} is unknown: {hint}"
        else:
            continue
        raise InputError(f"--config={file}: {problem}")
    return dict(rows)


def _read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The options among the variables by dotted key: ``PIPELOOM_MODEL__LAYERS=8`` is ``model.layers``."""
    variables = {ENV_PREFIX + key.upper().replace(".", "__"): key for key, *_ in options()}
    found = {}
    if environment.get(_GROUP_VARIABLE) == _AUTO:
        found["parallel.auto"] = "true"
    for variable in sorted(environment):
        own = variable == f"{ENV_PREFIX}CONFIG" or (variable == _GROUP_VARIABLE and "parallel.auto" in found)
        if not variable.startswith(ENV_PREFIX) or own:
            continue
        key = variables.get(variable)
        if key is None:
            hint = did_you_mean(variable, variables) or "see `pipeloom train --help`"
            raise InputError(f"environment variable {variable} is unknown: {hint}")
        if environment[variable] == "" and key not in _MAY_BE_EMPTY:
            raise InputError(f"environment variable {variable} has an empty value. Give a value, or unset it.")
        found[key] = environment[variable]
    return found
