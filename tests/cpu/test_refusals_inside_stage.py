"""What cannot be shared inside a stage is refused in one line, before anything changes and before ranks communicate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.models import GPT, loss_fn
from tests.cpu.tensor_cases import build, config, drawn, on_mesh

ATTENTION = {"blocks.*.up": "column", "blocks.*.down": "row"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Own(nn.Module):
    """A model that is none of pipeloom's."""

    layers = ("embedding", "blocks.*", "head")

    def __init__(self, width: int = 16, *, tied: bool = False, shared: bool = False, **embedding) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, width, **embedding)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 30, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if shared:
            self.blocks[1].up = self.blocks[0].up


def anatomy(model: nn.Module) -> list[object]:
    """Everything that cutting changes: modules, their attributes and hooks, parameters."""
    found: list[object] = []
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = {key: len(value) if isinstance(value, dict) else id(value) for key, value in vars(module).items()}
        found.append((name, id(module), attributes))
    found += [(name, id(p), p.shape, sorted(vars(p))) for name, p in model.named_parameters(remove_duplicate=False)]
    return found


def refused(said: str, model: nn.Module, *arguments, **settings) -> None:
    before = anatomy(model)
    with pytest.raises(InputError, match=said) as error:
        pl.parallelize(model, *arguments, **settings)
    assert "\n" not in str(error.value)
    assert anatomy(model) == before


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_a_refused_model_stays_as_it_was(sequence):
    """Also where the last layers are what cannot be cut, and where embeddings are found through a tie."""

    def work(mesh):
        words = {**ATTENTION, "embedding": "vocabulary"}
        refused("max_norm", Own(max_norm=1.0), mesh, words, sequence=sequence)
        refused("module 'head' .* is not in the plan", Own(tied=True), mesh, words, sequence=sequence)
        refused("cuts in another way", Own(tied=True), mesh, {**words, "head": "row"}, sequence=sequence)
        refused("max_norm", Own(tied=True, max_norm=1.0), mesh, {**ATTENTION, "head": "vocabulary"}, sequence=sequence)
        refused(r"'blocks\.1\.up' .*tied", Own(shared=True), mesh, {"blocks.0.up": "column", "blocks.0.down": "row"})
        if sequence:
            refused("no embedding of the model is cut", Own(), mesh, ATTENTION, sequence=True)
        model = drawn(Own())
        pl.parallelize(model, mesh, {**words, "head": "vocabulary"}, sequence=sequence)  # the mesh works on

    on_mesh(work, tp=2)


def test_a_mesh_works_on_after_a_grid_was_refused():
    def work(mesh):
        refused("embedding embedding has padding_idx", Own(padding_idx=0), mesh, WORDS, layout="2d")
        refused("type BatchNorm1d", nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), mesh, {"1": "row"}, layout="2d")
        pl.parallelize(drawn(GPT(config())), mesh)

    on_mesh(work, tp=4)


WORDS = {**ATTENTION, "embedding": "vocabulary", "head": "vocabulary"}


def test_one_mesh_has_one_layout():
    def work(mesh):
        pl.parallelize(drawn(GPT(config())), mesh, layout="2d")
        refused(r"divided into tp_row x tp_column for another model: .*Make another Mesh", GPT(config()), mesh)
        refused(r"sequence='no': must be True or False", GPT(config()), mesh, sequence="no")

    on_mesh(work, tp=4)


def test_decoders_of_transformers_are_cut_whole_and_along_one_dimension():
    from tests.cpu.test_huggingface import build

    models = {kind: [build(kind) for _ in range(4)] for kind in ("llama", "gpt2")}

    def work(mesh):
        for kind, name in (("llama", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel")):
            refused(rf"{name} with layout='2d': decoders .* layout '1d' alone", models[kind].pop(), mesh, layout="2d")

    on_mesh(work, tp=4)
    models = {kind: [build(kind) for _ in range(4)] for kind in ("llama", "gpt2")}

    def partly(mesh):
        for kind, query, other in (
            ("llama", "model.layers.*.self_attn.q_proj", "k_proj"),
            ("gpt2", "transformer.h.*.attn.c_attn", "c_proj"),
        ):
            for settings in ({}, {"sequence": True}):
                refused(
                    rf"and not '{other}' of the same attention", models[kind].pop(), mesh, {query: "column"}, **settings
                )

    on_mesh(partly, tp=2)


def test_a_pipeline_needs_the_mesh_that_the_model_was_cut_for():
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=1)

    def work(mesh):
        model = pl.parallelize(drawn(GPT(config())), mesh)
        here = mesh.coordinate("tp")
        with pytest.raises(InputError, match=rf"cut for place tp {here} of 2, .*has tp 0 of 1 for this process\."):
            pl.Pipeline(model, schedule, loss_fn=loss_fn)
        with pl.Mesh(dp=2) as other, pytest.raises(InputError, match=r"mesh=dp 2: the model was cut for place tp"):
            pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=other)

    on_mesh(work, tp=2)


def test_eager_attention_is_refused_before_context_parallel_ranks_communicate():
    from tests.cpu.test_huggingface import build

    models = [build("llama", attn_implementation="eager") for _ in range(2)]
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=1)

    def work(mesh):
        with pytest.raises(InputError, match=r"has attn_implementation='eager', which context parallelism does not"):
            pl.Pipeline(models.pop(), schedule, loss_fn=loss_fn, mesh=mesh)

    on_mesh(work, cp=2)


