"""Times and sizes of each layer of a model per minibatch: a JSON file.

    {"version": 1,
     "layers": [{"name": "embedding", "forward_seconds": 0.001, "backward_seconds": 0.002,
                 "activation_bytes": 1048576, "parameter_bytes": 786432}, ...],
     "ties": [{"bytes": 786432, "layers": [0, 13]}]}

`activation_bytes` is the size of the layer's output. A stage that ends there sends it, and receives a gradient of the
same size. `parameter_bytes` is the size of the weights alone. `ties` are weights shared by several layers, numbered
from 0. They count in the `parameter_bytes` of each layer, and a stage with several of these layers holds them once.
`version` and `ties` are optional.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from pipeloom.common.field_types import check_fields
from pipeloom.common.json_reader import Entry, read_json
from pipeloom.errors import InputError, folded
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.split.chain_partition import Tie

_VERSION = 1
_KEYS_OF_TIES = ("bytes", "layers")
MOST = 1e100  # of any number: products of two are finite


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer on one minibatch.

    Attributes:
        name: shown in output.
        forward_seconds: seconds of the forward.
        backward_seconds: seconds of the full backward, for inputs and weights.
        activation_bytes: bytes of the output.
        parameter_bytes: bytes of the weights.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float
    parameter_bytes: float


_KEYS = tuple(field.name for field in fields(LayerProfile))


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of a model in execution order.

    Attributes:
        layers: at least one.
        ties: weights that several layers share.

    Raises:
        InputError: no layers, a negative or infinite number, or ties of layers that do not exist.
    """

    layers: tuple[LayerProfile, ...]
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.layers:
            raise InputError("the profile: layers=[]: a model needs at least one layer. Profile it again.")
        for number, layer in enumerate(self.layers):
            for key in _KEYS[1:]:
                Entry(getattr(layer, key), "the profile", f"layers[{number}].{key}").number()
        for key in _KEYS[1:]:
            total = sum(float(getattr(layer, key)) for layer in self.layers)
            if total > MOST:
                raise InputError(f"the profile: {key} add up to {total:g}: must be at most {MOST:g}. Check the units.")
        shared = [0.0] * len(self.layers)
        for number, (size, layers) in enumerate(self.ties):
            Entry(size, "the profile", f"ties[{number}].bytes").number()
            whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
            if not whole or len(layers) < 2 or list(layers) != sorted(set(layers) & set(range(len(shared)))):
                raise InputError(
                    f"the profile: ties[{number}].layers={folded(list(layers))}: must be two or more layers of 0 to "
                    f"{len(shared) - 1}, ascending. List each layer that shares the weights."
                )
            for each in layers:
                shared[each] += size
        for number, (layer, size) in enumerate(zip(self.layers, shared, strict=True)):
            if size > layer.parameter_bytes * (1 + 1e-9):  # sums of floats
                raise InputError(
                    f"the profile: layers[{number}].parameter_bytes={layer.parameter_bytes:.15g}: must be at least "
                    f"{size:.15g}, the bytes of the tied weights that list this layer. Raise parameter_bytes, or lower "
                    "`bytes` in ties."
                )

    @classmethod
    def of(
        cls, rows: Iterable[tuple[str, float, float, float, float]], ties: Iterable[tuple[float, tuple[int, ...]]] = ()
    ) -> Self:
        """From rows in the order of `LayerProfile`, and ties."""
        return cls(tuple(LayerProfile(*row) for row in rows), tuple(Tie(*tie) for tie in ties))

    def to_json(self) -> str:
        """The text of a profile file; `parse_profile` reads it back exactly."""
        data: dict[str, Any] = {"version": _VERSION, "layers": [asdict(layer) for layer in self.layers]}
        if self.ties:
            data["ties"] = [dict(zip(_KEYS_OF_TIES, tie, strict=True)) for tie in self.ties]
        return json.dumps(data, indent=1)


def parse_profile(text: str) -> Profile:
    """Read the JSON of a profile file.

    Raises:
        InputError: invalid JSON or a wrong value; the message names the layer, the key and the rule.
    """
    form = ", ".join(f'"{key}": ...' for key in _KEYS)
    root = read_json(text, "the profile", f'{{"layers": [{{{form}}}, ...]}}')
    data = root.fields(("layers",), ("version", "ties"))
    if "version" in data and data["version"].whole() != _VERSION:
        data["version"].refuse(f"this release reads version {_VERSION}", "Profile the model again")
    layers = [layer.fields(_KEYS) for layer in data["layers"].members()]
    ties = [tie.fields(_KEYS_OF_TIES) for tie in data["ties"].members()] if "ties" in data else []
    return Profile.of(
        ((layer["name"].text(), *(layer[key].number() for key in _KEYS[1:])) for layer in layers),  # type: ignore[misc]
        ((tie["bytes"].number(), tuple(each.whole() for each in tie["layers"].members())) for tie in ties),
    )


def measure_gpt(config: GPTConfig, *, batch: int, num_ranks: int) -> Profile:
    """Measure the profile of pipeloom's GPT on this machine; for other models use `Profile.of(*profile_model(...))`.

    Layers run on `batch` sequences, with the threads that one of `num_ranks` ranks gets here.

    Raises:
        InputError: `batch` is below 1.
    """
    import torch  # profiles from files need none

    from pipeloom.models import GPT, init_parameters, loss_fn
    from pipeloom.split import profile_model
    from pipeloom.split.profile import threads_of_a_rank

    if batch < 1:
        raise InputError(f"batch={batch}: must be at least 1 sequence.")
    with threads_of_a_rank(num_ranks), torch.random.fork_rng(devices=[]):
        model = GPT(config)
        init_parameters(model, seed=0)
        tokens = torch.randint(config.vocabulary_size, (2, batch, config.sequence_length))
        return Profile.of(*profile_model(model, (tokens[0], tokens[1]), loss_fn=loss_fn))
