"""Dynamo: traced and skipped functions, graph breaks, recompile limits, and logs."""

from __future__ import annotations

import functools
import operator
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

from compiled_fsdp.compat import patches
from compiled_fsdp.compat.graphs import hint

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _dynamo() -> Any:
    import torch._dynamo

    return torch._dynamo


def mark_static(tensor: torch.Tensor) -> None:
    """Keep Dynamo from making this tensor's sizes symbolic."""
    _dynamo().mark_static(tensor)


def skip_as_frame(function: F) -> F:
    """Decorate ``function`` so that Dynamo may inline it, but never compiles it by itself.

    Otherwise Dynamo would compile it by itself wherever it skips the caller.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)  # type: ignore[attr-defined]
    return function


_skipped: set[str] = set()


def skip_our_frames() -> None:
    """Apply ``skip_as_frame`` to all functions and methods of compiled_fsdp's modules that are imported so far.

    Otherwise, if Dynamo skips a caller in this package, it would compile the called functions by themselves, anew for
    each shape. Functions that are defined inside of another function are left out, because users compile some of them,
    such as a method given to ``register_fsdp_forward_method``.
    """
    names = [
        name
        for name in sys.modules
        if name.startswith("compiled_fsdp.")
        and name not in _skipped
        and not getattr(sys.modules[name].__spec__, "_initializing", False)
    ]
    _skipped.update(names)
    for name in names:
        module = sys.modules[name]
        inside = [
            value for cls in list(vars(module).values()) if isinstance(cls, type) and cls.__module__ == name
            for value in vars(cls).values()
        ]  # fmt: skip
        for value in [*vars(module).values(), *inside]:
            found = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
            for function in found:
                if not isinstance(function, FunctionType) or function.__module__ != name:
                    continue
                # code from ``dataclass`` is in no file; torch's wrappers of a function are in another file
                if function.__code__.co_filename in (module.__file__, "<string>"):
                    skip_as_frame(function)


OURS = str(Path(__file__).parents[1])


def break_graph(why: str) -> None:
    """End Dynamo's graph here with a graph break for the reason ``why``; do nothing if Dynamo is not tracing."""
    torch._dynamo.graph_break(msg=why)  # by keyword: else Dynamo leaves it out of the reason


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` in a form in which neither it nor the functions that it calls are ever compiled.

    ``torch.compiler.disable`` does the same, but imports Dynamo at once.
    """
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function)


# compiled_fsdp's backend, and users' functions that have called it.
_backends: list[weakref.ref[Any]] = []


def our_backend(function: F) -> F:
    """Decorate ``function`` to be the backend that ``is_ours`` recognizes."""
    _backends.append(weakref.ref(function))
    return function


def compile_past_recompile_limits(on_limit: Callable[[CodeType, str, int, bool, str], None]) -> None:
    """From now on, let Dynamo compile past its limits for compiled_fsdp's backend, unless ``on_limit`` raises an error.

    The backend calls this while it compiles. A user's ``fail_on_recompile_limit_hit`` still counts: the first limit is
    then torch's own error.

    Args:
        on_limit: called when Dynamo would stop compiling a function. It gets the function's code; the name of the limit
            in ``torch._dynamo.config`` and its value; whether it is the last limit; why Dynamo wants another variant.
    """
    tx = getattr(_dynamo().symbolic_convert.tls, "current_tx", None)
    if tx is None:  # called by hand, not by Dynamo
        return
    called = tx.output.compiler_fn  # the backend, or a user's function that calls it
    if not is_ours(called):
        _backends[:] = [known for known in _backends if known() is not None] + [weakref.ref(called)]

    def replacement(exceeds: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> tuple[bool, str]:
            exceeded, name = exceeds(*args, **kwargs)
            if not exceeded or _dynamo().config.fail_on_recompile_limit_hit:
                return exceeded, name
            asking = sys._getframe(1).f_locals
            if not is_ours(asking["compiler_fn"]):
                return exceeded, name
            config = _dynamo().config
            # With suppress_errors, an error would make the function run uncompiled.
            last = name == "accumulated_recompile_limit" and not config.suppress_errors
            reason = str(asking["recompile_reason"]).partition("\nUser stack trace:")[0].splitlines()[-1]
            on_limit(asking["code"], name, getattr(config, name), last, reason)
            return False, ""

        return watched

    patches.install(patches.RECOMPILE_LIMIT, replacement)


def is_ours(compiler: Any) -> bool:
    """Whether Dynamo's ``compiler`` is compiled_fsdp's backend, or a user's function that has called it."""
    from torch._dynamo.eval_frame import innermost_backend

    innermost = innermost_backend(compiler)
    innermost = getattr(innermost, "compiler_fn", innermost)
    return any(known() is compiler or known() is innermost for known in _backends)


def is_dynamo_restart(error: BaseException) -> bool:
    """Whether Dynamo raised ``error`` to trace the same frame again, which is no failure.

    Such an error also passes through the backend.
    """
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def is_resume_frame() -> bool:
    """While Dynamo compiles: whether the frame is the rest of a function behind a graph break."""
    tx = getattr(_dynamo().symbolic_convert.tls, "current_tx", None)
    return tx is not None and tx.f_code.co_name.startswith("torch_dynamo_resume_in_")


def code_being_compiled() -> CodeType | None:
    """While Dynamo compiles: return the code of the function whose frame it compiles; otherwise None."""
    tx = getattr(_dynamo().symbolic_convert.tls, "current_tx", None)
    return None if tx is None else tx.output.root_tx.f_code


def forget_code(code: CodeType) -> None:
    """Let Dynamo compile ``code`` anew at its next call. Compiled code of the function may be running now."""
    _dynamo().reset_code(code)


def dynamo_is_inspecting() -> bool:
    """Whether Dynamo itself is running, and not code that it traces.

    For example, Dynamo lists the parameters of the modules that it meets.
    """
    if torch.compiler.is_dynamo_compiling():  # is_compiling() is true in all code that runs during a compile
        return False
    return getattr(_dynamo().symbolic_convert.tls, "current_tx", None) is not None


def compiling_is_on() -> bool:
    """Whether the current frame runs below a ``torch.compile``d call, even if Dynamo has skipped the frame."""
    return callable(_eval_frame_callback()())


@functools.cache
def _eval_frame_callback() -> Callable[[], Any]:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback


def value_in_dynamo_graph(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> Any:
    """Return a node's real value in the call that a Dynamo graph is compiled for, not its fake tensor.

    The node is an input, an element of one, or, in compiled autograd's graph, a tensor that a forward saved and that
    AOTAutograd's prologue passes on.

    Args:
        node: a node of the graph.
        known: the values of the graph's inputs, by node; values that are found are added.
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
        # the prologue returns sizes, then saved tensors, then tensors that it makes of the incoming gradients
        saved: Any = container.args[0]
        sizes: Any = container.args[1]
        place = index - len(sizes)
        return value_in_dynamo_graph(saved[place], known) if 0 <= place < len(saved) else node.meta.get("example_value")
    values = value_in_dynamo_graph(container, known)
    return None if values is None else values[index]


def batch_of(gm: torch.fx.GraphModule) -> tuple[int | None, bool]:
    """Return the first size that all tensor arguments of a Dynamo graph share. Parameters and buffers do not count.

    Returns:
        The size in the call that the graph is compiled for, or None if the tensors do not share it; and whether it is
        symbolic. A symbolic size without a hint is ``UNKNOWN_SIZE``.
    """
    sizes, symbolic = set(), False
    for node in gm.graph.find_nodes(op="placeholder"):
        given, example = node.meta.get("grapharg"), node.meta.get("example_value")
        source = getattr(given, "source", None)
        if source is None or not isinstance(example, torch.Tensor) or not example.dim():
            continue
        guard_source = source.guard_source() if callable(source.guard_source) else source.guard_source
        if "NN_MODULE" not in guard_source.name:
            sizes.add(hint(example.shape[0]))
            symbolic |= isinstance(example.shape[0], torch.SymInt)
    return (sizes.pop(), symbolic) if len(sizes) == 1 else (None, False)


def graph_break_of(gm: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Return the reason and the user's code line of the graph break that ends a graph.

    None if Dynamo did not break the graph.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return first_line(reason.reason), users_line(reason.user_stack)


def graph_breaks() -> list[tuple[frozenset[tuple[str, int]], str, str]]:
    """Return every graph break since Dynamo's last reset.

    Each has the lines on the stack (file, number), the reason, and the user's code line.
    """
    from torch._dynamo.utils import graph_break_reasons

    return [
        (
            frozenset((frame.filename, frame.lineno or 0) for frame in reason.user_stack),
            first_line(reason.reason),
            users_line(reason.user_stack),
        )
        for reason in graph_break_reasons
        if reason.user_stack
    ]


def int_attribute_recompiled_for() -> str | None:
    """Return the integer attribute whose new value makes Dynamo compile the current frame again.

    It is an attribute of a module. None if Dynamo has another reason.
    """
    from torch._dynamo.utils import get_metrics_context

    for line in str(get_metrics_context()._metrics.get("recompile_reason") or "").splitlines():
        if "allow_unspec_int_on_nn_module" in line and (found := re.search(r"([\w.]+) == -?\d+", line)):
            return found[1]
    return None


def compiled_frames() -> list[tuple[str, int, str, str]]:
    """Return the newest 64 frames that Dynamo has compiled or given up on, the oldest of them first.

    Each has the function's file and first line; the reason why Dynamo gave up and the code line at fault, both "" if
    the frame was compiled.
    """
    from torch._dynamo.utils import get_compilation_metrics

    frames = []
    for metrics in get_compilation_metrics():
        if not metrics.fail_reason:
            frames.append((metrics.co_filename or "", metrics.co_firstlineno or 0, "", ""))
        elif metrics.fail_user_frame_filename:
            place = metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno or 0
            if place[0].startswith(OURS):
                place = metrics.co_filename or "", metrics.co_firstlineno or 0
            where = _code_line(*place)
            reason = first_line(metrics.fail_reason)
            frames.append((metrics.co_filename or "", metrics.co_firstlineno or 0, reason, where))
    return frames


DATA_DEPENDENT = "Could not guard on data-dependent expression"


def first_line(reason: Any) -> str:
    """Return the first line of the reason for a graph break; for a call of ``graph_break``, its message.

    Torch has three texts for a branch on a value that is not known, depending on where the branch is. Here it has one
    text.
    """
    if DATA_DEPENDENT in str(reason) or str(reason).startswith("generic_jump"):
        return "Data-dependent branching"
    if (found := re.search(r"User-inserted graph break\. Message: (.+)", str(reason))) and found[1] != "None":
        return found[1]
    return next(iter(str(reason).splitlines()), "no reason given")


def users_line(stack: Any) -> str:
    """Return the innermost code line of a stack that is not in compiled_fsdp."""
    frames = [frame for frame in stack or () if not frame.filename.startswith(OURS)]
    return _code_line(frames[-1].filename, frames[-1].lineno or 0) if frames else "unknown line"


def _code_line(filename: str, number: int) -> str:
    import linecache

    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write an artifact into torch's structured trace (TORCH_TRACE), for tlparse."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)
