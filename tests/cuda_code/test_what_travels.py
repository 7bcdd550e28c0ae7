"""Encoding and decoding in the code for a GPU: how many kernels they are, and in the plan's order."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from compiled_fsdp import WirePolicy, fully_shard
from tests.cuda_code.test_wrapper import Blocks, planned_order
from tests.harness.cuda_dry import Code, cuda_code
from tests.harness.extensions import Split, wrap
from tests.harness.fake import fake_group
from tests.harness.wrapper import read_wrapper

WRAPPED = ("up.weight", "down.weight")


class Eight(Split):
    """For 8 ranks. Uncompiled its hooks are 4 kernels before the gathers and 3 after them."""

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        rounded, rest = outputs
        full = rounded.float() + rest.float()
        return full, (full,)


def codes_of(change: Callable[[nn.Module], nn.Module] = lambda model: model, **shards: object) -> dict[str, Code]:
    with fake_group(8), cuda_code() as found:
        model = change(Blocks(64))
        for block in model.blocks:
            fully_shard(block, **shards)
        fully_shard(model, **shards)
        options = {"hardware": "h100", "verify": "full", "bucket": "module"}
        torch.compile(model, backend="compiled_fsdp", options=options)(torch.zeros(32, 64))
    assert [code.phase for code in found.codes] == ["forward", "backward"]
    for code in found.codes:
        wrapper = read_wrapper(code.text)
        assert wrapper.problems == [], code.phase
        assert wrapper.order == planned_order(code), code.phase
    return {code.phase: code for code in found.codes}


def calls_of(code: Code, name: str) -> int:
    return len(re.findall(name, code.text[code.text.index("def call") :]))


@pytest.mark.more
def test_hooks_are_fused():
    """At most two kernels before the gathers and one after them, for each of the weights."""
    plain, hooked = codes_of(), codes_of(lambda model: wrap(model, Eight, *WRAPPED))
    weights = 2 * len(WRAPPED)
    for phase in plain:
        more = calls_of(hooked[phase], r"triton_\w+\.run\(") - calls_of(plain[phase], r"triton_\w+\.run\(")
        assert 0 < more <= 3 * weights, (phase, more)


@pytest.mark.more
def test_codecs_are_an_op_a_bucket():
    """`encode` of all of a bucket, `decode` of each tensor: one kernel each, which Inductor calls."""
    encoded = codes_of(wire_policy=WirePolicy("int8", "int8"))
    assert calls_of(encoded["forward"], r"compiled_fsdp\.encode\.default\(") == 3  # two blocks and the root
    assert calls_of(encoded["forward"], r"compiled_fsdp\.decode\.default\(") == 2 * 10 + 4
    assert calls_of(encoded["backward"], r"compiled_fsdp\.encode\.default\(") == 2 + 3  # gathers, then reductions
    assert calls_of(encoded["backward"], r"compiled_fsdp\.decode_sum\.default\(") == 2 * 10 + 4
