"""Private functions of autograd's engine, tensors, device meshes and process groups."""

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
    """Set the priority of ``node``: among nodes that are ready, the engine runs the highest number first."""
    node._set_sequence_nr(number)


def sequence_number(node: Any) -> int:
    """Return the number that ``set_sequence_number`` or the engine has set; 2**64 - 1 for AccumulateGrad."""
    return int(node._sequence_nr())


def next_sequence_number() -> int:
    """Return the sequence number of the node that autograd makes next in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def backward_id() -> int:
    """Return the number of the backward that is running in this thread; -1 outside of a backward."""
    return torch._C._current_graph_task_id()


def engine_runs(node: Any) -> bool:
    """Whether the running backward will run ``node``.

    For example, ``torch.autograd.grad`` runs only the nodes that lead to its inputs.
    """
    return torch._C._will_engine_execute_node(node)


def running_node() -> Any:
    """Return the autograd node that is running now, the same object each time; None outside of a backward."""
    return torch._C._current_autograd_node()


def in_checkpoint() -> bool:
    """Whether the current code runs in torch's non-reentrant checkpoint, in its forward or when it is recomputed."""
    return running_checkpoint() is not None


def running_checkpoint() -> Any:
    """Return an object that identifies the current run of torch's checkpoint; None outside of a checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # True: also while Dynamo traces
    is_torchs = hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return hooks[0] if is_torchs else None


class _Callback:
    """A function that only the engine refers to."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    @never_compiled  # a backward may end below a torch.compile'd call, where Dynamo would compile this
    def __call__(self) -> None:
        self.function()


def keeps_graph() -> bool:
    """Whether the running backward may be followed by another one of the same graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def at_end_of_backward(function: Callable[[], None]) -> Callable[[], object]:
    """Call ``function`` when the running backward has ended without an error.

    Returns:
        A function whose result is true while that backward runs and false afterwards, because the engine drops its
        callbacks at the end of a backward, also if an exception ends it.
    """
    callback = _Callback(function)
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    return weakref.ref(callback)


def explain_unused_inputs(explain: Callable[[Any], str | None]) -> None:
    """Let ``explain`` replace torch's error that an input "appears to not have been used in the graph".

    The error is replaced because a tensor that does not lead to the loss has no autograd node for a hook.

    Args:
        explain: takes the tensor that was not used; returns the message of the error to raise, or None for torch's
            error.
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
                message = explain(unused[0]) if len(unused) == 1 else None  # else torch does not say which one
                if message is None:
                    raise
                raise RuntimeError(message) from error

        return run_backward

    patches.install(patches.UNUSED_INPUT, replacement)


def post_accumulate_grad_hooks(param: torch.Tensor) -> tuple[Any, ...]:
    """Return the hooks of ``register_post_accumulate_grad_hook``, in the order of registration."""
    hooks = param._post_accumulate_grad_hooks
    return tuple(hooks.values()) if hooks else ()


def saving_hooks() -> tuple[Any, Any] | None:
    """Return the default hooks for saved tensors (pack, unpack) that are active now; None if there are none.

    The result is ``(None, None)`` if such hooks are disabled, so that callers see them as another library's hooks.
    """
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return None, None
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def push_saving_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Do the same as ``torch.autograd.graph.saved_tensors_hooks``, which works only as a context."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saving_hooks() -> None:
    """Undo ``push_saving_hooks``."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number for the memory of a tensor: the same for all views of the memory, as long as one of them lives.

    The number is 0 for a tensor without memory of its own: a subclass (except fake tensors), a sparse tensor, a wrapper
    of functorch, a tangent that is zero.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        return 0
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided and not tensor._is_zerotensor() else 0


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element; for a fake tensor, which has no memory, a number in its place."""
    if isinstance(tensor, FakeTensor):
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr()


def outside_of_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that it runs with autocast off.

    Autocast would choose other dtypes for copies and sums, and refuses some dtypes (for example float16 on CPUs).
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context whose new tensors are plain: transforms of torch.func (jvp, vmap) take them for constants."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def use_count(tensor: torch.Tensor) -> int:
    """Return the number of C++ references to a tensor; all Python references together count as one."""
    return tensor._use_count()  # type: ignore[attr-defined]


