"""The order of launches and waits before Inductor's fusion, and of kernels after it."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.dependencies import WeakDep
from torch.utils._ordered_set import OrderedSet

from compiled_fsdp.compat.scheduler import PlannedOrder, sorted_by

# For each node the numbers of nodes before it that it needs, and a place of its own.
GRAPHS = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        st.tuples(*(st.sets(st.integers(0, node - 1)) if node else st.just(set()) for node in range(count))),
        st.lists(st.integers(0, 20), min_size=count, max_size=count),
    )
)


@given(GRAPHS)
def test_needs_first_then_places(graph):
    needs, places = graph
    nodes = list(range(len(needs)))
    out = sorted_by(nodes, {node: list(needs[node]) for node in nodes}, dict(zip(nodes, places, strict=True)))
    assert sorted(out) == nodes
    done: set[int] = set()
    for node in out:
        assert needs[node] <= done
        ready = [other for other in nodes if other not in done and needs[other] <= done]
        assert (places[node], node) == min((places[other], other) for other in ready)
        done.add(node)


class Kernel:
    """As much of a node of Inductor's scheduler as is asked for: it makes one buffer."""

    def __init__(self, number: int, op: torch._ops.OpOverload | None = None, needs: tuple[int, ...] = ()) -> None:
        self.name, self.node = f"op{number}", SimpleNamespace(op_overload=op)
        self.unmet_dependencies = OrderedSet(WeakDep(f"buf{i}", mutating_buf=f"buf{number}") for i in needs)
        self.ancestors = OrderedSet(f"op{i}" for i in needs)

    def get_name(self) -> str:
        return self.name

    def get_nodes(self) -> list["Kernel"]:
        return [self]

    def get_buffer_names(self) -> list[str]:
        return [self.name.replace("op", "buf")]

    def add_fake_dep(self, dep: WeakDep) -> None:
        assert dep.is_fake  # else it would keep a buffer alive
        self.unmet_dependencies.add(dep)


def test_waits_depend_on_what_was_launched_before_them():
    """And fusion hears of it: a kernel after the wait cannot be fused with one that the second launch needs."""
    c10d = torch.ops._c10d_functional
    gather, wait = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
    nodes = [
        Kernel(0, gather),
        Kernel(1),
        Kernel(2, gather, needs=(1,)),
        Kernel(3, wait, needs=(0,)),
        Kernel(4, needs=(3,)),
    ]
    order = PlannedOrder(b"key", lambda op: op in (gather, wait), lambda op: False)
    assert order.options["_pre_fusion_custom_pass"](nodes) == nodes
    assert {dep.name for dep in nodes[2].unmet_dependencies} == {"buf0", "buf1"}
    assert {dep.name for dep in nodes[3].unmet_dependencies} == {"buf0", "buf2"}
    assert "op1" in nodes[4].ancestors
    assert not nodes[1].ancestors
