"""Models of transformers without a pipeline plan enter without glue: encoders, decoders, vision, speech, mamba."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

from tests.cpu.huggingface_kinds import KINDS, RUNS, difference

FEW = ("bert", "resnet", "deberta-v2", "t5", "whisper", "clip", "wav2vec2 (stable)", "mamba", "llava")


@pytest.mark.parametrize(("kind", "run"), [(kind, RUNS[index % 3]) for index, kind in enumerate(FEW)], ids=str)
def test_a_kind_trains_as_its_model_trains_itself(kind, run):
    assert difference(kind, [run]) <= 1e-12


@pytest.mark.whole_grid
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind):
    assert difference(kind) <= 1e-12
