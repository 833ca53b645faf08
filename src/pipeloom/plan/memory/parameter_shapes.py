"""`ParameterShapes`: shapes of a transformer's parameters on one process of a stage. No torch here."""

from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture


class ParameterShapes:
    """Shapes of parameters on one process."""

    def __init__(self, model: Architecture, inside: InsideStage) -> None:
        self._model, self._inside = model, inside
        self._cut = inside.head_parts  # into how many blocks features inside blocks are cut
        grid = inside.grid
        self._width = model.width if grid is None else model.width // grid.side  # of vectors of the residual stream
        self._inputs = 1 if grid is None else grid.input_blocks
        self.table = (-(-model.vocabulary_size // self._cut), model.width // self._inputs)
        self.positions: dict[str, tuple[int, ...]] = {}
        if model.positions == "learned":
            self.positions = {"embedding.positions": (model.sequence_length, self._width)}

    @property
    def norm(self) -> dict[str, tuple[int, ...]]:
        has_bias = self._model.biases and self._model.norm == "layer"
        return dict.fromkeys(("weight", "bias") if has_bias else ("weight",), (self._width,))

    def block(self, *, experts: bool) -> dict[str, tuple[int, ...]]:
        model, cut = self._model, self._cut
        heads = model.heads // cut + 2 * self._inside.key_heads(model.key_heads)
        first, second = {"qkv": heads * model.head_width}, {"attention_out": model.attention_width}
        if not experts:
            first |= dict.fromkeys(("mlp_gate", "mlp_up") if model.gated else ("mlp_up",), model.mlp_width // cut)
            second["mlp_down"] = model.mlp_width
        grid = self._inside.grid is not None
        found: dict[str, tuple[int, ...]] = {}
        for name in ("attention_norm", "qkv", "attention_out", "mlp_norm", "mlp_gate", "mlp_up", "mlp_down"):
            if name.endswith("norm"):
                found |= {f"{name}.{part}": shape for part, shape in self.norm.items()}
                continue
            if name in first:
                shape = (first[name], model.width // self._inputs)
            elif name in second:
                shape = (self._width, second[name] // (self._inputs if grid else cut))
            else:
                continue
            found[f"{name}.weight"] = shape
            if model.biases:
                found[f"{name}.bias"] = shape[:1]
        return found | (self._experts() if experts else {})

    def _experts(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this process's experts, and of the router, which every process has in full."""
        sizes, width = self._model.experts, self._model.width
        assert sizes is not None
        found: dict[str, tuple[int, ...]] = {"experts.router.weight": (sizes.experts, width)}
        if sizes.router == "noisy-topk":
            found["experts.router.noise"] = (sizes.experts, width)
        here, inner = sizes.experts // self._inside.expert, sizes.expert_width // self._cut
        found["experts.gate_up" if sizes.gated else "experts.up"] = (here, (1 + sizes.gated) * inner, width)
        found["experts.down"] = (here, width, inner)
        if sizes.shared:
            found["experts.shared_up.weight"] = ((1 + sizes.gated) * sizes.shared * inner, width)
            found["experts.shared_down.weight"] = (width, sizes.shared * inner)
        return found
