"""Times and sizes of each layer of a model per minibatch: a JSON file.

    {"version": 1,
     "layers": [{"name": "embedding", "forward_seconds": 0.001, "backward_seconds": 0.002,
                 "activation_bytes": 1048576, "parameter_bytes": 786432}, ...],
     "ties": [{"bytes": 786432, "layers": [0, 13]}],
     "edges": [[0, 1], [1, 2], [0, 2]],
     "samples": 8}

`activation_bytes` is the size of the layer's output. A stage that ends there sends it, and receives a gradient of the
same size. `parameter_bytes` is the size of the weights alone. A layer may also have `kept_bytes`, the bytes that its
forward keeps for its backward. `ties` are weights shared by several layers, numbered from 0. They count in the
`parameter_bytes` of each layer, and a stage with several of these layers holds them once. `edges` are pairs of a layer
and a later one that reads its output; without them, each layer reads the one before it. `samples` is the number of
samples of the minibatch: replicas that split it get at least one each. `version`, `ties`, `edges` and `samples` are
optional.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
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
        kept_bytes: bytes that the forward keeps for the backward; None: unknown.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float
    parameter_bytes: float
    kept_bytes: float | None = None


_KEYS = tuple(field.name for field in fields(LayerProfile) if field.default is MISSING)
_KEPT = "kept_bytes"


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of a model in execution order.

    Attributes:
        layers: at least one.
        ties: weights that several layers share.
        samples: samples per minibatch, if known.
        edges: of a graph, (layer, later layer that reads its output); None: a chain.

    Raises:
        InputError: no layers, a negative or infinite number, ties of layers that do not exist, or an edge that does not
            lead to a later layer.
    """

    layers: tuple[LayerProfile, ...]
    ties: tuple[Tie, ...] = ()
    samples: int | None = None
    edges: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.samples is not None and self.samples < 1:
            raise InputError(f"the profile: samples={self.samples}: must be at least 1. Leave it out if unknown.")
        if not self.layers:
            raise InputError("the profile: layers=[]: a model needs at least one layer. Profile it again.")
        for number, layer in enumerate(self.layers):
            for key in (*_KEYS[1:], *([] if layer.kept_bytes is None else [_KEPT])):
                Entry(getattr(layer, key), "the profile", f"layers[{number}].{key}").number()
        for key in (*_KEYS[1:], _KEPT):
            total = sum(float(getattr(layer, key) or 0.0) for layer in self.layers)
            if total > MOST:
                raise InputError(f"the profile: {key} add up to {total:g}: must be at most {MOST:g}. Check the units.")
        for number, edge in enumerate(self.edges or ()):
            if not 0 <= edge[0] < edge[1] < len(self.layers):
                raise InputError(
                    f"the profile: edges[{number}]={folded(list(edge))}: must be a layer and a later layer, of 0 to "
                    f"{len(self.layers) - 1}. List layers in the order in which they run."
                )
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
        cls,
        rows: Iterable[tuple[Any, ...]],
        ties: Iterable[tuple[float, tuple[int, ...]]] = (),
        *,
        samples: int | None = None,
        edges: Iterable[tuple[int, int]] | None = None,
    ) -> Self:
        """The profile with these rows, in the order of `LayerProfile`, with ties and edges."""
        pairs = None if edges is None else tuple(edges)
        return cls(tuple(LayerProfile(*row) for row in rows), tuple(Tie(*tie) for tie in ties), samples, pairs)

    def reordered(self, order: Sequence[int]) -> Self:
        """The same layers in another order, in which every edge leads to a later layer."""
        at = {layer: position for position, layer in enumerate(order)}
        return replace(
            self,
            layers=tuple(self.layers[layer] for layer in order),
            ties=tuple(tie._replace(layers=tuple(sorted(at[layer] for layer in tie.layers))) for tie in self.ties),
            edges=None if self.edges is None else tuple((at[source], at[target]) for source, target in self.edges),
        )

    def to_json(self) -> str:
        """The text of a profile file; `parse_profile` reads it back exactly."""
        rows = [{key: each for key, each in asdict(layer).items() if each is not None} for layer in self.layers]
        data: dict[str, Any] = {"version": _VERSION, "layers": rows}
        if self.ties:
            data["ties"] = [dict(zip(_KEYS_OF_TIES, tie, strict=True)) for tie in self.ties]
        if self.edges is not None:
            data["edges"] = self.edges
        if self.samples is not None:
            data["samples"] = self.samples
        return json.dumps(data, indent=1)


def parse_profile(text: str) -> Profile:
    """Read the JSON of a profile file.

    Raises:
        InputError: invalid JSON or a wrong value; the message names the layer, the key and the rule.
    """
    form = ", ".join(f'"{key}": ...' for key in _KEYS)
    root = read_json(text, "the profile", f'{{"layers": [{{{form}}}, ...]}}')
    data = root.fields(("layers",), ("version", "ties", "edges", "samples"))
    if "version" in data and data["version"].whole() != _VERSION:
        data["version"].refuse(f"this release reads version {_VERSION}", "Profile the model again")
    layers = [layer.fields(_KEYS, [_KEPT]) for layer in data["layers"].members()]
    ties = [tie.fields(_KEYS_OF_TIES) for tie in data["ties"].members()] if "ties" in data else []
    edges = [[each.whole() for each in edge.members()] for edge in data["edges"].members()] if "edges" in data else None
    return Profile.of(
        (
            (layer["name"].text(), *(layer[key].number() for key in (*_KEYS[1:], _KEPT) if key in layer))
            for layer in layers
        ),
        ((tie["bytes"].number(), tuple(each.whole() for each in tie["layers"].members())) for tie in ties),
        samples=data["samples"].whole() if "samples" in data else None,
        edges=None if edges is None else map(tuple, edges),  # type: ignore[arg-type]
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
        return Profile.of(*profile_model(model, (tokens[0], tokens[1]), loss_fn=loss_fn), samples=batch)
