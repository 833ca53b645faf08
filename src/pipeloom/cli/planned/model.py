"""The model of `pipeloom plan`: a GPT's sizes, a Hugging Face directory or configuration, or a named model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.planning import add_model_options as add_sizes
from pipeloom.cli.common.planning import given_model
from pipeloom.common.json_reader import load_json, parse_file
from pipeloom.errors import InputError, PipeloomError
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.huggingface_config import architecture_of, is_configuration
from pipeloom.plan.named_architectures import NAMED, find_architecture, parse_architecture
from pipeloom.plan.plan import Plan
from pipeloom.plan.search.answer import plan_of
from pipeloom.plan.search.simulated import Simulated
from pipeloom.train.config.planned import check_mesh, planned_config, reason_of
from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.config.train_config import TrainConfig

_OF_LENGTH = "model.sequence_length"
_TRAINED = get_args(get_type_hints(OptimizerConfig)["name"])  # optimizers that `pipeloom train` offers


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is planned for.

    Attributes:
        costs: of the model on its cluster.
        options: of `pipeloom train` that name the model, by dotted name; None where the command does not train it.
        forbidden: what its plans never have.
        ends_alone: whether embedding and head can be stages without a block.
        fixed: values that its plans have.
        can_run, accept: arguments of `find_plans`.
    """

    costs: StepCosts
    options: Mapping[str, Any] | None
    forbidden: frozenset[str]
    ends_alone: bool
    fixed: Mapping[str, Any]
    can_run: Callable[[Configuration], str | None]
    accept: Callable[[Simulated], str | None]


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        model: its sizes.
        options: of `pipeloom train` that name it, by dotted name; None where the command does not train it.
        check: raises InputError or ScheduleError where the runtime cannot run a plan of it.
    """

    model: Architecture
    options: Mapping[str, Any] | None
    check: Callable[[Plan], Any]


def add_model_options(parser: Parser) -> None:
    """Add ``--model.*`` and ``--vocabulary_size``."""
    group = parser.add_argument_group("model")
    option = group.add_argument
    files = "config.json of Hugging Face, or a model file"
    option("--model.config", type=str, metavar="FILE|NAME", help=f"{files}, or {', '.join(NAMED)}")
    option("--model.pretrained", type=str, metavar="DIR", help="Hugging Face directory to fine-tune")
    add_sizes(parser)
    group.add_argument("--vocabulary_size", type=int, help="vocabulary size (default: that of data.tokenizer)")


class Checks:
    """The rules of the runtime, asked of configurations before they are offered."""

    def __init__(self, costs: CostModel, model: PlannedModel) -> None:
        self._costs, self._model = costs, model
        self._known: dict[Configuration, str | None] = {}  # several searches ask the same

    def can_run(self, of: Configuration) -> str | None:
        """Why the model cannot run so; None: it can."""
        if of not in self._known:
            self._known[of] = self._why_not(of)
        return self._known[of]

    def accept(self, found: Simulated) -> str | None:
        """Why a plan cannot run; None: it can."""
        return self._why_not(found.of, found.schedule_limit)

    def forbidden(self) -> frozenset[str]:
        """What the model never has. Raises InputError where it cannot run at all."""
        blocks = (self._costs.num_blocks,)
        self._model.check(plan_of(self._costs, Configuration(blocks=blocks)))
        sliced = Configuration(schedule="seq1f1b", slices=2, blocks=blocks)
        return frozenset() if self._why_not(sliced) is None else frozenset({"slices"})

    @property
    def ends_alone(self) -> bool:
        """Whether embedding and head can be stages without a block."""
        stages = self._costs.num_blocks + 2
        return self._why_not(Configuration(pipeline=stages, blocks=(0, *[1] * (stages - 2), 0))) is None

    def _why_not(self, of: Configuration, limit: float | None = None) -> str | None:
        try:
            self._model.check(plan_of(self._costs, of, limit))
        except PipeloomError as error:
            return reason_of(error)
        return None


def planned_model(given: Mapping[str, Any], batch_size: int, optimizer: str) -> PlannedModel:
    """The model that the options name.

    Args:
        given: the options; those that are not given are None.
        batch_size: samples per step.
        optimizer: of the run.

    Raises:
        InputError: sizes that do not fit each other, a file that cannot be read, or options that exclude each other.
    """
    named = {name: given["model"].get(name) for name in ("config", "pretrained")}
    own = {key: value for key, value in given_model(given).items() if key.partition(".")[2] not in named}
    for source in (name for name, value in named.items() if value is not None):
        others = [key for key in own if key != _OF_LENGTH] + [f"model.{n}" for n in named if n != source and named[n]]
        if others:
            names = ", ".join(f"--{name}" for name in others)
            raise InputError(f"{names}: does not work with --model.{source}, which has all sizes. Remove one of them.")
    length = own.get(_OF_LENGTH)
    mapping: dict[str, Any] = {
        "batch": {"size": batch_size},
        "optimizer": {"name": optimizer} if optimizer in _TRAINED else {},
    }
    if named["config"] is not None:
        model = _sized(_of_file(named["config"]), length, given["vocabulary_size"])
        return PlannedModel(model=model, options=None, check=check_mesh)
    if named["pretrained"] is not None:
        words = {"pretrained": named["pretrained"], **({} if length is None else {"sequence_length": length})}
        config = TrainConfig.from_mapping({**mapping, "model": words})
        assert config.facts is not None
        model = architecture_of(config.facts.content, f"--model.pretrained={named['pretrained']}")
        model = _sized(model, config.model.sequence_length, given["vocabulary_size"])
        return PlannedModel(
            model=model,
            options={f"model.{name}": value for name, value in words.items()},
            check=lambda plan: planned_config(config, plan),
        )
    config = TrainConfig.from_mapping(
        {**mapping, "model": {key.partition(".")[2]: value for key, value in own.items()}}
    )
    return PlannedModel(
        model=Architecture.of_gpt(config.gpt(_vocabulary(given["vocabulary_size"], config))),
        options=own,
        check=lambda plan: planned_config(config, plan),
    )


def _vocabulary(given: int | None, config: TrainConfig) -> int:
    if given is None:
        from pipeloom.train.data.opening import run_tokenizer

        return run_tokenizer(config).vocabulary_size
    if given < 1:
        raise InputError(f"--vocabulary_size={given}: must be at least 1.")
    return given


def _of_file(name: str) -> Architecture:
    option = "--model.config"
    if name in NAMED or not name.endswith(".json"):
        return find_architecture(name, option)

    def read(text: str) -> Architecture:
        try:
            content = load_json(text)
        except ValueError as error:
            raise InputError(f"cannot be read as JSON ({error}).") from None
        if isinstance(content, Mapping) and is_configuration(content):
            return architecture_of(content, "the configuration")
        return parse_architecture(text)

    return parse_file(option, name, read, "config.json")


def _sized(model: Architecture, length: int | None, vocabulary: int | None) -> Architecture:
    """The model with another sequence length or vocabulary size; None: its own."""
    for name, value in ((_OF_LENGTH, length), ("vocabulary_size", vocabulary)):
        if value is not None and value < 1:
            raise InputError(f"--{name}={value}: must be at least 1.")
    return replace(
        model,
        sequence_length=length or model.sequence_length,
        vocabulary_size=vocabulary or model.vocabulary_size,
    )
