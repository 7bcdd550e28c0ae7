"""Autograd's engine, tensors, meshes and process groups."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.dynamo import never_compiled


def set_sequence_number(node: Any, number: int) -> None:
    """Set when the autograd engine runs ``node`` among nodes that are ready: higher first."""
    node._set_sequence_nr(number)


def sequence_number(node: Any) -> int:
    """The number that ``set_sequence_number`` or the engine has set; 2**64 - 1 for AccumulateGrad."""
    return int(node._sequence_nr())


def next_sequence_number() -> int:
    """The number of the node autograd makes next in this thread. Of nodes that are ready the highest runs first."""
    return int(torch._C._autograd._get_sequence_nr())


def backward_id() -> int:
    """The number of the backward that is running in this thread; -1 outside of any."""
    return torch._C._current_graph_task_id()


def engine_runs(node: Any) -> bool:
    """Whether the running backward will run ``node``; ``torch.autograd.grad`` of something else does not."""
    return torch._C._will_engine_execute_node(node)


def running_node() -> Any:
    """The autograd node that is running now, the same object each time; None outside of backward."""
    return torch._C._current_autograd_node()


def in_checkpoint() -> bool:
    """Whether torch's checkpoint (not the reentrant one) runs the code that runs now, for the first time or again."""
    return running_checkpoint() is not None


def running_checkpoint() -> Any:
    """What stands for this run of the checkpoint that the code that runs now belongs to; None outside of any."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # True: also while Dynamo traces
    is_torchs = hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return hooks[0] if is_torchs else None


class _Callback:
    """A function that the engine alone holds."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    @never_compiled  # a backward that runs below compiled code ends there, too
    def __call__(self) -> None:
        self.function()


def keeps_graph() -> bool:
    """Whether the backward that runs now may be followed by another one of the same graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def at_end_of_backward(function: Callable[[], None]) -> Callable[[], object]:
    """Call ``function`` when the backward that is running now has ended without an error.

    Returns:
        A function whose result is true as long as that backward runs, and false afterwards: the engine drops its
        callbacks at its end, and after an exception, too.
    """
    callback = _Callback(function)
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    return weakref.ref(callback)


def explain_unused_inputs(explain: Callable[[Any], str | None]) -> None:
    """Let ``explain`` say what is wrong where torch says that an input "appears to not have been used in the graph".

    A tensor that does not lead to the loss has no node to hook.

    Args:
        explain: gets the tensor that was not used; returns the message of the error that is raised in the place of
            torch's, or None for torch's own.
    """

    def replacement(engine: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            try:
                return engine(*args, **kwargs)
            except RuntimeError as error:
                if "not have been used in the graph" not in str(error):
                    raise
                inputs = args[4]
                index = re.search(r"at index (\d+)", str(error))  # since torch 2.13
                unused = inputs if index is None else [inputs[int(index[1])]]
                message = explain(unused[0]) if len(unused) == 1 else None  # of several torch does not say which
                if message is None:
                    raise
                raise RuntimeError(message) from error

        return run_backward

    patches.install(patches.UNUSED_INPUT, replacement)


def post_accumulate_grad_hooks(param: torch.Tensor) -> tuple[Any, ...]:
    """The hooks registered with ``register_post_accumulate_grad_hook``, in order."""
    hooks = param._post_accumulate_grad_hooks
    return tuple(hooks.values()) if hooks else ()


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


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor is a view of, the same for all of its views, as long as one of them lives.

    0 for a tensor that has no memory of its own: subclasses (but fake tensors), functorch's wrappers, a tangent that is
    zero.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        return 0
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided and not tensor._is_zerotensor() else 0


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's first element is; of a fake tensor, which is nowhere, a number that stands for it."""
    if isinstance(tensor, FakeTensor):
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr()


def outside_of_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with autocast off: it chooses dtypes for copies and sums, too, and refuses some."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """What runs inside makes plain tensors, which torch.func's running transforms (jvp, vmap) take for constants."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def use_count(tensor: torch.Tensor) -> int:
    """How many references C++ has to a tensor; Python's are one."""
    return tensor._use_count()  # type: ignore[attr-defined]


def is_cached_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory belongs to CUDA graphs, which will write to it again."""
    return torch._C._is_cached_tensor(tensor)  # type: ignore[attr-defined]


def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """No tensor subclass's ``__torch_function__`` is asked by what runs inside."""
    return torch._C.DisableTorchFunctionSubclass()


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode, such as one of fake tensors, sees what runs inside."""
    return _disable_current_modes()


def dispatch_modes_active() -> list[str]:
    """Names of the user's dispatch modes (CommDebugMode and the like) that are active now."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is made of others, which ``__tensor_flatten__`` names."""
    return is_traceable_wrapper_subclass(tensor)


def local_of(dtensor: Any) -> torch.Tensor:
    """The local tensor itself: ``to_local()`` makes a view, which takes 20 times as long."""
    return dtensor._local_tensor


def set_local(dtensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor by one of the same shape and values."""
    if dtensor.storage_offset() != local.storage_offset():
        # the wrapper has the offset of the first local tensor, and Dynamo fails where it is not the offset of this one
        dtensor.data = dtensor_like(dtensor, local)
    dtensor._local_tensor = local


def dtensor_like(param: Any, local: torch.Tensor) -> DTensor:
    """A DTensor with ``param``'s shape, mesh and placements around ``local``. A tenth of ``from_local``'s time.

    Without ``DTensor.__init__``, which turns Dynamo off, does nothing unless a model is exported, and takes longer than
    the rest.
    """
    spec = param._spec
    if spec.tensor_meta.dtype != local.dtype:  # a gradient's, by ``grad_dtype``
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def grad_dtype_set_on(param: torch.Tensor) -> tuple[torch.dtype | None] | None:
    """What ``param.grad_dtype`` was set to, alone in a tuple; None if it was never set.

    Before torch 2.15 setting it to the parameter's own dtype cannot be told from not setting it.
    """
    grad_dtype = param.grad_dtype
    if hasattr(param, "_has_grad_dtype_override"):
        return (grad_dtype,) if param._has_grad_dtype_override else None
    return None if grad_dtype == param.dtype else (grad_dtype,)


def declare_gradient_dtype(ctx: Any, dtype: torch.dtype | None) -> None:
    """Let autograd's engine cast the gradient of a custom operation's one output to ``dtype``; None: leave it.

    ``ctx`` is that of ``forward`` or ``setup_context``. Before torch 2.15 the engine always casts it to the output's
    dtype.
    """
    if hasattr(ctx, "set_output_grad_dtype"):
        ctx.set_output_grad_dtype(dtype)


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


def store_of(group: torch.distributed.ProcessGroup | None) -> tuple[Any, timedelta]:
    """A process group's key-value ``torch.distributed.Store`` and timeout, which is not the store's own.

    The store is None if the group has no other processes (the "fake" backend). Without a group: those of the default
    group.
    """
    from torch.distributed import distributed_c10d

    group = group or distributed_c10d._get_default_group()
    if distributed_c10d.get_backend(group) == "fake":
        return None, timedelta()
    store: Any = distributed_c10d._world.pg_map[group][1]
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return store, store.timeout if options is None else options._timeout


def process_group_of(group: Any) -> torch.distributed.ProcessGroup:
    """The process group that a functional collective has as its argument: by name, or torch 2.13's object."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(group) if isinstance(group, str) else group