def is_cached_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory belongs to CUDA graphs, which will write to it again."""
    return torch._C._is_cached_tensor(tensor)  # type: ignore[attr-defined]


def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no tensor subclass's ``__torch_function__`` is called."""
    return torch._C.DisableTorchFunctionSubclass()


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no dispatch mode, such as a fake tensor mode, sees the ops."""
    return _disable_current_modes()


def dispatch_modes_active() -> list[str]:
    """Return the names of the user's dispatch modes that are active now, for example CommDebugMode."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor consists of other tensors, which ``__tensor_flatten__`` names."""
    return is_traceable_wrapper_subclass(tensor)


def local_of(dtensor: Any) -> torch.Tensor:
    """Return the local tensor itself. ``to_local()`` makes a view of it, which takes 20 times as long."""
    return dtensor._local_tensor


def set_local(dtensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor by another one of the same shape and values."""
    if dtensor.storage_offset() != local.storage_offset():
        # a DTensor has the storage offset of its first local tensor, and Dynamo fails if the present one has another
        dtensor.data = dtensor_like(dtensor, local)
    dtensor._local_tensor = local


def dtensor_like(param: Any, local: torch.Tensor) -> DTensor:
    """Return a DTensor with ``param``'s shape, mesh and placements around ``local``.

    It takes a tenth of ``from_local``'s time, because it does not call ``DTensor.__init__``. That call turns Dynamo
    off, which takes longer than all the rest, and does nothing else unless a model is exported.
    """
    spec = param._spec
    if spec.tensor_meta.dtype != local.dtype:  # ``local`` is a gradient, with a dtype of its own (``grad_dtype``)
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def grad_dtype_set_on(param: torch.Tensor) -> tuple[torch.dtype | None] | None:
    """Return the value that ``param.grad_dtype`` was set to, in a tuple; None if it was never set.

    Before torch 2.15, a ``grad_dtype`` that was set to the parameter's own dtype looks as if it was never set.
    """
    grad_dtype = param.grad_dtype
    if hasattr(param, "_has_grad_dtype_override"):
        return (grad_dtype,) if param._has_grad_dtype_override else None
    return None if grad_dtype == param.dtype else (grad_dtype,)


def declare_gradient_dtype(ctx: Any, dtype: torch.dtype | None) -> None:
    """Let autograd's engine cast the gradient of a custom operation's only output to ``dtype``; None means no cast.

    Before torch 2.15 this does nothing, and the engine always casts the gradient to the output's dtype.

    Args:
        ctx: the context of ``forward`` or ``setup_context``.
        dtype: the gradient's dtype in backward.
    """
    if hasattr(ctx, "set_output_grad_dtype"):
        ctx.set_output_grad_dtype(dtype)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dimensions of several slices of a larger mesh."""
    return DeviceMesh._concatenate(meshes)


def flattened_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the slice of ``mesh`` along ``names`` as one dimension; the same object each time."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def strided_shard(dim: int, split: int) -> Placement:
    """Return a placement that shards ``dim`` after another mesh dimension has cut it into ``split`` shards."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split)


def store_of(group: torch.distributed.ProcessGroup | None) -> tuple[Any, timedelta]:
    """Return a process group's key-value ``torch.distributed.Store`` and timeout, which differs from the store's own.

    Without a group: those of the default group. The store is None if the group has no other processes (the backend
    "fake").
    """
    from torch.distributed import distributed_c10d

    group = group or distributed_c10d._get_default_group()
    if distributed_c10d.get_backend(group) == "fake":
        return None, timedelta()
    store: Any = distributed_c10d._world.pg_map[group][1]
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return store, store.timeout if options is None else options._timeout


def process_group_of(group: Any) -> torch.distributed.ProcessGroup:
    """Return the process group for a functional collective's argument: a name or, since torch 2.13, the group."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(group) if isinstance(group, str) else group
