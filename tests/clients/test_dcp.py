"""torch.distributed.checkpoint with a process group of its own, which saves while training goes on."""

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from compiled_fsdp import explain, fully_shard
from tests.clients import recipe
from tests.harness import compiled, distributed, loss_of, shard, train
from tests.harness.checkpoints import state_of
from tests.harness.models import small
from tests.harness.reference import assert_equal

pytestmark = pytest.mark.more
HEADING = "Asynchronous checkpoints with DCP"
GROUP, SAVE, LOAD = range(3)
Tensors = dict[str, torch.Tensor]


def follow(block: int, names: dict[str, Any], change: tuple[str, str] = ("", "")) -> None:
    """Run one of the page's blocks."""
    text = recipe(HEADING, block)
    assert change[0] in text
    exec(compile(text.replace(*change, 1), f"ecosystem.md: {HEADING}", "exec"), names)


def build(ours: bool, seed: int = 0) -> dict[str, Any]:
    """A sharded model, what runs it, and its optimizer."""
    plain = shard(small(seed), fully_shard if ours else torch_fully_shard)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    return {"plain": plain, "model": compiled(plain) if ours else plain, "optimizer": optimizer}


def state(names: dict[str, Any]) -> Tensors:
    return state_of(names["plain"], names["optimizer"])


def go_on(names: dict[str, Any]) -> Tensors:
    """Two steps, and all that they give."""
    losses = train(names["model"], optimizer=names["optimizer"], steps=2).losses
    return {f"loss {step}": loss for step, loss in enumerate(losses)} | state(names)


@pytest.mark.parametrize("way", ["async_save", "save"])
@distributed(world_size=2, reset=True)
def test_each_loads_the_others(rank, world_size, tmp_path, way):
    """While `async_save` has not written yet, regions compile for the first time: training's anew, evaluation's. All
    ranks agree on a plan for each."""
    without_a_stop = build(ours=False)
    expected = [go_on(without_a_stop), go_on(without_a_stop)]
    saved = {name: value for name, value in expected[0].items() if not name.startswith("loss")}
    group: dict[str, Any] = {}
    follow(GROUP, group)
    may_write, write = threading.Event(), FileSystemWriter.write_data

    def held(*args: Any) -> Any:
        assert may_write.wait(600)
        return write(*args)

    for ours in (True, False):
        names = group | build(ours) | {"folder": tmp_path / str(ours)}
        assert_equal(go_on(names), expected[0])
        if way == "save":
            follow(SAVE, names, ("async_save", "save"))
        else:
            may_write.clear()
            with mock.patch.object(FileSystemWriter, "write_data", held):
                follow(SAVE, names)
                torch.compiler.reset()
                with torch.no_grad():
                    loss_of(names["model"], rank, 0)
                assert_equal(go_on(names), expected[1])
                assert not names["saving"].done()
                may_write.set()
                names["saving"].result()
            assert not ours or "inference" in {graph.phase for graph in explain(names["plain"]).graphs}
        for other in (True, False):
            names = group | build(other, seed=1) | {"folder": tmp_path / str(ours)}
            follow(LOAD, names)
            assert_equal(state(names), saved)
            assert_equal(go_on(names), expected[1])
            assert not other or explain(names["plain"]).graphs
    dist.destroy_process_group(group["group"])
