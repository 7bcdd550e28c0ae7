"""`compiled_fsdp.install()`: ours under FSDP2's names, for a program that one cannot edit."""

import contextlib
import logging
import sys
import types
from collections.abc import Iterator
from unittest import TestCase

import pytest
import torch.distributed.fsdp as theirs
import torch.nn as nn

import compiled_fsdp
from compiled_fsdp.compat.modules import torchs_fsdp2
from tests.harness import assert_same, compiled, distributed, train, variants
from tests.harness.fake import fake_group
from tests.harness.models import Encoder, small

TORCHS = [torchs_fsdp2().fully_shard]  # in a list, where install() does not look

LIBRARY = """
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard as shard_it
from torch.distributed.fsdp import register_fsdp_forward_method, share_comm_ctx

def prepare(model):
    for block in model.blocks:
        shard_it(block, mp_policy=MixedPrecisionPolicy())
    shard_it(model)
    share_comm_ctx([model])
    assert isinstance(model, FSDPModule)
    return model

def prepare_lazily(model):
    from torch.distributed._composable.fsdp import fully_shard
    return fully_shard(model)
"""


@contextlib.contextmanager
def library(name: str) -> Iterator[types.ModuleType]:
    """A library that has copied FSDP2's names."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(LIBRARY, vars(module))
    yield module
    del sys.modules[name]


@distributed(world_size=2)
@pytest.mark.parametrize("imports", variants(["before", "afterwards", "in a function"], "before"))
def test_a_program_for_fsdp2(rank, world_size, imports):
    """compiled_fsdp trains its model, compiled too, with FSDP2's results, whenever the program imports FSDP2's names.
    Afterwards everything is as it was."""
    with library("some_library") as before:
        fsdp2 = train(before.prepare(small(blocks=2)))
        with compiled_fsdp.install(), library("later_library") as later:
            prepared = {
                "before": before.prepare(small(blocks=2)),
                "afterwards": later.prepare(small(blocks=2)),
                "in a function": before.prepare_lazily(small(blocks=2)),
            }
            for model in prepared.values():
                assert isinstance(model, compiled_fsdp.FSDPModule)
                assert isinstance(model, theirs.FSDPModule)
            assert_same(train(compiled(prepared[imports])), fsdp2)
        assert before.shard_it is theirs.fully_shard is TORCHS[0]
        assert not isinstance(before.prepare(small(blocks=2)), compiled_fsdp.FSDPModule)


def test_it_says_what_it_replaced_and_takes_it_back():
    from torch.distributed.pipelining import stage

    copied = hasattr(stage, "fully_shard")  # before torch 2.15
    with (
        library("some_library") as module,
        TestCase().assertLogs("compiled_fsdp.frontend.install", logging.INFO) as logs,
    ):
        was = dict(vars(module))
        with compiled_fsdp.install() as installed:
            names = {
                "torch.distributed.fsdp.fully_shard",
                "torch.distributed.fsdp.register_fsdp_forward_method",
                "torch.distributed.fsdp.share_comm_ctx",
                "some_library.shard_it",
                "some_library.share_comm_ctx",
            }
            names |= {"torch.distributed.pipelining.stage.fully_shard"} if copied else set()
            assert names <= set(installed.replaced)
            assert "some_library.shard_it" in logs.output[0]
            assert theirs.fully_shard is module.shard_it is compiled_fsdp.fully_shard
            assert not copied or stage.fully_shard is compiled_fsdp.fully_shard
            assert torchs_fsdp2().fully_shard is TORCHS[0]  # what defines it needs itself
            installed.uninstall()
            assert installed.replaced == ()
        assert vars(module) == was  # and the end has found nothing more to take back
        assert theirs.fully_shard is TORCHS[0]
        assert not copied or stage.fully_shard is TORCHS[0]


def test_installed_twice():
    """The second finds what was imported with torch's names since, and takes back no more than that."""
    with library("some_library") as module, compiled_fsdp.install() as first:
        assert first.replaced
        with compiled_fsdp.install() as second:
            assert second.replaced == ()
        module.shard_it = TORCHS[0]
        with compiled_fsdp.install() as third:
            assert third.replaced == ("some_library.shard_it",)
        assert module.shard_it is TORCHS[0]
        assert theirs.fully_shard is compiled_fsdp.fully_shard
    assert theirs.fully_shard is TORCHS[0]


def test_an_exception_and_what_others_replaced_meanwhile():
    def fails(module: types.ModuleType) -> None:
        with compiled_fsdp.install():
            module.shard_it = print
            raise ArithmeticError

    with (
        library("some_library") as module,
        TestCase().assertLogs("compiled_fsdp.frontend.install", logging.WARNING) as logs,
    ):
        with pytest.raises(ArithmeticError):
            fails(module)
        assert module.shard_it is print
    assert "some_library.shard_it" in logs.output[0]
    assert theirs.fully_shard is TORCHS[0]


def test_modules_of_torchs_meanwhile():
    """Those that FSDP2 sharded before are told from ours, and torch's own functions are for them."""
    with fake_group(2):
        model = theirs.fully_shard(Encoder())
        with compiled_fsdp.install():
            assert isinstance(model, theirs.FSDPModule)
            assert not isinstance(nn.Linear(2, 2), theirs.FSDPModule)
            theirs.register_fsdp_forward_method(model, "encode")
            theirs.share_comm_ctx([model])
            assert theirs.fully_shard.state(model) is model._get_fsdp_state()
            with pytest.raises(ValueError, match=r"sharded by torch\.distributed\.fsdp\.fully_shard"):
                theirs.fully_shard(model)
