"""The arguments that a model was compiled with, and compiles that leave nothing behind in Dynamo.

``explain`` needs both, because it plans graphs before the first step.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compiled_fsdp.compat.dynamo import DATA_DEPENDENT, OURS, first_line, users_line


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` was given; any other module as it is."""
    from torch._dynamo.eval_frame import OptimizedModule

    return model._orig_mod if isinstance(model, OptimizedModule) else model


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function that a call of ``module`` runs, hooks included, as if ``module.compile()`` was not called."""
    return module if module._compiled_call_impl is None else module._call_impl


def compile_arguments(model: torch.nn.Module) -> dict[str, Any]:
    """Return the arguments that ``torch.compile(model, ...)`` or ``model.compile(...)`` was given.

    Returns:
        ``backend`` (its name), ``dynamic``, ``fullgraph``, and ``options`` and ``mode`` if they were given. An empty
        dictionary for a module that is not compiled as a whole.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    compiled = model.dynamo_ctx if isinstance(model, OptimizedModule) else _compile_context(model._compiled_call_impl)
    return {} if compiled is None else _arguments_of(compiled)


def backends_of(model: torch.nn.Module) -> set[str]:
    """Return the names of the backends that compile ``model``, modules inside of it, or modules around them.

    It is slow, because it looks at every object of the process. Use it to explain why nothing was compiled.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    model = uncompiled(model)
    inside = set(model.modules())
    found = [_compile_context(each._compiled_call_impl) for each in inside]
    found += [_compile_context(vars(each).get("forward")) for each in inside]
    # type(), because __class__ of some objects is computed
    around = [each for each in gc.get_objects() if issubclass(type(each), OptimizedModule)]
    found += [each.dynamo_ctx for each in around if each._orig_mod in inside or model in each._orig_mod.modules()]
    arguments = [_arguments_of(compiled) for compiled in found if compiled is not None]
    return {each["backend"] for each in arguments if each}


def _compile_context(function: Any) -> Any:
    """Return the object in which a function from ``torch.compile`` keeps the arguments; None for another object."""
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    return inspect.getclosurevars(function).nonlocals.get("self")


def _arguments_of(compiled: Any) -> dict[str, Any]:
    from torch._dynamo.eval_frame import innermost_backend

    if not callable(compiled.callback):  # torch.compiler.disable
        return {}
    backend = innermost_backend(compiled.callback)
    name = getattr(backend, "compiler_name", getattr(backend, "__name__", str(backend)))
    arguments = {"backend": name, "dynamic": getattr(backend, "dynamic", None), "fullgraph": compiled.fullgraph}
    return {**getattr(backend, "kwargs", {}), **arguments}


@contextlib.contextmanager
def dynamo_untouched() -> Iterator[None]:
    """Return a context that leaves later compiles as they would be without the traces in it.

    It restores two things that Dynamo remembers: the sizes of inputs (to make sizes dynamic that change), and graph
    breaks.
    """
    from torch._dynamo import config, pgo
    from torch._dynamo.utils import graph_break_reasons

    state = pgo.get_code_state()
    before, breaks = copy.deepcopy(state), list(graph_break_reasons)
    try:
        with config.patch(suppress_errors=False):
            yield
    finally:
        state.clear()
        state.update(before)
        graph_break_reasons[:] = breaks


def errors_at_graph_breaks() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a graph break is an error, as with ``fullgraph=True``.

    Unlike ``fullgraph=True``, it does not make Dynamo capture more than a step would.
    """
    import torch._dynamo

    return torch._dynamo.error_on_graph_break(True)


def graphs_in_front_of_breaks() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a graph break in an inlined function ends the graph there, not before the call."""
    from torch._dynamo import config

    return config.patch(nested_graph_breaks=True)


@contextlib.contextmanager
def before_code_runs(do: Callable[[], None]) -> Iterator[None]:
    """Call ``do`` when Dynamo has translated a frame, before the frame runs. An error of ``do`` ends the compile."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    handle = register_bytecode_hook(lambda *_: do())
    try:
        yield
    finally:
        handle.remove()


def graph_break_in(error: BaseException) -> tuple[str, str] | None:
    """Return the reason and the user's code line of the graph break that ``error`` reports; None for another error."""
    from torch._dynamo.exc import Unsupported, UserError

    # In a step, a branch on a captured value is a graph break. If graph breaks are errors, it is a UserError.
    data_dependent = isinstance(error, UserError) and DATA_DEPENDENT in error.msg
    if not isinstance(error, Unsupported) and not data_dependent:
        return None
    stack = getattr(error, "real_stack", None)
    return first_line(error.msg), users_line(stack)  # type: ignore[attr-defined]


def is_break_of(error: BaseException, module: torch.nn.Module) -> bool:
    """Whether the graph break of ``error`` is in ``module``'s own forward, and not in a function that it calls."""
    frames = [frame for frame in getattr(error, "real_stack", None) or () if not frame.filename.startswith(OURS)]
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    if code is None or not frames:
        return False
    return frames[-1].filename == code.co_filename and frames[-1].lineno in {line for _, _, line in code.co_lines()}


def cause_in_backend(error: Exception) -> Exception:
    """Return the error that a backend has raised and Dynamo has wrapped; another error as it is."""
    from torch._dynamo.exc import BackendCompilerFailed

    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(error, BackendCompilerFailed) and isinstance(inner, Exception) else error
