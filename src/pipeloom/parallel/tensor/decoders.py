"""Decoders of transformers under tensor parallelism: their plans, their heads, and where their blocks enter cut layers.

Their attention and MLP modules read their input several times (q, k, v; gate and up). f, or the gathering of tokens,
stands once in front of such a module: a hook on its forward.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import placed_block
from pipeloom.parallel.tensor.mixing import mixes_features
from pipeloom.parallel.tensor.one_d.linear import enter
from pipeloom.parallel.tensor.plan import Entry, entries_of

_ENTRANCES = ("self_attn", "attn", "mlp")  # modules of a block whose layers all read the module's input
_HIDDEN = "hidden_states"
# Kinds beside which all column layers of a module read its input.
_BESIDE = ("column", "column_gather", "row", "row_split", "sum_gradients", "whole", "tokens")


def plan_of(model: nn.Module) -> Mapping[str, Any]:
    """The plan that a model brings: its attribute `tensor_plan`, or that of transformers.

    Raises:
        InputError: it has none.
    """
    found = _own_plan(model)
    if found is not None:
        return found
    raise InputError(
        f"{type(model).__name__} has no plan of its own. Pass plan, such as {{'blocks.*.up': 'column', "
        "'blocks.*.down': 'row'}."
    )


def _own_plan(model: nn.Module) -> Mapping[str, Any] | None:
    for name in ("tensor_plan", "_tp_plan"):
        found = getattr(model, name, None)
        if found:
            return dict(found)
    return _gpt2_plan(model) if getattr(getattr(model, "config", None), "model_type", "") == "gpt2" else None


def own_patterns(model: nn.Module) -> set[str]:
    """The patterns of the plans that a model and its configuration bring; some match nothing in a given size."""
    config = getattr(model, "config", None)
    plans = [_own_plan(model), *(getattr(config, f"base_model_{axis}_plan", None) for axis in ("tp", "ep"))]
    return {pattern for plan in plans for pattern in plan or ()}


def with_own_sections(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """`entries`, where layers whose sections are not given have those of the model's own plan: fused q, k and v.

    Without sections, a fused layer would be cut in the middle of its keys.
    """
    plan = {name: kind for name, kind in (_own_plan(model) or {}).items() if isinstance(kind, tuple)}
    own = entries_of(model, plan) if plan else {}
    found = dict(entries)
    for name, entry in entries.items():
        if name in own and entry.sections is None and not entry.halves and entry.kind == own[name].kind:
            found[name] = entry._replace(sections=own[name].sections)
    return found


def _gpt2_plan(model: nn.Module) -> dict[str, Any]:
    """transformers has no plan for GPT-2, whose q, k and v are fused."""
    config: Any = model.config
    width, heads = config.n_embd, config.n_head
    return {
        "transformer.wte": "vocabulary",
        "transformer.h.*.attn.c_attn": ("column", ((width, heads),) * 3),
        "transformer.h.*.attn.c_proj": ("row", ((width, heads),)),
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
        "lm_head": "column_gather",
    }


def is_decoder(model: nn.Module) -> bool:
    """Whether it is a model of transformers."""
    own = any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)
    return own and getattr(model, "config", None) is not None


def adapted(model: nn.Module, entries: Mapping[str, Entry], *, sequence: bool) -> Mapping[str, Entry]:
    """`entries` with what the attention and MLP modules of a decoder of transformers need: heads, and one f for each.

    Raises:
        InputError: with `sequence`, the plan cuts some linear layers of a module and not all.
    """
    entries = _gathered_where_mixed(model, entries)
    found = {name: _with_rotary(model, name, entry) for name, entry in entries.items()}
    for name, module, inside in _entrances(model, entries):
        if "head_dim" in vars(module):
            _check_attention(module, name, inside)
            found.update(_by_heads(module, name, inside))
        if _enters(module, name, inside, sequence=sequence):
            for each in inside:
                found[each] = found[each]._replace(entered=True)
            # Other layers inside, such as activations with parameters, have all tokens: of all features or of a part.
            other = Entry("sum_gradients" if any(entry.kind == "column" for entry in inside.values()) else "whole")
            for each, child in module.named_modules():
                if each and not child._modules and f"{name}.{each}" not in entries:
                    found[f"{name}.{each}"] = other
    return found


def install(model: nn.Module, entries: Mapping[str, Entry], mesh: Mesh, *, sequence: bool) -> None:
    """Give attention and MLP modules, whose layers are cut by `entries`, their f and their own numbers of heads."""
    for _, module, inside in _entrances(model, entries):
        if any(entry.entered for entry in inside.values()):
            module.register_forward_pre_hook(_Entrance(mesh.axis("tp"), sequence=sequence), with_kwargs=True)
        if "head_dim" in vars(module) and any(entry.kind == "column" for entry in inside.values()):
            _divide_heads(module, mesh.degree("tp"))


def _gathered_where_mixed(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """`entries`, where layers around something that reads all their features at once gather them and share them again.

    transformers' plans name such layers themselves ("colwise_gather_output"), but not all.
    """
    found = dict(entries)
    modules = dict(model.named_modules())
    homes: dict[str, list[str]] = {}
    for name, entry in entries.items():
        if entry.kind in ("column", "row") and entry.sections is None and name in modules:
            homes.setdefault(name.rpartition(".")[0], []).append(name)
    for home, names in homes.items():
        module = modules[home]
        layers = {name.rpartition(".")[2]: found[name].kind for name in names if _is_linear(modules[name])}
        columns = [name for name, kind in layers.items() if kind == "column"]
        rows = [name for name, kind in layers.items() if kind == "row"]
        if _reads_all_heads(module, home, columns, entries) or mixes_features(module, columns, rows):
            for each, kind in layers.items():
                name = f"{home}.{each}" if home else each
                found[name] = Entry("column_gather" if kind == "column" else "row_split")
            for each, _ in module.named_children():  # norms see all features now
                if found.get(f"{home}.{each}", Entry("")).kind == "sum_gradients":
                    found[f"{home}.{each}"] = Entry("whole")
    return found


def _is_linear(module: nn.Module) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D")


def _reads_all_heads(module: nn.Module, name: str, columns: list[str], entries: Mapping[str, Entry]) -> bool:
    """Whether attention has a norm of all features of a column layer, or values per head that the plan leaves whole."""
    if "head_dim" not in vars(module):
        return False
    width = int(module.head_dim)  # type: ignore[arg-type]
    widths = {int(module.get_submodule(each).weight.shape[0]) for each in columns}  # type: ignore[index]
    norms = [child for child in module.children() if not child._modules and not _is_linear(child)]
    weights = [child._parameters.get("weight") for child in norms]
    own = [p for key, p in module._parameters.items() if f"{name}.{key}" not in entries]
    return _has_size(weights, widths - {width}) or _has_size(own, {each // width for each in widths})


def _has_size(parameters: Iterable[nn.Parameter | None], sizes: set[int]) -> bool:
    return any(p is not None and p.dim() == 1 and p.shape[0] in sizes for p in parameters)


def _with_rotary(model: nn.Module, name: str, entry: Entry) -> Entry:
    """An entry of the kind "latent" with its last outputs, the rotary keys of latent attention."""
    if entry.kind != "latent" or entry.sections is not None:
        return entry
    around: Any = model.get_submodule(name.rpartition(".")[0])
    config: Any = model.config
    size = vars(around).get("qk_rope_head_dim")  # layers may differ
    size = config.get_text_config().qk_rope_head_dim if size is None else size
    return entry._replace(sections=((int(size), 1),))


def _entrances(model: nn.Module, entries: Mapping[str, Entry]) -> Iterator[tuple[str, nn.Module, dict[str, Entry]]]:
    """Attention and MLP modules with column layers: name, module, and the entries inside."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _ENTRANCES:
            inside = {each: entry for each, entry in entries.items() if each.startswith(f"{name}.")}
            alone = all(entry.kind in _BESIDE for entry in inside.values())
            if alone and any(entry.kind.startswith("column") for entry in inside.values()):
                yield name, module, inside


