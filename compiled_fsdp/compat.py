"""The only file that imports private torch; one function for each thing that differs or is not public. 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # no other name is public
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton_package as has_triton_package


# ---- autograd and tensors --------------------------------------------------------------------------------------------
def set_sequence_number(node: Any, number: int) -> None:
    """Set when the autograd engine runs ``node`` among nodes that are ready: higher first."""
    node._set_sequence_nr(number)


def sequence_number(node: Any) -> int:
    """What ``set_sequence_number`` has set, or the engine: 2**64 - 1 for AccumulateGrad."""
    return int(node._sequence_nr())


def local_of(dtensor: Any) -> torch.Tensor:
    """The local tensor itself: ``to_local()`` makes a view, which takes 20 times as long."""
    return dtensor._local_tensor


def set_local(dtensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor by one of the same shape and values."""
    dtensor._local_tensor = local


def dtensor_like(param: Any, local: torch.Tensor) -> DTensor:
    """A DTensor with ``param``'s shape, mesh and placements around ``local``. A quarter of ``from_local``'s time."""
    return DTensor(local, param._spec, requires_grad=False)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of several slices of a larger one."""
    return DeviceMesh._concatenate(meshes)


def flattened_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The slice of ``mesh`` along ``names``, several of them as one dimension; the same object each time."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def strided_shard(dim: int, split: int) -> Placement:
    """A shard of a dimension that ``split`` shards of another mesh dimension cut again."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split)


def post_accumulate_grad_hooks(param: torch.Tensor) -> tuple[Any, ...]:
    """The hooks registered with ``register_post_accumulate_grad_hook``, in order."""
    return tuple((param._post_accumulate_grad_hooks or {}).values())


# ---- Dynamo ----------------------------------------------------------------------------------------------------------
def hook_forward(module: torch.nn.Module, before: Callable[..., Any], after: Callable[[Any, Any, Any], Any]) -> None:
    """Call ``before`` ahead of all forward pre-hooks of ``module`` (with keywords, if it takes them), and ``after`` behind its
    forward, raised or not.

    Under a key of our own: torch numbers hooks as they come, Dynamo guards on the numbers, and so the second model of a
    process would be compiled again.
    """
    key = 1 << 40  # no number of torch's gets that far
    others = dict(module._forward_pre_hooks)
    # put in anew: Dynamo of torch 2.11 mixes up hooks after a move_to_end, as register_forward_pre_hook(prepend=True) does it
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks[key] = before
    module._forward_pre_hooks.update(others)
    if len(inspect.signature(before).parameters) > 2:
        module._forward_pre_hooks_with_kwargs[key] = True
    module._forward_hooks[key] = after
    module._forward_hooks_always_called[key] = True


def mark_static(tensor: torch.Tensor) -> None:
    """Keep Dynamo from making this tensor's sizes symbolic."""
    _dynamo().mark_static(tensor)


@functools.cache
def _dynamo() -> Any:
    import torch._dynamo

    return torch._dynamo


def never_a_frame_of_its_own(function: Any) -> None:
    """Let Dynamo inline ``function`` but never compile it alone, as it would where it skips the caller."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def break_graph(why: str) -> None:
    """End Dynamo's graph here; nothing where Dynamo is not tracing."""
    torch._dynamo.graph_break(why)


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with all that it calls, always as it is. ``torch.compiler.disable`` would import Dynamo here and now."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function)


# What runs a forward: the frames of these, with the module as a local variable.
_forward_codes: dict[Any, str] = {torch.nn.Module._call_impl.__code__: "self"}


def runs_forward(function: Any, local: str) -> None:
    """``function`` runs a forward of the module that its variable ``local`` holds."""
    _forward_codes[function.__code__] = local


@never_compiled
def forwards_on_stack(modules: list[torch.nn.Module]) -> int:
    """How many forwards of any of ``modules`` are running in this thread."""
    frame = sys._getframe(1)
    count = 0
    while frame is not None:
        local = _forward_codes.get(frame.f_code)
        if local is not None:
            running = frame.f_locals.get(local)
            count += any(running is module for module in modules)
        frame = frame.f_back  # type: ignore[assignment]
    return count


