"""Make CUDA code without a GPU: compiled_fsdp's backend and Inductor compile a model's graphs; the code does not run.

The model is real and on the CPU, in a fake group. Dynamo and AOTAutograd trace it there, and partition the joint graph
there. Then each half becomes a graph of fake CUDA tensors before compiled_fsdp's passes see it, and Inductor is told
that there is a GPU. The Dynamo graph itself runs on the CPU, so that a forward of several graphs goes on to its next
graph.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as inductor
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from compiled_fsdp.compiler import backend
from compiled_fsdp.passes.graph import argument, in_host_memory, ops
from compiled_fsdp.reporting.report import GraphReport

CUDA = torch.device("cuda", 0)


@dataclass
class Code:
    """Inductor's result for one graph."""

    # "forward", "backward" or "inference".
    phase: str
    # The wrapper's Python text.
    text: str
    # The graph after compiled_fsdp's passes.
    graph: GraphModule
    report: GraphReport


@dataclass
class Compiled:
    """The graphs of a model, in the order of their compilation."""

    codes: list[Code] = field(default_factory=list)

    def of(self, phase: str) -> list[Code]:
        return [code for code in self.codes if code.phase == phase]


@contextlib.contextmanager
def cuda_code(capability: tuple[int, int] = (9, 0)) -> Iterator[Compiled]:
    """Compile for a GPU that does not exist, and keep the code. Compiled models run inside as eager code on the CPU."""
    found = Compiled()
    rewritten: list[tuple[Any, GraphModule]] = []
    real_rewrite, real_find = backend.Compilation.rewrite, backend.find_region
    real_inner = inductor.compile_fx_inner

    def rewrite(self: Any, gm: GraphModule, phase: str) -> GraphModule:
        lowered = real_rewrite(self, on_cuda(gm), phase)
        rewritten.append((self, copy.deepcopy(lowered)))
        return lowered

    def find_region(gm: GraphModule, inputs: list[Any]) -> Any:
        region = real_find(gm, inputs)
        return dataclasses.replace(region, on_cpu=False, on_gloo=False) if region.reads else region

    def compile_fx_inner(gm: GraphModule, inputs: Any, **options: Any) -> Any:
        given = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        with pretended_gpu(capability):
            return real_inner(gm, given, **options)

    def keep(self: GraphLowering) -> Any:
        wrapper = self.codegen()[0]
        phase = "backward" if self.is_backward else "inference" if self.is_inference else "forward"
        compilation, graph = rewritten[-1]
        found.codes.append(Code(phase, wrapper.value, graph, compilation.pending))
        return _not_to_be_run()

    def compile(self: Any) -> Callable[..., Any]:
        run = self.gm.forward
        self._generate(self.gm, self.partition, self.rewrite)
        return run

    patches = [
        mock.patch.object(backend.Compilation, "rewrite", rewrite),
        mock.patch.object(backend.Compilation, "compile", compile),
        mock.patch.object(backend, "find_region", find_region),
        mock.patch.object(inductor, "compile_fx_inner", compile_fx_inner),
        mock.patch.object(GraphLowering, "_compile_to_module", keep),
        # only ATen, because to choose among several kernels of a matrix product Inductor would have to run them
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1, max_autotune_gemm_backends="ATEN"),
    ]
    torch._C._ensureCUDADeviceGuardSet()  # torch for the CPU has no device guard for CUDA tensors, not even fake ones
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield found


def _not_to_be_run() -> Any:
    def nothing(*_: Any) -> None:
        return None

    runner = types.SimpleNamespace(recursively_apply_fns=nothing, call=nothing, partitions=[])
    return types.SimpleNamespace(
        __file__="wrapper.py", __name__="wrapper", call=nothing, runner=runner, recursively_apply_fns=nothing,
        benchmark_compiled_module=None,
    )  # fmt: skip


# ---- graphs ----------------------------------------------------------------------------------------------------------
def on_cuda(gm: GraphModule) -> GraphModule:
    """Move the graph's tensors to the GPU, in place, but not its ``param_id`` inputs and what is in host memory."""
    stays = {argument(node, "shard") for node in gm.graph.nodes if _gathers_from_host(node)}
    stays |= set(filter(in_host_memory, gm.graph.nodes))
    mode = detect_fake_mode([node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"])
    assert mode is not None
    for node in gm.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, _moved), map_aggregate(node.kwargs, _moved)
        node.meta.pop("tensor_meta", None)
        if node not in stays and "val" in node.meta:
            node.meta["val"] = tree_map(lambda value: _on_cuda(value, mode), node.meta["val"])
    gm.recompile()
    return gm


def _gathers_from_host(node: Node) -> bool:
    return node.target is ops.unshard.default and argument(node, "device") is not None


def _moved(value: Any) -> Any:
    if isinstance(value, str):  # a read's spec, which names the device of the full parameter
        return value.replace("; device cpu", f"; device {CUDA}")
    return CUDA if isinstance(value, torch.device) and value.type == "cpu" else value


def _on_cuda(value: Any, mode: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype == torch.int64
    if not isinstance(value, torch.Tensor) or is_number:
        return value
    with mode, torch.no_grad():
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CUDA)


# ---- the device ------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def pretended_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Make Inductor and Triton see an H100 with the given compute capability."""
    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=capability[0], minor=capability[1], total_memory=80 * 2**30,
        multi_processor_count=132, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, warp_size=32, L2_cache_size=50 * 2**20, is_integrated=0,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        gcnArchName="", clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120, uuid="none",
        pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 8, "current_device": 0, "get_device_properties": properties,
        "get_device_capability": capability, "get_device_name": properties.name, "is_bf16_supported": True,
        "set_device": None, "synchronize": None, "memory_allocated": 0, "exchange_device": 0,
        "maybe_exchange_device": 0, "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, wrap in ((torch.cuda, _plain), (CudaInterface, staticmethod), (CudaInterface.Worker, staticmethod)):
            for name, answer in answers.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, wrap(_answering(answer))))
        for name in ("get_rng_state", "set_rng_state"):
            stack.enter_context(mock.patch.object(torch.cuda, name, _answering(torch.zeros(16, dtype=torch.uint8))))
        if not hasattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled"):  # torch for the CPU
            stack.enter_context(
                mock.patch.object(torch._C, "_cuda_cudaCachingAllocator_is_enabled", _answering(True), create=True)
            )
        stack.enter_context(_triton_driver(capability))
        yield


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


@contextlib.contextmanager
def _triton_driver(capability: tuple[int, int]) -> Iterator[None]:
    import torch.utils._triton as questions
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        launcher_cls = None

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

        def __getattr__(self, name: str) -> Callable[..., Any]:
            known = {
                "get_current_device": 0, "get_device_capability": capability, "is_active": True,
                "get_active_torch_device": CUDA, "get_current_stream": 0,
            }  # fmt: skip
            return _answering(known[name])

    def forget() -> None:
        for function in vars(questions).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    forget()
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())
    try:
        yield
    finally:
        triton.runtime.driver._active = before
        forget()
