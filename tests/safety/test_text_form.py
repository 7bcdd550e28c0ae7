"""Values that graphs have as text: every one comes back as it was."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_fsdp.buckets.reduction import GradSync, ReduceSpec
from compiled_fsdp.buckets.spec import COALESCED, FLAT, SINGLE, TORCH, TRITON, BucketSpec, Kind, ReadSpec
from compiled_fsdp.buckets.transport import TRANSPORTS

numbers = st.lists(st.integers(0, 10**9), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float8_e4m3fn])
devices = st.sampled_from([None, torch.device("cpu"), torch.device("cuda", 1)])
codecs = st.sampled_from(["", "int8/256", "bfloat16"])
reductions = st.builds(
    ReduceSpec,
    divide=st.sampled_from([None, (2.0, 0.5)]),
    sync=st.sampled_from(GradSync),
    adds_accumulated=st.booleans(),
    codec=codecs,
    error_feedback=st.booleans(),
    any_dtype=st.booleans(),
    within=st.sampled_from([None, (8, 3)]),
    pending_in_parts=st.booleans(),
)


@given(
    st.builds(
        BucketSpec,
        kind=st.sampled_from(Kind),
        form=st.sampled_from([SINGLE, FLAT, COALESCED]),
        transport=st.sampled_from(list(TRANSPORTS)),
        world=st.integers(1, 4096),
        numels=numbers,
        group_id=st.integers(0, 9),
        dims=numbers,
        reads=numbers,
        dtype=dtypes,
        reduce=reductions.map(str),
        codec=codecs,
        copier=st.sampled_from([TORCH, TRITON]),
        device=devices,
        pieces=st.integers(1, 9),
        edge=st.none() | st.tuples(st.booleans(), st.booleans()),
        recheck=st.booleans(),
    )
)
def test_a_bucket(spec):
    assert BucketSpec.parse(str(spec)) == spec


@given(
    st.builds(
        ReadSpec,
        size=numbers,
        world=st.integers(1, 4096),
        group_id=st.integers(0, 9),
        dim=st.integers(0, 3),
        dtype=dtypes,
        reduce=st.just("piece 1 abc") | reductions.map(str),
        block_size=st.integers(1, 9),
        position=st.integers(0, 9),
        device=devices,
        codec=codecs,
    )
)
def test_a_read(spec):
    assert ReadSpec.parse(str(spec)) == spec


@given(reductions)
def test_a_reduction(spec):
    assert ReduceSpec.parse(str(spec)) == spec


def test_what_is_usual_is_left_out():
    spec = BucketSpec(Kind.GATHER, FLAT, "all_gather", world=2, numels=(4, 32), reads=(0, 1))
    assert str(spec) == "gather flat all_gather; world 2; numels 4 32; reads 0 1"
    assert str(replace(spec, edge=(True, False))) == f"{spec}; edge True False"
    assert str(ReadSpec((8, 8), 2, reduce="float32 avg")) == "size 8 8; world 2; reduce float32 avg"