def innermost_forward() -> torch.nn.Module | None:
    """The module whose forward is the innermost one that is running in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if (local := _forward_codes.get(frame.f_code)) is not None:
            return frame.f_locals.get(local)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def is_resumed() -> bool:
    """Asked while Dynamo compiles: whether the frame is what follows a graph break."""
    tx = getattr(_dynamo().symbolic_convert.tls, "current_tx", None)
    return tx is not None and tx.f_code.co_name.startswith("torch_dynamo_resume_in_")


def backward_id() -> int:
    """The number of the backward that is running in this thread; -1 outside of any."""
    return torch._C._current_graph_task_id()


def engine_runs(node: Any) -> bool:
    """Whether the running backward comes to ``node``; not so in ``torch.autograd.grad`` of something else."""
    return torch._C._will_engine_execute_node(node)


def saving_hooks() -> tuple[Any, Any] | None:
    """The default hooks for saved tensors that are active now; disabled ones count as somebody else's."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return None, None
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def push_saving_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """As ``torch.autograd.graph.saved_tensors_hooks``, which can only be a context."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saving_hooks() -> None:
    """Undo ``push_saving_hooks``."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def storage_pointer(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 for one that has none of its own (subclasses, functorch's wrappers)."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    ):
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode, such as one of fake tensors, sees what runs inside."""
    return _disable_current_modes()


def use_count(tensor: torch.Tensor) -> int:
    """How many references C++ has to a tensor; Python's are one."""
    return tensor._use_count()  # type: ignore[attr-defined]


def is_cached_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory belongs to CUDA graphs, which write to it again."""
    return torch._C._is_cached_tensor(tensor)  # type: ignore[attr-defined]


def running_node() -> Any:
    """The autograd node that is running now, the same object each time; None outside of backward."""
    return torch._C._current_autograd_node()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward that is running now has ended well."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def dynamo_looks_around() -> bool:
    """Whether Dynamo itself runs, not code that it traces: it lists the parameters of the modules that it meets."""
    if torch.compiler.is_dynamo_compiling():  # is_compiling() is true in all code that runs during a compile
        return False
    return getattr(_dynamo().symbolic_convert.tls, "current_tx", None) is not None


def compiling_is_on() -> bool:
    """Whether the current frame runs below a ``torch.compile``d call (perhaps skipped by Dynamo)."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return callable(get_eval_frame_callback())


def dispatch_modes_active() -> list[str]:
    """Names of the user's dispatch modes (CommDebugMode and the like) that are active now."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]


# ---- torch's own composable APIs -------------------------------------------------------------------------------------
def torch_fsdp_type() -> tuple[type, ...]:
    """FSDP2's module class, or nothing where FSDP2 was never imported (importing it takes half a second)."""
    import sys

    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (fsdp.FSDPModule,) if fsdp is not None else ()


def composable_state_of(module: torch.nn.Module) -> str | None:
    """The name of a composable API (``replicate`` and the like) that was applied to ``module`` and does not mix with ours."""
    from torch.distributed._composable.contract import _get_registry

    registry = _get_registry(module) or {}
    return next((api for api in registry if api in ("replicate", "fully_shard")), None)


def is_wrap_policy(policy: Any) -> bool:
    """Whether ``policy`` is one of FSDP1's policy objects, ``ModuleWrapPolicy`` and the like, and not a mere callable."""
    from torch.distributed.fsdp.wrap import _Policy

    return isinstance(policy, _Policy)


def chosen_by_wrap_policy(
    root: torch.nn.Module,
    policy: Any,
    ignored_modules: set[torch.nn.Module],
    ignored_params: set[Any],
    arguments: dict[str, Any],
) -> dict[torch.nn.Module, dict[str, Any]]:
    """The modules that FSDP1 would wrap inside of ``root``, in its order, inner ones first, each with its arguments."""
    from torch.distributed.fsdp.wrap import _post_order_apply, _recursive_wrap

    chosen: dict[torch.nn.Module, dict[str, Any]] = {}
    if is_wrap_policy(policy):
        targets = policy._run_policy(root, ignored_modules, dict(arguments))

        def take(module: torch.nn.Module) -> None:
            if module in targets and module is not root:
                chosen[module] = targets[module]

        _post_order_apply(root, take)
        return chosen

    def wrapped(module: torch.nn.Module, **own: Any) -> torch.nn.Module:
        chosen[module] = {**arguments, **own}
        return module  # torch puts it back where it was

    _recursive_wrap(root, policy, wrapped, ignored_modules, ignored_params, only_wrap_children=True)
    return chosen


