"""The code that Inductor makes for a GPU, without one: the plan's order, nothing touched that is in flight, no waits of
the host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from compiled_fsdp import fully_shard, replicate
from compiled_fsdp.base import logs
from compiled_fsdp.buckets import host_copies
from compiled_fsdp.buckets.transport import ALL_GATHER_COALESCED, ALL_REDUCES, LAUNCHES
from compiled_fsdp.passes.cost import PROFILES, CopyEngines
from compiled_fsdp.passes.graph import calls, is_gather, is_launch, is_wait, prims, spec_of, waits_of
from compiled_fsdp.passes.views import memory_of
from tests.harness import variants
from tests.harness.cuda_dry import Code, cuda_code
from tests.harness.fake import fake_group
from tests.harness.models import Block
from tests.harness.wrapper import read_wrapper

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Blocks(nn.Module):
    """Blocks, a norm and a head, without an embedding, whose gradient Inductor traces on the device."""

    breaks = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 61)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.breaks:
                torch._dynamo.graph_break()
            x = block(x)
        return self.head(self.norm(x))


class Parts(Blocks):
    breaks = True


@dataclass(frozen=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None
    shards: dict[str, Any] = field(default_factory=dict)
    model: type[Blocks] = Blocks
    replicas: bool = False
    # Whether every rank has whole parameters (``replicate``).
    whole: bool = False
    dim: int = 64
    # What the program has set for all of Inductor.
    config: dict[str, Any] = field(default_factory=dict)
    # Whether backward keeps the parameters, ``set_reshard_after_backward(False)``.
    retained: bool = False
    # How many CUDA graphs forward and backward become, and the reason that a warning gives if one is asked for in vain.
    captures: tuple[int, int] = (0, 0)
    why_not: str = ""


OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
# Further tensors of a grouped call are free, so nothing is copied into flat buckets.
GROUPED = replace(PROFILES["h100"], each=0.0)
GROUPED_COPIES = replace(GROUPED, copy_engines=CopyEngines(latency=0.0))
# Small tensors are worth a copy.
IN_HOST_MEMORY = {"hardware": replace(PROFILES["h100"], host_copy=1e9), "memory_budget": 600_000}
REPLAYED = {"inductor": {"triton.cudagraphs": True}}
# torch's own passes, which move collectives and put them into buckets.
TORCHS_OWN = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
}
# The first ones have several of the things that may go wrong, the others have them one by one.
CASES = {
    "uneven": Case(dim=60),
    "replicas, a bucket a module, bf16": Case(
        {"bucket": "module"}, shards={"mp_policy": BF16}, replicas=True, config=TORCHS_OWN
    ),
    "4 gather again, alone, without kernels": Case(
        {"bucket": "parameter", "kernels": False}, shards={"reshard_after_forward": 4}
    ),
    "coalesced, bf16": Case({"hardware": GROUPED, "bucket": 100}, shards={"mp_policy": BF16}),
    "replicated, coalesced": Case({"hardware": GROUPED, "bucket": 100}, whole=True),
    "replicated, bf16": Case(shards={"mp_policy": BF16}, whole=True),
    "replicated, parts": Case(model=Parts, whole=True),
    "symmetric memory": Case({"transport": "symm_mem"}),
    "activations in host memory": Case(IN_HOST_MEMORY),
    "offloaded": Case(shards=OFFLOADED),
    "offloaded parts in bf16": Case(shards=OFFLOADED | {"mp_policy": BF16}, model=Parts),
    "mode reduce-overhead": Case(mode="reduce-overhead", why_not="compiled_fsdp.pack_shards cannot be captured"),
    "mode max-autotune, parts": Case(mode="max-autotune", model=Parts, why_not="the forward has graph breaks"),
    "CUDA graphs": Case(REPLAYED | {"kernels": False}, captures=(1, 1)),
    "bf16": Case(shards={"mp_policy": BF16}),
    "module": Case({"bucket": "module"}),
    "parameter": Case({"bucket": "parameter"}),
    "without kernels": Case({"kernels": False}),
    "parts": Case(model=Parts),
    "parts in bf16": Case(model=Parts, shards={"mp_policy": BF16}),
    "replicas": Case(replicas=True),
    "4 gather again": Case(shards={"reshard_after_forward": 4}),
    "kept": Case(shards={"reshard_after_forward": False}),
    "offloaded in bf16": Case(shards=OFFLOADED | {"mp_policy": BF16}),
    "CUDA graphs, parts": Case(REPLAYED | {"kernels": False}, model=Parts, why_not="the forward has graph breaks"),
    "CUDA graphs, retained": Case(
        REPLAYED | {"kernels": False},
        retained=True,
        captures=(0, 1),
        why_not="set_reshard_after_backward(False) keeps parameters",
    ),
    "CUDA graphs, bf16, module": Case(
        REPLAYED | {"kernels": False, "bucket": "module"}, shards={"mp_policy": BF16}, captures=(1, 1)
    ),
    "symmetric memory, parts in bf16": Case({"transport": "symm_mem"}, model=Parts, shards={"mp_policy": BF16}),
    "symmetric memory, replicas": Case({"transport": "symm_mem"}, replicas=True),
    "symmetric memory, coalesced": Case({"transport": "symm_mem", "hardware": GROUPED_COPIES, "bucket": 100}),
    "symmetric memory, CUDA graphs": Case({**REPLAYED, "kernels": False, "transport": "symm_mem"}, captures=(1, 1)),
    "CUDA graphs, offloaded": Case(REPLAYED | {"kernels": False}, shards=OFFLOADED, why_not="is not of the GPU alone"),
    "mode max-autotune": Case(mode="max-autotune", why_not="compiled_fsdp.pack_shards cannot be captured"),
    "mode reduce-overhead, parts": Case(mode="reduce-overhead", model=Parts, why_not="the forward has graph breaks"),
    "mode default": Case(mode="default"),
    "mode default, parts": Case(mode="default", model=Parts),
    "mode max-autotune-no-cudagraphs": Case(mode="max-autotune-no-cudagraphs"),
    "mode max-autotune-no-cudagraphs, parts": Case(mode="max-autotune-no-cudagraphs", model=Parts),
}


def codes_of(case: Case) -> list[Code]:
    with fake_group(8), torch._inductor.config.patch(case.config), cuda_code() as found:
        mesh = {}
        if case.replicas:
            mesh = {"mesh": init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))}
        model = case.model(case.dim)
        function = replicate if case.whole else fully_shard
        for block in model.blocks:
            function(block, **mesh, **case.shards)
        function(model, **mesh, **case.shards)
        if case.retained:
            model.set_reshard_after_backward(False)
        options = {"hardware": "h100", "verify": "full", **case.options} if case.mode is None else None
        run = torch.compile(model, backend="compiled_fsdp", options=options, mode=case.mode)
        run(torch.zeros(32, case.dim))
    return found.codes


@pytest.mark.parametrize("name", variants(CASES, "coalesced, bf16", "CUDA graphs", "replicated, coalesced"))
def test_wrapper(name, caplog):
    logs._logged.clear()
    case = CASES[name]
    if torch.__version__ < "2.12" and (case.mode or "").startswith("max-autotune") and case.model is Blocks:
        pytest.skip("this torch chooses among kernels for a sum of two products by running them")
    if torch.__version__ < "2.13" and "transport" in case.options:
        pytest.skip("Inductor does not know the ops")
    codes = codes_of(case)
    warnings = [line.message for line in caplog.records if line.message.startswith("no CUDA graphs")]
    assert len(warnings) == bool(case.why_not), warnings
    assert all(case.why_not in warning for warning in warnings), warnings
    assert {code.phase for code in codes} == {"forward", "backward"}
    for code in codes:
        wrapper = read_wrapper(code.text)
        assert wrapper.problems == [], code.phase
        captures = sum(event.kind == "partition" for event in wrapper.events)
        assert captures == case.captures[code.phase == "backward"], code.phase
        assert wrapper.order == planned_order(code), code.phase
        assert wrapper.products_beside() == planned_products(code), code.phase
        if case.options.get("kernels", True):
            casts = casts_of_coalesced_gathers(code)
            assert all(count <= 1 for count in casts), code.phase
            assert casts or case.whole or case.options.get("hardware") is not GROUPED, code.phase


def casts_of_coalesced_gathers(code: Code) -> list[int]:
    """How many casts of their own the shards of each grouped call have, behind views of them."""
    return [
        sum(memory_of(sent).target is prims.convert_element_type.default for sent in launch.all_input_nodes)
        for launch in calls(code.graph, ALL_GATHER_COALESCED)
    ]


def planned_order(code: Code) -> list[str]:
    """The launches and waits of the graph that our passes left."""
    return [kind for node in code.graph.graph.nodes if (kind := kind_of(node)) is not None]


def kind_of(node: torch.fx.Node) -> str | None:
    if is_wait(node):
        return "wait"
    if node.target in host_copies.KINDS:
        return host_copies.KINDS[node.target]
    if node.target in (*ALL_REDUCES, torch.ops._c10d_functional.all_reduce_.default):
        return "all_reduce"
    if node.target in LAUNCHES or (is_launch(node) and spec_of(node).kind.supplies):
        return "gather" if is_gather(node) else "reduce"
    return None


def planned_products(code: Code) -> list[int]:
    """For each launch in the graph that our passes left, the matrix products between it and its first wait."""
    nodes = list(code.graph.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    products = [place[node] for node in nodes for _ in range(products_of(node, code.graph))]
    launches = [node for node in nodes if kind_of(node) not in (None, "wait")]
    found = []
    for launch in launches:
        waits = waits_of(launch) or [user for user in launch.users if is_wait(user)]
        first = min(place[wait] for wait in waits)
        found.append(sum(place[launch] < product < first for product in products))
    return found


def products_of(node: torch.fx.Node, graph: torch.fx.GraphModule) -> int:
    """How many matrix products a node is: itself, or inside of the function that it calls."""
    if node.target is torch.ops.higher_order.invoke_subgraph:
        return len(calls(graph.get_submodule(node.args[1]), *PRODUCTS))
    return int(node.target in PRODUCTS)