def _check_attention(module: nn.Module, name: str, inside: Mapping[str, Entry]) -> None:
    """Raises InputError where some of q, k and v have a part of the heads, and not all."""
    missing = [each for each in _linears(module) if f"{name}.{each}" not in inside]
    missing = [each for each in missing if each in ("q_proj", "k_proj", "v_proj", "o_proj", "c_proj")]
    cut = [each for each, entry in inside.items() if entry.kind == "column"]
    if missing and cut:
        raise InputError(
            f"the plan cuts {cut[0]!r} between heads, and not {missing[0]!r} of the same attention, which would have "
            f"all heads. Add '{name}.{missing[0]}' to the plan."
        )


def _linears(module: nn.Module) -> list[str]:
    return [each for each, child in module.named_modules() if type(child).__name__ in ("Linear", "Conv1D")]


def _by_heads(module: nn.Module, name: str, inside: Mapping[str, Entry]) -> dict[str, Entry]:
    """Column entries of attention cut between heads; key heads may be shared."""
    width = int(module.head_dim)  # type: ignore[arg-type]
    found = {}
    for each, entry in inside.items():
        child = each.removeprefix(f"{name}.")
        keys = child in ("k_proj", "v_proj")
        if entry.kind != "column" or entry.sections is not None or not (keys or child == "q_proj"):
            continue
        rows = module.get_parameter(f"{child}.weight").shape[0]
        of_heads = (
            "k_proj" if child == "v_proj" and "k_proj" in module._modules else child
        )  # values may have other widths
        heads = module.get_parameter(f"{of_heads}.weight").shape[0] // width
        found[each] = entry._replace(sections=((rows, heads),), shares=keys)
    return found


def _divide_heads(module: Any, degree: int) -> None:
    """The numbers of heads that attention modules keep, as those of this process."""
    block = placed_block(getattr(module._modules.get("k_proj"), "weight", None))
    groups = vars(module).get("num_key_value_groups")
    if block is not None and groups:
        keys = block.full_shape[0] // int(module.head_dim)
        if keys < degree and degree % keys == 0:
            module.num_key_value_groups = groups * keys // degree
    for name in ("split_size", "num_heads", "num_key_value_heads"):
        if name in vars(module):
            setattr(module, name, max(1, getattr(module, name) // degree))


def _enters(module: nn.Module, name: str, inside: Mapping[str, Entry], *, sequence: bool) -> bool:
    """Whether f can stand in front of a module: all of its linear layers are cut."""
    missing = [each for each in _linears(module) if f"{name}.{each}" not in inside]
    if missing and sequence:
        raise InputError(
            f"sequence=True: the plan cuts a part of {name!r}, and not {missing[0]!r}, which would see all tokens on "
            "every rank. Add it to the plan."
        )
    return not missing


class _Entrance:
    """The hook: applies f, or gathers the tokens, to the hidden states that a module is called with."""

    def __init__(self, axis: Axis, *, sequence: bool) -> None:
        self._axis, self._sequence = axis, sequence

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[0], Tensor):
            return (enter(args[0], self._axis, sequence=self._sequence), *args[1:]), kwargs
        return args, {**kwargs, _HIDDEN: enter(kwargs[_HIDDEN], self._axis, sequence=self._sequence)}
