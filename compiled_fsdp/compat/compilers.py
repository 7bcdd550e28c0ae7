"""Compile a Dynamo graph with Inductor, or with AOTAutograd alone."""

# Why: docs/design/torch.md, "Passes run before Inductor's cache"
# Why: docs/design/torch.md, "A backward is compiled with its forward"
# Why: docs/design/torch.md, "Inductor's own reordering is off"

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._triton import has_triton_package as has_triton_package

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.code_cache import CacheConsultant, OnRun, Take, code_caches_are_on
from compiled_fsdp.compat.retained_graphs import retains_graphs
from compiled_fsdp.compat.scheduler import PlannedOrder

# Options of Inductor that the backend sets itself, whatever a program has set for other models. The plan decides on
# buckets and on the order of launches and waits, and nothing may change them afterwards.
_RESERVED_OPTIONS: dict[str, Any] = {
    "custom_partitioner_fn": None,
    "_pre_fusion_custom_pass": None,
    "_post_fusion_custom_pass": None,
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "_fuse_ddp_communication": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
}


# Compile a backward together with its forward. With dynamic shapes, torch would compile it at its first call. A rank
# with static shapes would then wait, before its own forward, for the backward's plan of a rank that has not compiled
# its backward yet.
_AOT_CONFIG = {"force_non_lazy_backward_lowering": True}


def _watched(code: Callable[..., Any], on_run: OnRun) -> Callable[..., Any]:
    """Return ``code`` with ``on_run`` around each call, and with autograd's dispatch keys off.

    The keys are off because compiled code computes no gradients, but each op of torch.distributed would ask in Python
    whether it does. Ops in compiled code run below autograd in any case.
    """

    def run(*args: Any) -> Any:
        with on_run(), torch._C._AutoDispatchBelowAutograd():
            return code(*args)

    return run


