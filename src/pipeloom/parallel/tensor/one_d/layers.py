"""Megatron's layout "1d": every layer is cut along one dimension (arXiv:1909.08053), and with sequence parallelism the
tokens between layers (arXiv:2205.05198).

    layer        without sequence            with sequence
    embedding    sum                         sum, scattered over tokens
    norms        all tokens                  S / t tokens: gradients are summed over ranks
    column       f ── part of the outputs    gather tokens ── part of the outputs
    row          part of the inputs ── g     part of the inputs ── sum, scattered over tokens
"""

from collections.abc import Mapping

from torch import nn

from pipeloom.errors import InputError
from pipeloom.parallel.expert.cutting import ExpertCutter, router_parameters
from pipeloom.parallel.expert.traffic import Exchange
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import Placed, placed
from pipeloom.parallel.tensor.layout import Layout, linear_parts, replace_module, split_dropouts
from pipeloom.parallel.tensor.one_d.cutting import Cutter, section_cut, sum_over_of
from pipeloom.parallel.tensor.one_d.linear import ColumnLinear, RowLinear
from pipeloom.parallel.tensor.one_d.logits import VocabularyHead
from pipeloom.parallel.tensor.one_d.parts import enter_last, share_input, sum_module
from pipeloom.parallel.tensor.one_d.vocabulary import LookUp, Vocabulary, VocabularyEmbedding, look_up_own_rows
from pipeloom.parallel.tensor.plan import Entry
from pipeloom.slicing.dropout_parts import DropoutParts
from pipeloom.transport.thread_members import ThreadMembers

_TP = ("tp",)


