"""Plan the graphs of a call without making the call: capture and cut them as a compile would, but run nothing.

Dynamo traces as it would in a step: with the user's ``fullgraph``, and with a graph break wherever a step has one, for
example at ``.item()``. The code that Dynamo makes is not run, because an exception ends the compile before.

No other rank has to take part: nothing is communicated, and nothing is agreed on. In the first step, all ranks take the
first rank's plan.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule

from compiled_fsdp.base.frames import frames_in_one_piece
from compiled_fsdp.base.progress import stage
from compiled_fsdp.compat.compilers import aot_compile
from compiled_fsdp.compat.nested_regions import inline_nested_regions
from compiled_fsdp.compat.previews import (
    before_code_runs,
    cause_in_backend,
    compile_arguments,
    dynamo_untouched,
    errors_at_graph_breaks,
    graph_break_in,
    graphs_in_front_of_breaks,
    is_break_of,
    uncompiled,
    uncompiled_call,
)
from compiled_fsdp.compiler.checks import checked_options
from compiled_fsdp.compiler.compilation import Compilation
from compiled_fsdp.compiler.options import BACKEND, Options
from compiled_fsdp.compiler.region import find_region
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.state.unit import Unit

# From torch's message for an op without a gradient on the meta device, for example nll_loss.
_NO_GRADIENT = "an autograd kernel was not registered"


class _Planned(BaseException):
    """Ends a compile as soon as its graphs are planned.

    It is not an ``Exception``, because Dynamo would wrap that, or run the model uncompiled.

    Attributes:
        reports: the reports of the graphs.
    """

    def __init__(self, reports: Sequence[GraphReport]) -> None:
        super().__init__("the graphs are planned")
        self.reports = tuple(reports)


class _NotTraced(BaseException):
    """Ends a call that Dynamo would run uncompiled. Like ``_Planned``, it is not an ``Exception``."""


class _Preview(Compilation):
    """A compile that ends as soon as its graphs are planned."""

    def without_other_ranks(self) -> _Preview:
        """Plan as if this rank were alone, so that nothing is agreed on."""
        self._group = self._agreement = None
        return self

    def partition(self, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Cut the joint graph as in any compile, and plan both halves at once."""
        for half, phase in zip(super().partition(joint, joint_inputs, **kwargs), ("forward", "backward"), strict=True):
            super().rewrite(half, phase)
            self._keep_report()
        raise _Planned(self.reports)

    def rewrite(self, gm: GraphModule, phase: str) -> GraphModule:
        """Plan the graph of a call without gradients."""
        super().rewrite(gm, phase)
        self._keep_report()
        raise _Planned(self.reports)

    def _keep_report(self) -> None:
        assert self.pending is not None
        self.reports.append(self.pending)

    @frames_in_one_piece
    def compile(self) -> Any:
        """Plan the graph. For a graph with reads, this always ends with ``_Planned``."""
        if any(isinstance(given, torch.Tensor) and given.is_meta for given in self.inputs):
            # Not Inductor, because its passes on the joint graph would replace all values on the meta device by empty
            # tensors.
            aot_compile(self.gm, self.inputs, partition=self.partition, rewrite=self.rewrite, compiled=self.compiled)
        return self._generate(self.gm, self.partition, self.rewrite)


def planned_graphs(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | Mapping[str, Any] | None = None,
) -> tuple[tuple[GraphReport, ...], tuple[tuple[str, str], ...]]:
    """Plan the graphs of ``model(*args, **kwargs)`` as a step would, and find the graph break that ends them.

    Nothing runs, and no other rank has to take part. If there is a graph break, the graph in front of it is planned
    only if a step compiles the same one: the graph break must be in the model's own forward, and not in a loop. The
    graphs behind it are not planned, because they depend on values that nothing has computed. Parameters may be on the
    meta device.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it. The options of ``torch.compile`` count.
        args, kwargs: the arguments of the call: real tensors, or tensors on the meta device.
        options: the backend's options, instead of those that ``torch.compile`` was given.

    Returns:
        The reports of the graphs (forward and backward, or inference), and the reason and code line of the graph break,
        if there is one.

    Raises:
        ValueError: a bad option.
        RuntimeError: Dynamo is switched off, so that the call would be made.
        NotImplementedError: one of the model's ops has no gradient on the meta device.
    """
    given = compile_arguments(model)
    module = uncompiled(model)
    run = uncompiled_call(module)
    fullgraph, mode = bool(given.get("fullgraph")), None
    if given.get("backend") == BACKEND:
        options, mode = given.get("options") if options is None else options, given.get("mode")
    # A bad option is an error even if the graph breaks before the backend is called.
    parsed_options = Options.parse(options)

    def backend(gm: GraphModule, inputs: list[Any], **_: Any) -> Any:
        inline_nested_regions(gm)
        region = find_region(gm, inputs)
        parsed = checked_options(parsed_options, mode, region, inputs, runs=False)
        return _Preview(gm, inputs, region, parsed, mode).without_other_ranks().compile()

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise _NotTraced
        return run(*args, **kwargs)  # traced, hooks included; a call of the compiled module would run its hooks

    def reports(switches: contextlib.AbstractContextManager[Any]) -> tuple[GraphReport, ...]:
        capture = torch.compile(call, backend=backend, fullgraph=fullgraph, dynamic=given.get("dynamic"))
        try:
            with before_code_runs(_stop), switches:
                capture(*args, **kwargs or {})
        except _Planned as planned:
            return tuple(report for report in planned.reports if report.reads)
        raise AssertionError("Dynamo has run the call that it was to trace")

    with stage("planning a step"), dynamo_untouched(), _meta_allowed(units_of(model)), warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{_NO_GRADIENT}")
        try:
            return reports(errors_at_graph_breaks()), ()
        except _NotTraced:
            raise RuntimeError(
                "explain: Dynamo did not trace the call, so it would run and not be planned. Either torch.compile is "
                "switched off (TORCH_COMPILE_DISABLE, torch._dynamo.config.disable, torch.compiler.set_stance), or the "
                "model's forward computes nothing. Switch torch.compile on, or leave the arguments out."
            ) from None
        except Exception as error:
            found = graph_break_in(error)
            if found is None:
                raise _as_users_see_it(error) from error
            if fullgraph or not is_break_of(error, module):
                return (), (found,)
        try:
            return reports(graphs_in_front_of_breaks()), (found,)
        except _NotTraced:  # at a graph break in a loop, Dynamo gives up the whole function
            return (), (found,)
        except Exception as error:
            raise _as_users_see_it(error) from error


def _as_users_see_it(error: Exception) -> Exception:
    """Return the error of the backend or the model that Dynamo has wrapped, in words for users."""
    cause = cause_in_backend(error)
    if isinstance(cause, UserWarning) and _NO_GRADIENT in str(cause):
        return NotImplementedError(
            f"{str(cause).partition(': ')[0]} has no gradient on the meta device in this torch, and half of the graph "
            "would be missing. Take another op (log_softmax and gather for cross_entropy), or leave the loss out of "
            "the model's forward."
        )
    return cause


def _stop() -> NoReturn:
    """End the compile of a graph that reads no parameter, before its code runs."""
    raise _Planned(())


@contextlib.contextmanager
def _meta_allowed(units: Iterable[Unit]) -> Iterator[None]:
    """Return a context in which parameters on the meta device may be read, because nothing computes with them."""
    units = list(units)
    for unit in units:
        unit.raise_meta = _nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        for unit in units:
            del unit.raise_meta


def _nothing() -> None:
    """Stand in for ``raise_meta``."""