def inductor_compile(
    gm: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    partition: Callable[..., Any],
    rewrite: Callable[..., torch.fx.GraphModule],
    finish: Callable[..., torch.fx.GraphModule],
    compiled: Callable[[torch.fx.GraphModule, Any], OnRun],
    may_be_captured: Callable[[torch.fx.GraphModule], bool],
    keeps_order: Callable[[torch._ops.OpOverload], bool],
    trusts: Callable[[torch._ops.OpOverload], bool],
    take_cached: Take | None,
    key: bytes,
    reuse_buffers: bool,
    user_options: Mapping[str, Any],
    mode: str | None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor.

    Args:
        gm: the Dynamo graph.
        inputs: its inputs in the call that it is compiled for.
        partition: cuts the joint graph into forward and backward, with the signature of a partitioner.
        rewrite: takes ``(gm, phase)``, returns the graph that Inductor generates code for. It runs before Inductor
            looks into its cache, so the cache's key contains the rewritten graph.
        finish: takes a rewritten graph and its phase, unless CUDA graphs shall capture it or the code is C++ alone;
            returns the graph that Inductor gets. It may have nested graphs.
        compiled: called with each graph that has code now (generated or from Inductor's cache) and with Inductor's
            result; returns the ``OnRun`` for that code.
        may_be_captured: whether a rewritten graph may run in CUDA graphs; called only if ``mode`` or an option wants
            them.
        keeps_order: whether calls of an op stay in the order of the rewritten graph, relative to all calls of such ops.
        trusts: whether an op's results are as its fake says, so that the code does not assert it in each call.
        take_cached: decides on code from AOTAutograd's cache (``code_cache.py``); None for a graph that does not use
            this cache.
        key: part of the caches' keys: everything that the code depends on and the graph's text does not show.
        reuse_buffers: False keeps Inductor from using a dead buffer's memory again inside the graph. Inductor takes the
            input of a launched ``all_gather_into_tensor_out`` for dead at once, although the collective still reads it.
        user_options: Inductor's options, as for torch's own backend.
        mode: as for torch's own backend.
    """
    import torch._inductor as inductor
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.utils import BoxedBool

    class Partition(CustomPartitionerFn):
        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            consultant.nothing_found()
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> bytes:
            return key

        def __reduce__(self) -> Any:  # the cache pickles the configuration, this object in it, into its key
            return bytes, (key,)

    def inner(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        consultant.nothing_found()
        phase = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        gm = rewrite(gm, phase)
        wanted = config.triton.cudagraphs or bool(kwargs.get("cudagraphs"))
        if not (wanted or config.cpp_wrapper) and patches.fits(patches.SUBGRAPHS):
            gm = finish(gm, phase)
        if wanted and not may_be_captured(gm):
            kwargs["cudagraphs"] = BoxedBool(False)
            with config.patch({"triton.cudagraphs": False}):
                result: Any = compile_fx_inner(gm, example_inputs, **kwargs)
        else:
            result = compile_fx_inner(gm, example_inputs, **kwargs)
        on_run = compiled(gm, result)
        if not hasattr(result, "current_callable"):  # a graph without operations, which runs as it is
            run = _watched(result, on_run)
            run._boxed_call = True  # type: ignore[attr-defined]
            return run
        result.current_callable = _watched(result.current_callable, on_run)
        return result

    settings: dict[str, Any] = {}
    if mode is not None:
        settings.update(inductor.list_mode_options(mode))
    settings.update({name.replace("-", "_"): value for name, value in user_options.items()})
    known = config.get_config_copy()
    settings |= {name: value for name, value in _RESERVED_OPTIONS.items() if name in known} | {
        "custom_partitioner_fn": Partition()
    }
    settings |= PlannedOrder(key, keeps_order, trusts).options
    if not reuse_buffers:
        settings["allow_buffer_reuse"] = False
    # With CUDA graphs, ``may_be_captured`` decides on each graph while it is compiled. Cached code does not have the
    # answer.
    wants_cuda_graphs = settings.get("triton.cudagraphs", config.triton.cudagraphs)
    is_cached = take_cached is not None and code_caches_are_on() and not wants_cuda_graphs
    consultant = CacheConsultant(take_cached or (lambda found, key: None), _watched)
    aot_config = {**_AOT_CONFIG, "enable_autograd_cache": is_cached}
    own_inputs = patches.installed(patches.SUBGRAPHS, _with_own_inputs)
    with functorch_config.patch(aot_config), consultant.at_work(), retains_graphs(), own_inputs:
        code: Any = compile_fx(gm, inputs, inner_compile=inner, config_patches=settings)
    return code


def _with_own_inputs(init: Callable[..., None]) -> Callable[..., None]:
    """Return an ``__init__`` of the lowering of a nested graph that forgets which inputs of the whole graph may die.

    Torch looks the numbers of those inputs up by the places of the nested graph's own inputs.
    """

    def own_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.bw_donated_idxs = None

    return own_init


def aot_compile(
    gm: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    partition: Callable[..., Any],
    rewrite: Callable[..., torch.fx.GraphModule],
    compiled: Callable[[torch.fx.GraphModule, Any], OnRun],
) -> Callable[..., Any]:
    """Compile a Dynamo graph with AOTAutograd alone: the rewritten graphs run node by node.

    The arguments are those of ``inductor_compile``.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
    from torch.fx.graph import _BoxedCodeGen

    def compiler_of(phase: str) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            gm = rewrite(gm, phase)
            gm.graph.set_codegen(_BoxedCodeGen())  # inputs come in a list, which the code empties so that they can die
            gm.recompile()
            _LazyGraphModule.force_recompile(gm)
            run_boxed = _watched(gm.forward, compiled(gm, None))
            run_boxed._boxed_call = True  # type: ignore[attr-defined]
            return run_boxed

        return compiler

    settings = functorch_config.patch({**_AOT_CONFIG, "enable_autograd_cache": False})
    # as with Inductor, only graphs that run get Python code
    with settings, retains_graphs(), _use_lazy_graph_module(True):
        return aot_autograd(
            fw_compiler=compiler_of("forward"),
            bw_compiler=compiler_of("backward"),
            inference_compiler=compiler_of("inference"),
            partition_fn=partition,
            keep_inference_input_mutations=True,  # as with Inductor: graphs write to inputs, then save them
        )(gm, inputs)


def check_inductor_options(options: Mapping[str, Any], mode: str | None) -> None:
    """Raise ValueError for a ``mode`` or option that Inductor does not have, or that the backend sets itself."""
    import torch._inductor as inductor
    from torch._inductor import config

    modes = list(inductor.list_mode_options())
    if mode is not None and mode not in modes:
        raise ValueError(f"compiled_fsdp: mode takes {', '.join(map(repr, modes))}, but got {mode!r}.")
    known = config.get_config_copy()
    for name in (name.replace("-", "_") for name in options):
        if name not in known:
            raise ValueError(f"compiled_fsdp: option 'inductor': Inductor has no option {name!r}.")
        if name in _RESERVED_OPTIONS:
            raise ValueError(f"compiled_fsdp: option 'inductor': the backend itself sets {name!r}; leave it out.")


def source_hash(*directories: Path) -> str:
    """Return the SHA-256 of all Python sources below the directories."""
    import hashlib

    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.resolve().rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
