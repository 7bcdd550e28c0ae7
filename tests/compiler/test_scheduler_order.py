"""Kernels sorted after Inductor's fusion: topological, and otherwise by their places."""

from hypothesis import given
from hypothesis import strategies as st

from compiled_fsdp.compat.scheduler import sorted_by

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