def stepping(mesh: pl.Mesh, model: nn.Module, said: str, shape: tuple[int, int], good: tuple[int, int], **options):
    """A step with token ids of `shape` is refused with nothing sent inside stages; one with `good` runs."""
    family, pipe_options = options.pop("family", "1f1b"), options
    sliced = {"num_slices": len(options["slices"])} if "slices" in options else {}
    schedule = pl.schedules.build(family, num_ranks=1, num_microbatches=2, **sliced)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh, **pipe_options) as pipe:
        mesh.meter.traffic.clear()
        for run in (pipe.step, pipe.evaluate):
            tokens = torch.zeros(shape, dtype=torch.long)
            with pytest.raises(InputError, match=said) as error:
                run(tokens, tokens)
            assert "\n" not in str(error.value)
        assert not mesh.meter.traffic
        tokens = torch.zeros(good, dtype=torch.long)
        pipe.step(tokens, tokens)
        assert mesh.meter.traffic


@pytest.mark.parametrize(
    ("layout", "tp", "depth", "said"),
    [
        ("2d", 4, None, r"micro-batch size=3 with layout 2d \(2 x 2\): must be a multiple of 2\. Use 2 or 4"),
        ("2.5d", 8, 2, r"micro-batch size=3 with layout 2\.5d \(2 x 2 x 2\): must be a multiple of 4\. Use 4"),
        ("3d", 8, None, r"micro-batch size=3 with layout 3d \(2 x 2 x 2\): must be a multiple of 4\. Use 4"),
    ],
)
def test_samples_that_a_grid_cannot_share_are_refused_before_ranks_communicate(layout, tp, depth, said):
    good = (4 if layout == "2d" else 8, 12)
    on_mesh(
        lambda mesh: stepping(
            mesh, pl.parallelize(build(config()), mesh, layout=layout, depth=depth), said, (6, 12), good
        ),
        tp=tp,
    )


def test_tokens_that_ranks_cannot_share_are_refused_before_they_communicate():
    def cut(mesh):
        return pl.parallelize(build(config()), mesh, sequence=True)

    said = "a sequence or slice of 11 tokens with sequence parallelism on 2 tensor-parallel ranks: .* Use 10 or 12"
    on_mesh(lambda mesh: stepping(mesh, cut(mesh), said, (2, 11), (2, 12)), tp=2)
    sliced = {"family": "seq1f1b", "slices": [6, 6]}
    said = "a sequence or slice of 5 tokens with sequence parallelism on 2 .* Use 4 or 6"
    on_mesh(lambda mesh: stepping(mesh, cut(mesh), said, (2, 10), (2, 12), **sliced), tp=2)
    said = r"a sequence or slice of 10 tokens .* on tp=2 and cp=2: .* multiple of 4\. Use 8 or 12"
    on_mesh(lambda mesh: stepping(mesh, cut(mesh), said, (2, 10), (2, 12), context="ring-plain"), tp=2, cp=2)


def heads_refused(mesh: pl.Mesh, model: nn.Module, said: str) -> None:
    mesh.meter.traffic.clear()
    with pytest.raises(InputError, match=said) as error:
        pl.Pipeline(model, SCHEDULE, loss_fn=loss_fn, mesh=mesh, context="ulysses")
    assert "\n" not in str(error.value)
    assert not mesh.meter.traffic


SCHEDULE = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=1)


def test_heads_that_ulysses_cannot_divide_are_refused_with_the_pipeline():
    from tests.cpu.test_huggingface import build as decoder

    def gpt(mesh):
        heads_refused(mesh, build(config()), "4 query heads and 4 key heads on cp=3: .* Use cp=1, 2 or 4")
        heads_refused(mesh, build(config(kv_heads=2)), "with 4 query heads and 2 key heads on cp=3")
        heads_refused(mesh, models.pop(), "attention with 4 query heads and . key heads on cp=3")
        pl.Pipeline(build(config(width=24, heads=6)), SCHEDULE, mesh=mesh, context="ulysses").close()
        pl.Pipeline(build(config()), SCHEDULE, mesh=mesh).close()  # ring divides no heads

    for kind in ("llama", "gpt2"):
        models = [decoder(kind) for _ in range(3)]
        on_mesh(gpt, cp=3)

    def cut(mesh):  # heads of one tensor-parallel rank
        for keys in (4, 1):
            model = pl.parallelize(build(config(kv_heads=keys)), mesh)
            heads_refused(mesh, model, f"attention with 2 query heads and {-(-keys // 2)} key heads on cp=4")
        heads_refused(mesh, pl.parallelize(models.pop(), mesh), "attention with 2 query heads and . key heads on cp=4")

    for kind in ("llama", "gpt2"):
        models = [decoder(kind) for _ in range(8)]
        on_mesh(cut, tp=2, cp=4)


def test_attention_dropout_is_refused_before_context_parallel_ranks_communicate():
    from tests.cpu.test_huggingface import build as decoder

    said = r"dropout of attention weights with probability 0\.1: context parallelism does not support it"
    tokens = torch.zeros(1, 12, dtype=torch.long)

    def loss_of(output, targets):
        return loss_fn(getattr(output, "logits", output), targets)

    def work(mesh):
        for model in (build(config(dropout=0.1)), *models.pop()):
            with pl.Pipeline(model, SCHEDULE, loss_fn=loss_of, mesh=mesh) as pipe:
                pipe.train()
                mesh.meter.traffic.clear()
                with pytest.raises(InputError, match=said):
                    pipe.step(tokens, tokens)
                assert not mesh.meter.traffic
                pipe.evaluate(tokens, tokens)
                pipe.eval()
                pipe.step(tokens, tokens)

    rates = {"llama": {"attention_dropout": 0.1}, "gpt2": {"attn_pdrop": 0.1}}
    models = [[decoder(kind, **rate) for kind, rate in rates.items()] for _ in range(2)]
    on_mesh(work, cp=2)
