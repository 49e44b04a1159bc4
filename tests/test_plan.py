"""The plan: a value with a text form and JSON both ways, which cannot be wrong."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshloom.core.errors import PlanError
from meshloom.core.mesh import Mesh
from meshloom.core.plan import Plan
from meshloom.core.plan_shares import chunk_sizes
from meshloom.core.precisions import PRECISIONS
from meshloom.core.units import parse_bytes

counts = st.integers(1, 10**6)
patterns = st.from_regex(r"[a-z*][a-z0-9_.*]{0,8}", fullmatch=True)
placements = st.sampled_from(
    ["column", "row", "vocabulary", "heads", "channels", "experts", "replicated", "dim0", "dim12"]
)
plans = st.builds(
    Plan,
    dp=counts,
    tp=st.integers(2, 10**6),
    tp_placements=st.dictionaries(patterns, placements, max_size=3),
    microbatches=counts,
    zero=st.integers(0, 1),
    offload=st.sampled_from(["none", "optimizer"]),
    overlap=st.booleans(),
    bucket_bytes=counts,
    keyed_draws=st.booleans(),
    memory_bytes=st.integers(0, 10**15),
    recompute=st.sampled_from(["none", "full", "selective"]),
    precision=st.sampled_from([*PRECISIONS]),
    compile=st.sampled_from(["none", "true"]),
)
pipelines = st.builds(
    Plan,
    dp=counts,
    pp=st.integers(2, 10**6),
    microbatches=counts,
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "found"]),
) | st.lists(patterns, min_size=1, max_size=4).map(lambda cuts: Plan(pp=len(cuts) + 1, cuts=tuple(cuts)))
shares = st.floats(0.0, 1.0, exclude_min=True)
several = st.integers(2, 10**6)
exchanges = st.one_of(
    st.builds(Plan, dp=several, exchange=st.just("server"), servers=st.integers(1, 2), overlap=st.booleans()),
    st.builds(
        Plan,
        dp=several,
        exchange=st.just("ring"),
        zero=st.integers(0, 1),
        sync_batch_norm=st.booleans(),
    ),
    st.builds(
        Plan,
        dp=several,
        exchange=st.just("ring"),
        compress=st.sampled_from(["none", "bf16", "topk:0.1"]),
    ),
    st.builds(
        Plan,
        dp=counts,
        exchange=st.just("async"),
        servers=counts,
        staleness=st.none() | counts,
        rate_by_age=st.booleans(),
    ),
    st.builds(
        Plan,
        dp=several,
        zero=st.integers(0, 3),
        reduce=st.sampled_from(["own", "float32", "bf16"]),
        precision=st.sampled_from(["float32", "fp16-mixed"]),
    ),
    st.builds(Plan, dp=several, exchange=st.just("local_sgd"), local_steps=counts),
    st.builds(
        Plan,
        dp=several,
        exchange=st.just("diloco"),
        local_steps=counts,
        outer_learning_rate=st.floats(0, 10, exclude_min=True),
        outer_momentum=st.floats(0, 1, exclude_max=True),
    ),
    st.builds(
        Plan,
        dp=several,
        compress=st.sampled_from(["bf16", "powersgd"])
        | counts.map("powersgd:{}".format)
        | shares.map("topk:{}".format),
    ),
)
within = st.tuples(counts, st.integers(2, 4)).map(
    lambda each: Plan(dp=each[0] * each[1], zero=3, zero_within=each[1])
)
divided = (
    st.lists(st.integers(0, 10**6), min_size=2, max_size=6)
    .filter(any)
    .map(lambda each: Plan(dp=len(each), shares="+".join(map(str, each))))
)
interleaved = st.builds(
    Plan, pp=st.integers(2, 9), schedule=st.just("interleaved"), virtual_stages=st.integers(2, 9)
)


def test_every_setting_is_a_field_with_a_default():
    assert all(
        dataclasses.replace(Plan(), **{field.name: field.default}) == Plan()
        for field in dataclasses.fields(Plan)
    )


@given(plans | pipelines | interleaved | exchanges | divided | within)
@pytest.mark.long
def test_text_and_back_is_the_same_plan(plan: Plan):
    assert Plan.parse(str(plan)) == plan


@given(plans | pipelines | interleaved | exchanges | divided | within)
@pytest.mark.long
def test_json_and_back_is_the_same_plan(plan: Plan):
    assert Plan.from_json(json.dumps(plan.to_dict())) == plan


@given(plans | exchanges | divided, plans | exchanges | divided)
@pytest.mark.long
def test_plans_have_one_text_each(plan: Plan, other: Plan):
    assert (str(plan) == str(other)) == (plan == other)


def test_defaults_are_left_out_of_the_text_except_dp():
    assert str(Plan()) == "dp=1"
    assert str(Plan(zero=1, overlap=False)) == "dp=1,zero=1,overlap=false"


def test_spaces_around_settings_do_not_matter():
    assert Plan.parse(" dp = 4 , microbatches=2 ") == Plan(dp=4, microbatches=2)


def test_a_plan_knows_its_ranks_and_chunks():
    plan = Plan(dp=4, microbatches=3)
    assert plan.mesh == Mesh(dp=4)
    assert plan.num_chunks == 12


def test_a_text_that_is_no_json_is_one_sentence():
    with pytest.raises(PlanError, match=r"^This plan is not JSON: "):
        Plan.from_json("{")


def test_placements_are_a_value():
    plan = Plan(tp=2, tp_placements={"head": "vocabulary", "blocks.*.up": "column"})
    assert str(plan) == "dp=1,tp=2,tp_placements=blocks.*.up:column+head:vocabulary"
    other = Plan.from_json('{"tp": 2, "tp_placements": {"blocks.*.up": "column", "head": "vocabulary"}}')
    assert other == plan and hash(other) == hash(plan)
    assert plan != dataclasses.replace(plan, tp_placements={"head": "vocabulary"})
    assert pickle.loads(pickle.dumps(plan)) == plan
    for wrong in (3, {"up": 2}, {"a b": "row"}, {"a+b": "row"}):
        with pytest.raises(PlanError, match=r"tp_placements=.* must be "):
            Plan.from_dict({"tp": 2, "tp_placements": wrong})


def test_sync_batch_norm_needs_a_sample_in_every_chunk():
    plan = Plan(dp=4, microbatches=2, sync_batch_norm=True)
    plan.check_batch(8)
    with pytest.raises(
        PlanError,
        match=r"^A batch of 7 samples cannot fill 8 chunks \(dp=4 x microbatches=2\), and sync_batch_norm needs a sample in each\. ",
    ):
        plan.check_batch(7)
    Plan(dp=4, microbatches=2).check_batch(1)  # elsewhere empty chunks are allowed


@given(st.integers(0, 500), st.integers(1, 64))
def test_chunks_are_a_partition_larger_ones_first_and_differ_by_one_at_most(
    num_samples: int, num_chunks: int
):
    sizes = chunk_sizes(num_samples, num_chunks)
    assert len(sizes) == num_chunks
    assert sum(sizes) == num_samples
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_66_samples_on_4_chunks():
    assert chunk_sizes(66, 4) == [17, 17, 16, 16]


def test_memory_is_written_with_a_unit():
    assert Plan.parse("tp=2,memory_bytes=8GiB") == Plan(tp=2, memory_bytes=8 * 2**30)
    assert (
        parse_bytes("0.5 KiB") == 512
        and parse_bytes("3MB") == 3_000_000
        and parse_bytes("7B") == parse_bytes("7") == 7
    )
    for text in ("8Gib", "GiB", "eight", "8KKB", "nan", "inf"):
        with pytest.raises(
            PlanError, match=rf"^{text} is no number of bytes\. Write it like 8GiB, 500MB or 4096\.$"
        ):
            parse_bytes(text)
    assert Plan.parse("dp=2,memory_bytes=4KiB") == Plan(dp=2, memory_bytes=4096)
    with pytest.raises(PlanError, match=r"^memory_bytes=-1 must be 0 \(no limit\) or more\.$"):
        Plan(tp=2, memory_bytes=-1)


def test_without_staleness_nothing_is_asynchronous():
    assert Plan.parse("dp=4,exchange=async,staleness=0,servers=2") == Plan(dp=4, exchange="server", servers=2)
    assert Plan.parse("dp=4,exchange=async,staleness=inf") == Plan(dp=4, exchange="async")
    assert str(Plan(dp=4, exchange="async", staleness=3)) == "dp=4,exchange=async,staleness=3"


def test_what_is_compressed_is_said_with_its_number():
    assert str(Plan(dp=2, compress="powersgd")) == "dp=2,compress=powersgd:4"
    assert Plan(dp=2, compress="topk:0.10") == Plan(dp=2, compress="topk:0.1")
    assert (
        Plan.from_json('{"dp": 2, "exchange": "diloco", "outer_learning_rate": 1}').outer_learning_rate == 1.0
    )


def test_a_plan_that_need_not_equal_one_device_names_the_setting():
    texts = (
        "dp=2,exchange=async",
        "dp=2,exchange=async,staleness=3",
        "dp=2,exchange=local_sgd,local_steps=4",
        "dp=2,exchange=diloco",
        "dp=2,compress=bf16",
    )
    assert [Plan.parse(text).exempt for text in texts] == [
        "staleness=inf",
        "staleness=3",
        "local_steps=4",
        "exchange=diloco",
        "compress=bf16",
    ]
    for text in (
        "dp=2",
        "dp=2,exchange=server",
        "dp=2,exchange=local_sgd",
        "dp=2,exchange=async,staleness=0",
    ):
        assert not Plan.parse(text).exempt
