"""`Plan`: what it refuses, what it says, and that its file reads back exactly."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.errors import InputError
from pipeloom.plan.plan import VERSION, Plan
from pipeloom.plan.train_options import options_of_plan

SIZES = {"schedule": "1f1b", "pipeline": 2, "microbatches": 4}
STREAM = {"schedule": "pipedream", "pipeline": 2, "microbatches": 1}
OWN = schedules.gpipe(num_ranks=2, num_microbatches=4)


@st.composite
def plans(draw):
    """Valid plans of every kind: named schedules, streams with replicas, slices, orders, and all memory options."""
    kind = draw(st.sampled_from(["flush", "virtual", "stream", "sliced", "orders"]))
    pipeline, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    chosen = {"pipeline": pipeline, "microbatches": microbatches}
    if kind == "flush":
        chosen["schedule"] = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "bfs"]))
    elif kind == "virtual":
        chosen |= {"schedule": "interleaved", "virtual_stages": draw(st.integers(1, 3)), "microbatches": pipeline}
    elif kind == "stream":
        replicas = draw(st.none() | st.lists(st.integers(1, 3), min_size=pipeline, max_size=pipeline))
        chosen |= {"schedule": "pipedream", "replicas": replicas}
        chosen["in_flight"] = draw(st.sampled_from([None, "noam", "full"]))
        chosen["weights"] = draw(st.sampled_from([None, "stash", "vertical"]))
    elif kind == "sliced":
        chosen |= {"schedule": draw(st.sampled_from(["seq1f1b", "terapipe"]))}
        chosen["slices"] = draw(st.integers(1, 4) | st.lists(st.integers(1, 99), min_size=1, max_size=4))
    else:
        chosen["schedule"] = schedules.zb_h1(num_ranks=pipeline, num_microbatches=microbatches)
    if kind != "stream":
        chosen["data"] = draw(st.integers(1, 3))
        chosen["precision"] = draw(st.sampled_from([None, "fp32", "bf16", "fp16"]))
        strategy = draw(st.sampled_from([None, "ddp", "zero1", "zero2", "zero3"]))
        chosen["data_strategy"] = strategy
        if strategy in ("zero2", "zero3"):
            chosen["data_granularity"] = draw(st.sampled_from([None, "step", "chunk", "microbatch"]))
        if strategy == "zero3":
            chosen |= {"offload": "disk:/somewhere", "offload_parameters": draw(st.booleans()), "offload_states": True}
    if draw(st.booleans()):
        chosen |= {"offload": "cpu", "offload_activations": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        chosen["tensor"], layout, depth = draw(st.sampled_from([(2, None, None), (4, "2d", None), (8, "2.5d", 2)]))
        chosen |= {"tensor_layout": layout, "tensor_depth": depth, "sequence": layout is None and draw(st.booleans())}
    if kind in ("flush", "virtual") and draw(st.booleans()):
        chosen |= {"context": 2, "context_kind": draw(st.sampled_from([None, "ring", "ulysses"]))}
    if chosen.get("data", 1) > 1 and chosen.get("tensor_layout") is None and draw(st.booleans()):
        chosen |= {"expert": chosen["data"], "expert_axes": draw(st.sampled_from([None, "data", "data,context"]))}
        chosen["expert_exchange"] = draw(st.sampled_from([None, "counts", "capacity"]))
    plan = Plan(**chosen)
    stages = plan.make_schedule().num_stages
    counts = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    seconds = st.floats(0, 1e9, allow_nan=False)
    return replace(
        plan,
        cut=draw(st.none() | st.sampled_from(["layers", "parameters", "time"]) | counts.map(tuple)),
        recompute=draw(st.none() | st.lists(st.sampled_from(["none", "full"]), min_size=stages, max_size=stages)),
        batch_size=draw(st.none() | st.integers(plan.microbatches * plan.data, 99)),
        predicted_step_seconds=draw(st.none() | seconds),
        predicted_memory_bytes=draw(st.none() | st.lists(seconds, min_size=plan.num_ranks, max_size=plan.num_ranks)),
        why=draw(st.lists(st.text(max_size=9), max_size=3)),
    )


@given(plans())
@settings(max_examples=80, deadline=None)
def test_a_plan_reads_back_exactly(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert json.loads(plan.to_json())["version"] == VERSION
    assert again.make_schedule() == plan.make_schedule()


@given(plans())
@settings(max_examples=50, deadline=None)
def test_a_plan_sets_options_that_train_has(plan):
    from pipeloom.train.config.option_list import options

    known = {key for key, *_ in options()}
    found = options_of_plan(plan, "plan.json")
    assert set(found) <= known
    assert not any(isinstance(value, tuple | list) for value in found.values())


def test_a_plan_is_saved_whole_and_loaded(tmp_path):
    plan = Plan(**SIZES, cut=[3, 3], why=["Layers are equal."])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan.load(str(tmp_path / "plan.json")) == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(OSError, match=r"nowhere"):
        plan.save(tmp_path / "nowhere" / "plan.json")


def test_values_that_are_left_out_take_the_defaults_of_the_schedule():
    assert Plan(**SIZES).virtual_stages == 1
    assert Plan(schedule="zb-v", pipeline=2, microbatches=4).virtual_stages == 2
    assert Plan(schedule="zb-v", pipeline=2, microbatches=4, recompute="full").recompute == ("full",) * 4
    assert Plan(**STREAM, replicas=[3, 1]).num_ranks == 4
    assert Plan(**SIZES, data=3).num_processes == 6
    assert Plan(**SIZES, data=3, tensor=4, tensor_layout="2d", context=2).num_processes == 48
    assert Plan(**{**SIZES, "schedule": OWN}).make_schedule() is OWN
    full = Plan(**STREAM, replicas=[3, 1], in_flight="full").make_schedule()
    length = schedules.steady_length([3, 1], in_flight="full")
    expected = schedules.pipedream(num_ranks=4, num_microbatches=length, replicas=[3, 1], in_flight="full")
    assert full == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 5}, "version=5: this pipeloom reads versions 1 to 4. Make the plan again with this"),
        ({"version": "1"}, "version='1': this pipeloom reads versions 1 to 4."),
        ({"version": True}, "version=True: this pipeloom reads versions 1 to 4."),
        ({"version": 1.0}, "version=1.0: this pipeloom reads versions 1 to 4."),
        ({"tensor": 2}, "the plan: unknown key 'tensor'. Remove it"),
        ({"version": 2, "expert": 2}, "the plan: unknown key 'expert'. Remove it"),
        (
            {"version": 3, "data": 4, "expert": 3},
            "expert=3: must divide the number of processes along data, 4. Use 1, 2",
        ),
        ({"version": 3, "order": "pp,dp,cp,tp"}, "the plan: unknown key 'order'. Remove it"),
        ({"version": 4, "order": "pp,dp"}, "order=pp,dp: must name dp, pp, cp, tp, outermost first, each once."),
        ({"version": 3, "expert_axes": "data"}, "expert_axes=data: has no effect with expert=1. Remove it, or raise"),
        (
            {"version": 3, "data": 2, "expert": 2, "tensor": 4, "tensor_layout": "2d"},
            "expert=2: works with tensor_layout='1d' alone, not '2d'.",
        ),
        ({"version": 2, "tensor": 0}, "tensor=0: must be at least 1"),
        ({"version": 2, "tensor_layout": "2d"}, "tensor_layout=2d: has no effect with tensor=1. Remove it, or raise"),
        ({"version": 2, "context_kind": "ring"}, "context_kind=ring: has no effect with context=1"),
        ({"version": 2, "tensor": 6, "tensor_layout": "2d"}, "tp=6 with layout 2d: must be a square q * q"),
        ({"version": 2, "tensor": 4, "tensor_layout": "4d"}, "Plan.tensor_layout='4d': must be one of 1d, 2d"),
        ({"version": 2, "tensor": 4, "tensor_depth": 2}, "tensor_depth=2: has no effect with tensor_layout='1d'"),
        (
            {"version": 2, "tensor": 4, "tensor_layout": "2d", "sequence": True},
            "sequence=True: works with tensor_layout='1d' alone, not '2d'. Remove it.",
        ),
        ({"version": 2, **STREAM, "context": 2}, "context=2: does not work with asynchronous schedule 'pipedream'"),
        (
            {"version": 2, "schedule": "seq1f1b", "slices": 2, "context": 2},
            "context=2: does not work with slices, which cut the sequence too",
        ),
        ({"pipeline": "2"}, "Plan.pipeline='2': must be an integer."),
        ({"pipeline": 2.5}, "Plan.pipeline=2.5: must be an integer."),
        ({"pipeline": True}, "Plan.pipeline=True: must be an integer."),
        ({"pipeline": 0}, "pipeline=0: must be at least 1"),
        ({"microbatches": -1}, "microbatches=-1: must be at least 1"),
        ({"data": 0}, "data=0: must be at least 1"),
        ({"schedule": "1f2b"}, "schedule '1f2b' is unknown"),
        ({"schedule": 7}, "Plan.schedule=7: must be a string, or a Schedule."),
        ({"schedule": {"name": "x"}}, "the schedule: missing keys 'num_microbatches', "),
        ({"schedule": "mine.csv"}, "schedule='mine.csv': a plan holds the orders"),
        ({"virtual_stages": 2}, "schedule '1f1b' has 1 stage per rank"),
        ({"slices": 3}, "schedule '1f1b' does not slice sequences"),
        ({"slices": [4, 0]}, "slices=4,0: each must be at least 1"),
        ({"slices": []}, "slices=: each must be at least 1"),
        ({"slices": 0}, "slices=0: each must be at least 1"),
        ({"replicas": [2, 1]}, "replicas=2,1: schedule '1f1b' flushes, so each stage has one rank. Remove replicas"),
        ({"in_flight": "full"}, "in_flight=full: schedule '1f1b' does not take it"),
        ({"in_flight": "most"}, "Plan.in_flight='most': must be one of noam, full"),
        ({"weights": "stash"}, "weights=stash: schedule '1f1b' does not take it"),
        ({"cut": [3, 2, 1]}, "cut=3,2,1: 3 stages, but schedule '1f1b' has 2"),
        ({"cut": [0, 0]}, "cut=0,0: a stage needs a layer"),
        ({"cut": [4, -1]}, "cut=4,-1: a stage needs a layer"),
        (
            {"cut": "blocks"},
            "cut='blocks': must be 'layers', 'parameters', 'time', or a list with the number of layers of each stage",
        ),
        ({"cut": [1, "2"]}, "Plan.cut[1]='2': must be an integer"),
        ({"recompute": ["full"]}, "recompute=('full',): a list needs one value per stage"),
        ({"recompute": "some"}, "recompute=('some', 'some'): must be none, selective, full"),
        ({"batch_size": 7, "data": 2}, "batch_size=7: 4 micro-batches on each of 2 data-parallel replicas need at le"),
        ({"data_strategy": "zero4"}, "strategy='zero4': unknown"),
        ({"data_strategy": "zero1", "data_granularity": "chunk"}, "granularity='chunk': strategy 'zero1' gathers"),
        ({"data_bucket_bytes": -1}, "data_bucket_bytes=-1: must be at least 0"),
        ({"precision": "fp8"}, "Plan.precision='fp8': must be one of fp32, bf16, fp16"),
        ({"precision": "fp16", "gradients": "same"}, "precision fp16 with gradients 'same'"),
        ({"offload_states": True}, "offload_states=True: no offload target. Add offload='cpu'."),
        ({"offload_activations": 0}, "offload_activations=0: no offload target"),
        ({"offload": "cpu"}, "offload='cpu': nothing is offloaded"),
        ({"offload": "gpu", "offload_states": True}, "offload='gpu': must be 'cpu' or 'disk:PATH'"),
        ({"offload": "cpu", "offload_parameters": True}, "offload_parameters=True: with ddp in fp32 every forward"),
        ({"predicted_step_seconds": float("nan")}, "predicted_step_seconds=nan: must be finite and at least 0"),
        ({"predicted_memory_bytes": [1.0]}, "predicted_memory_bytes has 1 rank, but the pipeline has 2"),
        ({"why": "because"}, "Plan.why='because': must be a tuple of strings"),
        ({**STREAM, "data": 2}, "data=2: does not work with asynchronous schedule 'pipedream'"),
        ({**STREAM, "precision": "bf16"}, "precision=bf16: does not work with asynchronous schedule 'pipedream'"),
        ({**STREAM, "replicas": [1, 1, 1]}, "replicas=1,1,1: 3 stages, but pipeline=2"),
        ({**STREAM, "replicas": [0, 1]}, "replicas=0,1: each must be at least 1"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(tmp_path, change, said):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, **SIZES, **change}))
    with pytest.raises(InputError) as error:
        Plan.load(path)
    assert str(error.value).startswith(f"plan {path}: ")
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipeline": 4}, "pipeline=4: the orders of schedule 'gpipe' have 2. Use pipeline=2."),
        ({"microbatches": 8}, "microbatches=8: the orders of schedule 'gpipe' have 4"),
        ({"virtual_stages": 2}, "virtual_stages=2: the orders of schedule 'gpipe' have 1"),
        ({"slices": 2}, "slices=2: schedule 'gpipe' has 1 slice"),
        ({"weights": "stash"}, "weights=stash: the orders of schedule 'gpipe' already say it"),
        ({"schedule": replace(OWN, orders=OWN.orders[::-1])}, "rank 0"),
    ],
)
def test_orders_that_do_not_fit_are_refused(change, said):
    with pytest.raises(InputError) as error:
        Plan(**{**SIZES, "schedule": OWN, **change})
    assert said in str(error.value)


def test_what_is_no_plan_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "plan.json"
    for content, said in (
        (b"{", "the plan is not valid JSON"),
        (b"[]", "the plan is []: must be an object"),
        (b"{}", "the plan: missing keys 'version', "),
        (b'{"version": 1, "version": 1}', "duplicate key 'version'"),
        (b"\xff\xfe", "not a text file"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError) as error:
            Plan.load(path)
        assert said in str(error.value)
        assert str(error.value).startswith(f"plan {path}: ")
        assert len(str(error.value).splitlines()) == 1
    with pytest.raises(InputError, match=r"plan .*missing.json: No such file or directory\. Name a readable plan file"):
        Plan.load(tmp_path / "missing.json")


def test_a_plan_explains_itself():
    plan = Plan(
        schedule="1f1b",
        pipeline=2,
        microbatches=4,
        data=2,
        cut=(4, 2),
        recompute=("full", "none"),
        data_strategy="zero3",
        predicted_step_seconds=0.25,
        predicted_memory_bytes=(2.0**30, 2.0**29),
        why=("Stage 1 has the head.", "Both ranks keep the cap."),
    )
    *rows, first, second = str(plan).splitlines()
    shown = dict(row.split(maxsplit=1) for row in rows)
    assert shown == {
        "schedule": "1f1b",
        "pipeline": "2",
        "microbatches": "4",
        "data": "2",
        "virtual_stages": "1",
        "cut": "4, 2",
        "recompute": "full, none",
        "data_strategy": "zero3",
        "tensor": "1",
        "context": "1",
        "expert": "1",
        "predicted_step_seconds": "250 ms",
        "predicted_memory_bytes": "1 GiB, 512 MiB",
    }
    assert set(shown) <= {field.name for field in fields(Plan)}
    assert [first, second] == ["- Stage 1 has the head.", "- Both ranks keep the cap."]
    assert str(Plan(**{**SIZES, "schedule": OWN})).splitlines()[0].split() == ["schedule", "gpipe"]
