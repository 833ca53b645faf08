"""Plans of tensor parallelism: which layers are cut, and how.

A plan maps patterns of module names to kinds. A ``*`` in a pattern stands for one part of a name.

    kind            layer                       what a process has
    column          linear                      a part of the outputs, from the whole input
    column_gather   linear                      the same; the whole output is gathered behind it
    row             linear                      a part of the inputs; outputs are summed
    row_split       linear                      the same, from the whole input, of which it takes its part
    vocabulary      embedding, or last linear   a part of the vocabulary; logits stay in parts (`VocabularyLogits`)
    sum_gradients   any                         all of it, on a part of the values: gradients are summed
    whole           any                         all of it, on the same values everywhere
    tokens          any                         all of it; with sequence parallelism on a part of the tokens
    experts         layer of experts            a part of the inner features of each expert, see `parallel.expert`
    sum             any                         parts of its parameters, as the plan says; results are summed
    share           any, inside of "sum"        all of it; it reads 1 / t of its input
    latent          linear                      all of it; its last outputs (rotary keys) enter the heads of all

A pattern may name a parameter that is in no linear layer, such as one value per head. Of the kind "column" it is cut
along its next-to-last dimension or its only one, of the kind "row" along its last.

Layers that no pattern matches are of the kind "tokens".

``(kind, sections)`` cuts a fused linear layer: sections of its outputs (of its inputs, for rows) are cut one by one.
A section is (size, heads): boundaries lie between heads. The first section has at least one head per process; of
later ones, processes may share a head (grouped queries). Layers whose sections the model's own plan has, such as qkv of
the GPT, need none. The plans of transformers, such as ``config.base_model_tp_plan``, are taken as they are.
"""

import re
from collections.abc import Container, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from torch import nn

from pipeloom.errors import InputError

KINDS = (
    *("column", "column_gather", "row", "row_split", "vocabulary", "sum_gradients", "whole", "tokens", "experts"),
    *("sum", "share", "latent"),
)
_OF_TRANSFORMERS = {
    "colwise": "column",
    "local_colwise": "column",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "packed_colwise": "column",
    "local_packed_colwise": "column",
    "rowwise": "row",
    "packed_rowwise": "row",
    "local_rowwise": "row",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "sum_gradients",
    "sequence_parallel": "tokens",
    "replicate": "whole",
    "local": "whole",
    "local_params": "whole",
    "moe_tp_experts": "sum",
    "all_reduce": "sum",
    "moe_identity_expert": "share",
    "mla_kv_a_proj": "latent",
    "ep_dispatch_experts": "experts",
    "grouped_gemm": "experts",
}
_PACKED = ("packed_colwise", "local_packed_colwise", "packed_rowwise")  # two halves of the outputs: gates and values

Sections = tuple[tuple[int, int], ...]


class Entry(NamedTuple):
    """How one module is cut.

    Attributes:
        kind: one of `KINDS`.
        sections: (size, heads) of each section of the cut dimension; None: one section of any boundaries.
        shares: whether processes may share the heads of the first section, too.
        halves: whether the cut dimension has two equal sections of any boundaries.
        entered: whether the module around it applies f, see `pipeloom.parallel.tensor.decoders`.
    """

    kind: str
    sections: Sections | None = None
    shares: bool = False
    halves: bool = False
    entered: bool = False


def entries_of(model: nn.Module, plan: Mapping[str, Any], *, optional: Container[str] = ()) -> dict[str, Entry]:
    """The modules and parameters of a model that a plan names, by name in the model's order.

    Patterns are full names, or relative to the base model of a model of transformers. Later patterns win.

    Args:
        model: the model.
        plan: patterns -> kinds.
        optional: patterns that need not match: a plan for all sizes of a family names modules that some lack.

    Raises:
        InputError: an unknown kind, malformed sections, or a pattern that matches nothing.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise InputError(f"plan={plan!r}: must map module names to kinds, such as {{'blocks.*.qkv': 'column'}}.")
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    prefix = str(getattr(model, "base_model_prefix", ""))
    found: dict[str, Entry] = {}
    for pattern, value in plan.items():
        if isinstance(value, Entry):
            entry = value
        else:
            entry = _entry(pattern, value)
        matched = _matched(pattern, names) or (_matched(f"{prefix}.{pattern}", names) if prefix else [])
        if not matched:
            matched = _matched(pattern, parameters) or (_matched(f"{prefix}.{pattern}", parameters) if prefix else [])
        if not matched and pattern not in optional:
            raise InputError(f"plan has {pattern!r}: no module has this name. {_nearest(pattern, names)}")
        found.update(dict.fromkeys(matched, entry))
    order = {name: index for index, name in enumerate((*names, *parameters))}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _matched(pattern: str, names: list[str]) -> list[str]:
    expression = re.compile(re.escape(str(pattern)).replace(r"\*", r"[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def _nearest(pattern: str, names: list[str]) -> str:
    general = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    close = get_close_matches(str(pattern), general, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Names are such as {', '.join(map(repr, general[:4]))}."


def _entry(pattern: str, value: Any) -> Entry:
    kind, sections = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    name = _OF_TRANSFORMERS.get(kind, kind) if isinstance(kind, str) else kind
    if name not in KINDS:
        known = f"{', '.join(KINDS)}, or transformers' {', '.join(_OF_TRANSFORMERS)}"
        raise InputError(f"plan has {pattern!r}: {kind!r}: a kind is one of {known}.")
    if sections is None:
        return Entry(name, halves=kind in _PACKED)
    pairs = all(
        isinstance(pair, tuple | list) and len(pair) == 2 and all(type(number) is int and number > 0 for number in pair)
        for pair in sections
    )
    if not pairs or not sections:
        raise InputError(f"plan has {pattern!r}: sections {sections!r} must be pairs (size, heads), such as (768, 12).")
    return Entry(name, tuple((int(size), int(heads)) for size, heads in sections))
