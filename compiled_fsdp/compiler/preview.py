"""The graphs of a call that is not made: captured, cut and planned as a compile would, without running anything.

Dynamo traces as it would in a step: with the user's ``fullgraph``, and without capturing values of tensors
(``.item()``) that a step would break the graph at. Nothing that it translates is run: an exception ends the compile
before.

No rank has to come but this one: nothing is communicated, and nothing agreed on. Where ranks plan together (later, in
the first step) the plan is the first rank's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule

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

# What torch says of nll_loss on the meta device, for one.
_NO_GRADIENT = "an autograd kernel was not registered"


class _Planned(BaseException):
    """Ends a compile once its graphs are planned. No ``Exception``: Dynamo would wrap it, or run the model uncompiled.

    Attributes:
        reports: of the graphs.
    """

    def __init__(self, reports: Sequence[GraphReport]) -> None:
        super().__init__("the graphs are planned")
        self.reports = tuple(reports)


class _NotTraced(BaseException):
    """Ends a call that Dynamo would run uncompiled. No ``Exception``, as ``_Planned``."""


class _Preview(Compilation):
    """A compile that ends with the plans of its graphs."""

    def without_other_ranks(self) -> _Preview:
        """Plan as if this rank were alone: nothing is agreed on."""
        self._group = self._agreement = None
        return self

    def partition(self, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Cut the joint graph as ever, and plan both halves at once."""
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

    def compile(self) -> Any:
        """Plan the graph; never returns code for one with reads."""
        if any(isinstance(given, torch.Tensor) and given.is_meta for given in self.inputs):
            # Inductor's passes on the joint graph make empty tensors of all that is computed on the meta device
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

    Nothing runs, and no other rank has to come. If the graph breaks, the graph in front of the graph break is planned
    where a step compiles the same one: the graph break has to stand in the model's own forward, and not in a loop.
    Everything after a graph break depends on values that are not there. Parameters may be on the meta device.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it, whose options then count.
        args, kwargs: of the call, real tensors or ones on the meta device.
        options: the backend's, instead of those that ``torch.compile`` was given.

    Returns:
        The graphs' reports (forward and backward, or inference), and reason and code line of the graph break, if any.

    Raises:
        ValueError: a bad option.
        RuntimeError: Dynamo is switched off, so that the call would be made.
        NotImplementedError: the meta device has no gradient of one of the model's ops.
    """
    given = compile_arguments(model)
    module = uncompiled(model)
    run = uncompiled_call(module)
    fullgraph, mode = bool(given.get("fullgraph")), None
    if given.get("backend") == BACKEND:
        options, mode = given.get("options") if options is None else options, given.get("mode")
    parsed_options = Options.parse(options)  # a bad one is an error, though the graph may break before it is looked at

    def backend(gm: GraphModule, inputs: list[Any], **_: Any) -> Any:
        inline_nested_regions(gm)
        region = find_region(gm, inputs)
        parsed = checked_options(parsed_options, mode, region, inputs)
        return _Preview(gm, inputs, region, parsed, mode).without_other_ranks().compile()

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise _NotTraced
        return run(*args, **kwargs)  # traced, hooks and all; those of a compiled module would run

    def reports(switches: contextlib.AbstractContextManager[Any]) -> tuple[GraphReport, ...]:
        capture = torch.compile(call, backend=backend, fullgraph=fullgraph, dynamic=given.get("dynamic"))
        try:
            with before_code_runs(_stop), switches:
                capture(*args, **kwargs or {})
        except _Planned as planned:
            return tuple(report for report in planned.reports if report.reads)
        raise AssertionError("Dynamo has run the call that it was to trace")

    with dynamo_untouched(), _meta_allowed(units_of(model)), warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{_NO_GRADIENT}")
        try:
            return reports(errors_at_graph_breaks()), ()
        except _NotTraced:
            raise RuntimeError(
                "explain: Dynamo did not trace the call, which would be made instead of planned: torch.compile is "
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
        except _NotTraced:  # in a loop Dynamo gives up the whole function
            return (), (found,)
        except Exception as error:
            raise _as_users_see_it(error) from error


def _as_users_see_it(error: Exception) -> Exception:
    """What a backend or the model has raised, of an error that Dynamo made of it."""
    cause = cause_in_backend(error)
    if isinstance(cause, UserWarning) and _NO_GRADIENT in str(cause):
        return NotImplementedError(
            f"{str(cause).partition(': ')[0]} has no gradient on the meta device in this torch, and half of the graph "
            "would be missing. Take another op (log_softmax and gather for cross_entropy), or leave the loss out of "
            "the model's forward."
        )
    return cause


def _stop() -> NoReturn:
    """End a compile whose graph reads no parameter, before its code runs."""
    raise _Planned(())


@contextlib.contextmanager
def _meta_allowed(units: Iterable[Unit]) -> Iterator[None]:
    """Parameters that were never materialised are read here, since nothing computes with them."""
    units = list(units)
    for unit in units:
        unit.raise_meta = _nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        for unit in units:
            del unit.raise_meta


def _nothing() -> None:
    """What is called instead of ``raise_meta``."""