class OneD(Layout):
    """The layout "1d"; see the module.

    Args:
        mesh: whose axis tp has the ranks.
        sequence: whether layers between cut ones have a part of the tokens.
        exchange: how rows are sent to experts of other processes.
    """

    def __init__(self, mesh: Mesh, *, sequence: bool, exchange: Exchange = "counts") -> None:
        self.axis, self.sequence = mesh.axis("tp"), sequence and mesh.degree("tp") > 1
        self._threads = isinstance(mesh.members, ThreadMembers)
        self._cutter = Cutter(mesh)
        self._experts = ExpertCutter(mesh, self._cutter, sequence=sequence, exchange=exchange)

    def apply(self, model: nn.Module, entries: Mapping[str, Entry]) -> None:
        bare = dict(model.named_parameters(remove_duplicate=False))
        bare = {name: bare[name] for name in entries if name in bare}
        modules = {name: entry for name, entry in entries.items() if name not in bare}
        for name, entry in modules.items():  # before anything changes
            self._check(name, model.get_submodule(name), entry)
        for name, parameter in bare.items():
            self._parameter(model, name, parameter, entries[name])
        for name, entry in modules.items():
            module = model.get_submodule(name)
            match entry.kind:
                case "column":
                    replace_module(model, name, self._column(name, module, entry))
                case "column_gather":
                    replace_module(model, name, self._gathered_column(name, module, entry))
                case "row" | "row_split":
                    replace_module(model, name, self._row(name, module, entry))
                case "vocabulary":
                    self._vocabulary(model, name, module)
                case "sum_gradients":
                    self._sum_gradients(module)
                case "experts":
                    self._mixture(model, name, module)
                case "sum":
                    sum_module(module, self.axis)
                case "share":
                    share_input(module, self.axis)
                case "latent":
                    assert entry.sections is not None
                    enter_last(module, self.axis, entry.sections[-1][0])
        self._tie(model)
        if self.sequence:
            self._share_tokens(model, entries)
        if self.axis.degree > 1:
            self._share_dropouts(model, entries)

    def _check(self, name: str, module: nn.Module, entry: Entry) -> None:
        """Raises InputError where a layer cannot be cut."""
        if entry.kind == "experts":
            self._experts.check(name, module)
            return
        if self.sequence and entry.kind in ("sum", "latent"):
            raise InputError(
                f"plan has {name!r}: {entry.kind!r}, which reads all tokens of a sample. Use sequence=False."
            )
        if entry.kind not in ("column", "column_gather", "row", "row_split", "vocabulary"):
            return
        if entry.kind == "vocabulary" and _looks_up(module):
            return
        weight, _, transposed = linear_parts(name, module, entry.kind)
        if entry.kind in ("column", "row", "row_split"):
            dim = int(transposed) if entry.kind == "column" else int(not transposed)
            section_cut(name, weight.shape[dim], entry, _TP, self.axis.degree)

    # Layers

    def _parameter(self, model: nn.Module, name: str, parameter: nn.Parameter, entry: Entry) -> None:
        """A parameter that its module uses itself, such as one value per head."""
        if entry.kind not in ("column", "row"):
            raise InputError(f"plan has {name!r}: {entry.kind!r}: a parameter can be of kind 'column' or 'row' alone.")
        dim = parameter.dim() - 1 if entry.kind == "row" else max(0, parameter.dim() - 2)
        cut = section_cut(name, parameter.shape[dim], entry, _TP, self.axis.degree)
        owner, _, key = name.rpartition(".")
        block = self._cutter.block_of(parameter, Placed(tuple(parameter.shape), {dim: cut}), name)
        setattr(model.get_submodule(owner), key, block)

    def _column(self, name: str, module: nn.Module, entry: Entry) -> nn.Module:
        weight, bias, transposed = linear_parts(name, module, entry.kind)
        dim, degree = int(transposed), self.axis.degree
        cut = section_cut(name, weight.shape[dim], entry, _TP, degree)
        sums = sum_over_of(cut, degree)
        weight = self._cutter.block_of(weight, Placed(tuple(weight.shape), {dim: cut}, sums), f"{name}.weight")
        if bias is not None:
            bias = self._cutter.block_of(bias, Placed(tuple(bias.shape), {0: cut}, sums), f"{name}.bias")
        return ColumnLinear(
            weight, bias, transposed=transposed, axis=self.axis, sequence=self.sequence, entered=entry.entered
        )

    def _gathered_column(self, name: str, module: nn.Module, entry: Entry) -> nn.Module:
        """Outputs are joined again, so their number may be uneven."""
        weight, bias, transposed = linear_parts(name, module, entry.kind)
        outputs = Vocabulary(weight.shape[int(transposed)], self.axis)
        weight, bias = self._by_vocabulary(name, weight, bias, outputs, int(transposed))
        return ColumnLinear(
            weight,
            bias,
            transposed=transposed,
            axis=self.axis,
            sequence=self.sequence,
            entered=entry.entered,
            gathers=outputs.size,
        )

    def _row(self, name: str, module: nn.Module, entry: Entry) -> nn.Module:
        weight, bias, transposed = linear_parts(name, module, entry.kind)
        dim = int(not transposed)
        cut = section_cut(name, weight.shape[dim], entry, _TP, self.axis.degree)
        weight = self._cutter.block_of(weight, Placed(tuple(weight.shape), {dim: cut}), f"{name}.weight")
        if bias is not None and self.sequence:  # it is added to a part of the tokens
            bias = self._cutter.block_of(bias, Placed(tuple(bias.shape), sum_over=_TP), f"{name}.bias")
        splits = entry.kind == "row_split"
        return RowLinear(weight, bias, transposed=transposed, axis=self.axis, sequence=self.sequence, splits=splits)

    def _vocabulary(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """An embedding, or the last linear layer."""
        if _looks_up(module):
            self._embedding(model, name, module)
            return
        weight, bias, transposed = linear_parts(name, module, "vocabulary")
        vocabulary = Vocabulary(weight.shape[int(transposed)], self.axis)
        weight, bias = self._by_vocabulary(name, weight, bias, vocabulary, int(transposed))
        head = VocabularyHead(weight, bias, vocabulary, transposed=transposed, sequence=self.sequence)
        replace_module(model, name, head)

    def _embedding(self, model: nn.Module, name: str, module: nn.Module) -> None:
        table = module.weight
        assert isinstance(table, nn.Parameter)
        vocabulary = Vocabulary(len(table), self.axis)
        block, _ = self._by_vocabulary(name, table, None, vocabulary, 0)
        if not isinstance(module, nn.Embedding):  # pipeloom's own, which adds positions
            module.weight = block
            module.look_up = LookUp(vocabulary, sequence=self.sequence)  # type: ignore[assignment]
            if self.sequence:
                module.tokens_part = (self.axis.index, self.axis.degree)  # type: ignore[assignment]
            return
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise InputError(
                f"plan for {name!r}: an embedding with max_norm, scale_grad_by_freq or sparse cannot be cut. Turn "
                "these off."
            )
        look_up = LookUp(vocabulary, sequence=self.sequence, padding=module.padding_idx)
        if type(module).forward is nn.Embedding.forward:
            replace_module(model, name, VocabularyEmbedding(block, look_up))
        else:
            look_up_own_rows(module, block, look_up)
            for key, parameter in module.named_parameters():  # those of a norm behind it read the own rows alone
                if parameter is not block:
                    self._cutter.block_of(parameter, Placed(tuple(parameter.shape), sum_over=_TP), f"{name}.{key}")

    def _by_vocabulary(
        self, name: str, weight: nn.Parameter, bias: nn.Parameter | None, vocabulary: Vocabulary, dim: int
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        how = vocabulary.placed(tuple(weight.shape), dim, _TP)
        weight = self._cutter.block_of(weight, how, f"{name}.weight")
        if bias is not None:
            bias = self._cutter.block_of(bias, vocabulary.placed(tuple(bias.shape), 0, _TP), f"{name}.bias")
        return weight, bias

    def _sum_gradients(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._cutter.block_of(parameter, Placed(tuple(parameter.shape), sum_over=_TP), name)

    def _mixture(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """A layer of experts; shared experts are a column and a row layer."""
        self._experts.cut(name, module)
        up = getattr(module, "shared_up", None)
        if up is None or self.axis.degree == 1:
            return
        entry = Entry("column", halves=bool(getattr(module, "gated", False)))
        replace_module(model, f"{name}.shared_up", self._column(f"{name}.shared_up", up, entry))
        down = module.get_submodule("shared_down")
        replace_module(model, f"{name}.shared_down", self._row(f"{name}.shared_down", down, Entry("row")))

    # The rest of the model

    def _tie(self, model: nn.Module) -> None:
        """Cut modules that the plan does not name, but that hold a parameter of one that is cut: embeddings."""
        for name, module in list(model.named_modules()):
            for key, parameter in list(module._parameters.items()):
                block = None if parameter is None else self._cutter.made(parameter)
                if block is None or block is parameter:
                    continue
                if not _looks_up(module):
                    raise InputError(
                        f"module {name!r} ({type(module).__name__}) is not in the plan, and its parameter {key!r} is "
                        "tied to a layer that the plan cuts. Add it to the plan."
                    )
                self._embedding(model, name, module)

    def _share_tokens(self, model: nn.Module, entries: Mapping[str, Entry]) -> None:
        """Parameters that are not cut see a part of the tokens, so their gradients are parts."""
        if not any(isinstance(getattr(m, "look_up", None), LookUp) for m in model.modules()):
            raise InputError(
                "sequence=True: no embedding of the model is cut, so nothing shares the tokens out. Add the embedding "
                "to the plan as 'vocabulary', and the last layer as 'vocabulary' or 'column_gather'."
            )
        model.tokens_part = (self.axis.index, self.axis.degree)  # type: ignore[assignment]
        whole = {id(p) for n, e in entries.items() if e.kind == "whole" for p in model.get_submodule(n).parameters()}
        layers = {name: model.get_submodule(name) for name, entry in entries.items() if entry.kind == "experts"}
        whole |= set(map(id, router_parameters(layers)))
        for name, parameter in model.named_parameters():
            if placed(parameter) is None and id(parameter) not in whole:
                self._cutter.block_of(parameter, Placed(tuple(parameter.shape), sum_over=_TP), name)

    def _share_dropouts(self, model: nn.Module, entries: Mapping[str, Entry]) -> None:
        part = (self.axis.index, self.axis.degree)
        parents = {name.rpartition(".")[0] for name, entry in entries.items() if entry.kind == "column"}
        values = {1: part} if self.sequence else {}
        split_dropouts(model, DropoutParts(values, {1: part}, self._threads), attention=parents)


def _looks_up(module: nn.Module) -> bool:
    """Whether a module is an embedding: torch's, or one whose attribute `look_up` is called for its rows."""
    return isinstance(module, nn.Embedding) or hasattr(module, "look_up")