def set_fsdp2_state(module: torch.nn.Module, state: Any) -> None:
    """What ``fully_shard.state(module)`` of torch is to return. ``composable_state_of`` does not see it."""
    from torch.distributed._composable.contract import STATE_KEY
    from torch.distributed.fsdp import fully_shard

    module.__dict__.setdefault(STATE_KEY, {})[fully_shard.__wrapped__] = state  # type: ignore[attr-defined]


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree and its structure. Dynamo traces it."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The pytree with this structure and these leaves."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The pytree with ``function`` applied to its leaves."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree)


def apply_to_tensors(function: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """``container`` with ``function`` applied to the tensors in it; dataclasses, unlike with pytrees, are containers. As FSDP2 casts."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(function, container)


# ---- sizes -----------------------------------------------------------------------------------------------------------
UNKNOWN_SIZE = 8192  # of sizes that only running tells; as Inductor's unbacked_symint_fallback


def hint(size: Any) -> int:
    """A number for a size: itself, or the value that a symbolic size had when it was traced."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint if size.node.has_hint() else None
        return UNKNOWN_SIZE if known is None else int(known)
    return int(size)


def expression(size: Any) -> Any:
    """A symbolic size as a sympy expression; numbers as they are."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def hints_of(value: Any) -> dict[Any, int]:
    """The symbols in a fake tensor's shape, with the values that they had when it was traced."""
    found: dict[Any, int] = {}
    for tensor in tensors_in(value):
        for size in tensor.shape:
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found[size.node.expr] = hint(size)
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a pytree."""
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ---- graphs ----------------------------------------------------------------------------------------------------------
def fake_mode_of(values: Any) -> Any:
    """The fake mode of the fake tensors among ``values``; a null context where there are none."""
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_leaves

    return detect_fake_mode(tree_leaves(values)) or contextlib.nullcontext()


def is_higher_order(target: Any) -> bool:
    """Whether a call target takes graphs as arguments."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def stable_topological_sort(graph: torch.fx.Graph) -> None:
    """Move nodes behind their inputs; nothing else changes place."""
    from torch._inductor.pattern_matcher import stable_topological_sort as sort

    sort(graph)


def reorder(graph: torch.fx.Graph, order: list[torch.fx.Node]) -> None:
    """Put all nodes of ``graph`` into the given order."""
    for node in order:
        graph._root.prepend(node)


def value_in_dynamo_graph(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> Any:
    """What a node of a Dynamo graph stands for in the call that is compiled, and not its fake tensor: an input, an element of one,
    or, in compiled autograd's graph, what AOTAutograd's prologue hands through of the tensors that a forward saved.

    ``known`` has the graph's inputs, and what was found.
    """
    if node not in known:
        known[node] = _value_in_dynamo_graph(node, known)
    return known[node]


def _value_in_dynamo_graph(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> Any:
    if node.target is not operator.getitem:
        return node.meta.get("example_value")
    container: Any = node.args[0]
    index: Any = node.args[1]
    if getattr(container.target, "__name__", "") == "call_aot_bwd_prologue":
        # it hands through sizes, then saved tensors, then what it makes of the incoming gradients
        saved: Any = container.args[0]
        sizes: Any = container.args[1]
        place = index - len(sizes)
        return value_in_dynamo_graph(saved[place], known) if 0 <= place < len(saved) else node.meta.get("example_value")
    values = value_in_dynamo_graph(container, known)
    return None if values is None else values[index]


@contextlib.contextmanager
def compiled_autograd_of(compiler: Callable[..., Any]) -> Iterator[None]:
    """Backwards in this context are captured as one graph and compiled by ``compiler``."""
    import torch._dynamo.compiled_autograd

    with torch._dynamo.compiled_autograd._enable(compiler, dynamic=False):
        yield


# ---- compilers -------------------------------------------------------------------------------------------------------
# Inductor's options that are ours to set. The order of launches and waits is the plan's: nothing may move them behind our
# back, neither the reorder for peak memory nor the one for locality nor (2.15) the simple overlap pass.
_OURS: dict[str, Any] = {
    "custom_partitioner_fn": None,
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
}


# AOTAutograd's own cache would skip the passes, and with them the agreement between ranks (Inductor's cache stays on). A
# backward compiled at its first call would agree on its plan then, while another rank, whose shapes are static, waits for
# the plan before its forward.
_AOT = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}


def inductor_compile(
    gm: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    partition: Callable[..., Any],
    rewrite: Callable[..., torch.fx.GraphModule],
    compiled: Callable[[torch.fx.GraphModule, Any], Callable[[], None]],
    key: bytes,
    reuse_buffers: bool,
    user_options: Mapping[str, Any],
    mode: str | None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor.

    Args:
        partition: cuts the joint graph into forward and backward, with the signature of a partitioner.
        rewrite: ``(gm, phase)`` to the graph that Inductor generates code for. It runs before Inductor looks into its
            cache, so the cache's key contains the rewritten graph.
        compiled: told each graph that code was generated for (or found in the cache), with Inductor's result; returns what is
            to be called whenever that code runs.
        key: part of the cache's key; whatever the compiled code depends on and the graph's text does not show.
        reuse_buffers: False keeps Inductor from using a dead buffer's memory again inside the graph. It takes the input of
            a launched ``all_gather_into_tensor_out`` for dead at once, while the collective still reads it.
        user_options, mode: as for torch's own backend.
    """
    import torch._inductor as inductor
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partition(CustomPartitionerFn):
        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> bytes:
            return key

        def __reduce__(self) -> Any:  # the cache pickles the configuration, this object in it, into its key
            return bytes, (key,)

    def inner(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        phase = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        gm = rewrite(gm, phase)
        result: Any = compile_fx_inner(gm, example_inputs, **kwargs)
        runs = compiled(gm, result)
        plain = not hasattr(result, "current_callable")  # a graph without operations, which is run as it is
        code = result if plain else result.current_callable

        def run(*args: Any) -> Any:
            runs()
            return code(*args)

        if plain:
            run._boxed_call = True  # type: ignore[attr-defined]
            return run
        result.current_callable = run
        return result

    patches: dict[str, Any] = {}
    if mode is not None:
        patches.update(inductor.list_mode_options(mode))
    patches.update({name.replace("-", "_"): value for name, value in user_options.items()})
    known = config.get_config_copy()
    patches |= {name: value for name, value in _OURS.items() if name in known} | {"custom_partitioner_fn": Partition()}
    if not reuse_buffers:
        patches["allow_buffer_reuse"] = False
    with functorch_config.patch(_AOT):
        code: Any = compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)
    return code


def aot_compile(
    gm: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    partition: Callable[..., Any],
    rewrite: Callable[..., torch.fx.GraphModule],
    compiled: Callable[[torch.fx.GraphModule, Any], Callable[[], None]],
) -> Callable[..., Any]:
    """Compile a Dynamo graph with AOTAutograd alone: the rewritten graphs run node by node."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config
    from torch.fx.graph import _BoxedCodeGen

    def run(phase: str) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            gm = rewrite(gm, phase)
            gm.graph.set_codegen(_BoxedCodeGen())  # inputs come in a list that is emptied, so that they can die
            gm.recompile()
            runs, forward = compiled(gm, None), gm.forward

            def run_boxed(args: list[Any]) -> Any:
                runs()
                return forward(args)

            run_boxed._boxed_call = True  # type: ignore[attr-defined]
            return run_boxed

        return compiler

    with functorch_config.patch(_AOT):
        return aot_autograd(
            fw_compiler=run("forward"),
            bw_compiler=run("backward"),
            inference_compiler=run("inference"),
            partition_fn=partition,
        )(gm, inputs)


def min_cut_partition(joint: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    """torch's partitioner, which honours recompute marks."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def copy_of(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph module with a graph of its own; the nodes' meta values are shared."""
    graph = torch.fx.Graph()
    output: Any = graph.graph_copy(gm.graph, {}, return_output_node=True)
    value, node = output
    copied = graph.output(value)
    copied.meta = dict(node.meta)
    out = torch.fx.GraphModule(gm, graph)
    out.meta = dict(gm.meta)
    return out


@contextlib.contextmanager
def activation_share(share: float) -> Iterator[bool]:
    """Let the partitioner keep this share of the activations' memory; no more than the user has asked for: then False."""
    from torch._functorch import config

    asked = config.activation_memory_budget
    if share > asked and share < 1:
        yield False
        return
    with config.patch(activation_memory_budget=min(share, asked)):
        yield True


def source_hash(*directories: Path) -> str:
    """SHA-256 of every Python source below the directories."""
    import hashlib

    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.resolve().rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- Dynamo's graphs, logs and traces --------------------------------------------------------------------------------
def graph_break_of(gm: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended this graph where it did, and the user's code line; None where it did not break the graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = _code_line(frame.filename, frame.lineno) if frame else "unknown line"
    return str(reason.reason).splitlines()[0], where


def graph_breaks() -> list[tuple[frozenset[tuple[str, int]], str, str]]:
    """Every graph break since Dynamo's last reset: the lines (file, number) that were being called, the reason, the code line."""
    from torch._dynamo.utils import graph_break_reasons

    return [
        (
            frozenset((frame.filename, frame.lineno or 0) for frame in reason.user_stack),
            str(reason.reason).splitlines()[0],
            _code_line(reason.user_stack[-1].filename, reason.user_stack[-1].lineno or 0),
        )
        for reason in graph_break_reasons
        if reason.user_stack
    ]


def int_attribute_recompiled_for() -> str | None:
    """The module attribute whose other value makes Dynamo compile the current frame again; None if that is not why."""
    from torch._dynamo.utils import get_metrics_context

    for line in str(get_metrics_context()._metrics.get("recompile_reason") or "").splitlines():
        if "allow_unspec_int_on_nn_module" in line and (found := re.search(r"([\w.]+) == -?\d+", line)):
            return found[1]
    return None


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """An artifact in torch's structured trace (TORCH_TRACE), seen by tlparse."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)


# ---- process groups --------------------------------------------------------------------------------------------------
def store_of(group: torch.distributed.ProcessGroup | None) -> tuple[Any, timedelta]:
    """The group's key-value ``torch.distributed.Store``, None if it has no other processes (the "fake" backend), and the
    group's timeout, which is not its store's. Without a group those of the default one."""
    from torch.distributed import distributed_c10d

    group = group or distributed_c10d._get_default_group()
    if distributed_c10d.get_backend(group) == "fake":
        return None, timedelta()
    store: Any = distributed_c10d._world.pg_map[group][1]
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return store, store.timeout if options is None else options._timeout


def torch_fsdp_in_forward(tensors: list[Any]) -> str | None:
    """The class name of a module of torch's FSDP2 whose forward is running on ``tensors``; None where there is none.

    Its state alone does not tell: it says "forward" for ever after one that raised.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    among = {id(tensor) for tensor in tensors}
    for module, reference in list(_module_state_mapping.items()):
        state = reference()
        running = isinstance(state, FSDPState) and state._training_state == TrainingState.FORWARD
        if running and any(id(parameter) in among for parameter in module.parameters()):
            return type(module).__name__
    return None


def check_inductor_options(options: Mapping[str, Any], mode: str | None) -> None:
    """Raise ValueError for a ``mode`` or an option that Inductor does not have."""
    import torch._inductor as inductor
    from torch._inductor import config

    modes = list(inductor.list_mode_options())
    if mode is not None and mode not in modes:
        raise ValueError(f"compiled_fsdp: mode takes {', '.join(map(repr, modes))}, but got {mode!r}.")
    known = config.get_config_copy()
    for name in (name.replace("-", "_") for name in options):
        if name not in known:
            raise ValueError(f"compiled_fsdp: option 'inductor': Inductor has no option {name!r}.")
        if name in _OURS:
            raise ValueError(
                f"compiled_fsdp: option 'inductor': {name!r} is what the backend itself works with; leave it out."
            )


def frames_that_failed() -> list[tuple[str, int, str, str]]:
    """Frames that Dynamo gave up on, newest 64: file and first line of the function, the reason, and the line it failed at."""
    from torch._dynamo.utils import get_compilation_metrics

    failed = []
    for metrics in get_compilation_metrics():
        if metrics.fail_reason and metrics.fail_user_frame_filename:
            where = _code_line(metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno or 0)
            reason = metrics.fail_reason.splitlines()[0]
            failed.append((metrics.co_filename or "", metrics.co_firstlineno or 0, reason, where))
    return failed


def _code_line(filename: str, number: int) -> str:
    import linecache

    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"
