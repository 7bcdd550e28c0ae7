"""Copies of activations to host memory and back: where they start, where compute waits, what is a candidate."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

from compiled_fsdp.buckets.host_copies import KINDS, WAIT_COPY
from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.passes.arrange import arrange
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.extract import extract
from compiled_fsdp.passes.graph import calls, ops
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, run_passes, through
from compiled_fsdp.passes.plan.simulate import memory_curve, simulate
from compiled_fsdp.passes.start_copies import start_copies
from compiled_fsdp.passes.verify import GraphIsWrong, verify
from tests.passes.graphs import Param, context, text, trace

SIZE = 256
PARAMS = [Param((SIZE, SIZE), i) for i in range(4)]
PRODUCT, BYTES = 1e-3, 4 * SIZE * SIZE
# Each product takes a millisecond, and everything else nothing.
QUICK = replace(PROFILES["h100"], flops={"float32": 2 * SIZE**3 / PRODUCT}, copy=1e15, kernel=0.0, multiprocessors=0)
HOST = torch.device("cpu")


def products(shards: Sequence[Tensor], slots: Sequence[Tensor], x: Tensor, times: int) -> list[Tensor]:
    """``x`` and its products with the parameters in turn."""
    out = [x]
    for i in range(times):
        out.append(out[-1] @ PARAMS[i].unshard(shards[i], slots[i], i))
    return out


def forward(shards: Any, slots: Any, x: Tensor) -> list[Tensor]:
    """Four products, the first two of which are offloaded."""
    _, first, second, third, fourth = products(shards, slots, x, 4)
    return [fourth, ops.offload(first), ops.offload(second), third]


def backward(shards: Any, slots: Any, x: Tensor, saved: Tensor) -> list[Tensor]:
    """Four products, to which a reloaded tensor is added."""
    back = ops.reload(saved, HOST)
    return [products(shards, slots, x, 4)[-1] + back]


def started(function: Callable[..., Any], milliseconds: float, *more: Tensor) -> tuple[GraphModule, PassContext]:
    """The graph with the copies' starts and waits, if a copy takes so long."""
    hardware = replace(QUICK, host_copy=BYTES / (1e-3 * milliseconds))
    ctx = context(PARAMS, function.__name__, hardware=hardware)
    x = torch.ones(SIZE, SIZE)
    return start_copies(arrange(trace(function, PARAMS, x, *more), ctx), ctx), ctx


def order(gm: GraphModule) -> str:
    """The products, copies and waits, in order."""
    names = {torch.ops.aten.mm.default: "product", WAIT_COPY: "wait", **KINDS, torch.ops.aten.add.Tensor: "add"}
    return ", ".join(names[node.target] for node in gm.graph.nodes if node.target in names)


def test_a_tensor_is_freed_where_its_copy_is_done():
    """A copy of half a millisecond needs one product, of one and a half two; one of five is waited for at the end."""
    assert_expected_inline(
        "\n".join(order(started(forward, milliseconds)[0]) for milliseconds in (0.5, 1.5, 5)),
        """\
product, offload, product, wait, offload, product, wait, product
product, offload, product, offload, product, wait, product, wait
product, offload, product, offload, product, product, wait, wait""",
    )


def test_a_tensor_comes_back_before_its_first_use():
    """As late as can be, but no later."""
    saved = torch.ones(SIZE, SIZE)
    assert_expected_inline(
        "\n".join(order(started(backward, milliseconds, saved)[0]) for milliseconds in (0.5, 1.5, 5)),
        """\
product, product, product, reload, product, wait, add
product, product, reload, product, product, wait, add
reload, product, product, product, product, wait, add""",
    )


def test_what_is_in_host_memory_takes_no_memory_of_the_device():
    """From the wait on in forward, and until the start in backward."""
    gm, ctx = started(forward, 0.5)
    tasks, _ = extract(gm, ctx)
    plain, _ = extract(arrange(trace(lambda *a: products(*a, 4)[1:], PARAMS, torch.ones(SIZE, SIZE)), ctx), ctx)
    assert tasks.segments[-1].bytes == plain.segments[-1].bytes - 2 * BYTES
    saved = torch.ones(SIZE, SIZE)
    gm, ctx = started(backward, 0.5, saved)
    tasks, _ = extract(gm, ctx)
    assert 2 * BYTES <= tasks.segments[0].bytes < 3 * BYTES  # the input and its product


def test_a_copy_has_a_link_of_its_own_and_slows_nothing_down():
    tasks, _ = extract(*started(forward, 1.4))
    seen = simulate(tasks.with_collectives(dict.fromkeys(Kind, ())), ())
    first, second = seen.model_timings
    assert second.start == pytest.approx(first.end)
    assert first.exposed == second.exposed == seen.contention == 0


def test_lowered_and_verified():
    gm, ctx = started(forward, 0.5)
    gm = run_passes(tuple(p for p in GRAPH_PASSES if p.__name__ not in ("arrange", "start_copies")), gm, ctx)
    assert ctx.planned is not None
    assert [of.kind for of in ctx.planned.tasks.model_collectives] == ["offload", "offload"]
    assert ctx.planned.simulation.peak == max(memory_curve(ctx.planned.tasks, ctx.planned.schedule))


def used_before_its_wait(gm: GraphModule) -> None:
    copy = calls(gm, *KINDS)[0]
    with gm.graph.inserting_after(copy):
        gm.graph.call_function(torch.ops.aten.sum.default, (copy,))


def never_waited_for(gm: GraphModule) -> None:
    wait = calls(gm, WAIT_COPY)[0]
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)


def frees_another_tensor(gm: GraphModule) -> None:
    first, second = calls(gm, WAIT_COPY)
    first.args = (first.args[0], second.args[1])


@pytest.mark.parametrize("damage", [used_before_its_wait, never_waited_for, frees_another_tensor])
def test_what_the_verifier_finds(damage):
    gm, ctx = started(forward, 0.5)
    passes = [p for p in through("lower") if p.__name__ not in ("arrange", "start_copies")]
    gm = run_passes(tuple(passes), gm, ctx)
    verify(gm, ctx)
    damage(gm)
    with pytest.raises(GraphIsWrong, match="not by one wait"):
        verify(gm, ctx)


def test_text():
    """What the pass makes of a graph, as ``TORCH_LOGS=+compiled_fsdp.passes.diff`` shows it."""
    assert_expected_inline(
        text(started(forward, 0.5)[0]),
        """\
unshard = unshard(shard0)
mm = mm(x0, unshard)
start_offload = start_offload(mm)
unshard_1 = unshard(shard1)
mm_1 = mm(mm, unshard_1)
wait_copy = wait_copy(start_offload, mm)
start_offload_1 = start_offload(mm_1)
unshard_2 = unshard(shard2)
mm_2 = mm(mm_1, unshard_2)
wait_copy_1 = wait_copy(start_offload_1, mm_1)
unshard_3 = unshard(shard3)
mm_3 = mm(mm_2, unshard_3)
return [mm_3, wait_copy, wait_copy_1, mm_2]""",
    )
