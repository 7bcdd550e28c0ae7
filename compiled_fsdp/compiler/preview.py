"""Plan the graphs of a call without making the call: capture and cut them as a compile would, but run nothing.

Dynamo traces as it would in a step: with the user's ``fullgraph``, and with a graph break wherever a step has one, for
example at ``.item()``. The code that Dynamo makes is not run, because an exception ends the compile before.

No other rank has to take part: nothing is communicated, and nothing is agreed on. In the first step, all ranks take the
first rank's plan.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule

from compiled_fsdp.base.frames import frames_in_one_piece
from compiled_fsdp.base.progress import stage
from compiled_fsdp.compat.compilers import aot_compile
from compiled_fsdp.compat.graphs import copy_of
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
from compiled_fsdp.compiler.region import Region, find_region
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.passes.ways_to_cut import Halves, WaysToCut
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.state.unit import Unit

# From torch's message for an op without a gradient on the meta device, for example nll_loss.
_NO_GRADIENT = "an autograd kernel was not registered"


Plan = tuple[GraphReport, ...] | OverBudget
"""The reports of a call's graphs, or the error that no plan fits into the budget."""


class _Planned(BaseException):
    """Ends a compile as soon as its graphs are planned.

    It is not an ``Exception``, because Dynamo would wrap that, or run the model uncompiled.

    Attributes:
        plans: the plans; none if the graph reads no parameter.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        super().__init__("the graphs are planned")
        self.plans = plans


class _NotTraced(BaseException):
    """Ends a call that Dynamo would run uncompiled. Like ``_Planned``, it is not an ``Exception``."""


class _Preview(Compilation):
    """A compile that ends as soon as its graphs are planned, with each of several options.

    Args:
        gm, inputs, region, mode: as for any compile.
        options: the options. Only their memory budgets may differ.
    """

    def __init__(
        self, gm: GraphModule, inputs: list[Any], region: Region, options: Sequence[Options], mode: str | None
    ) -> None:
        super().__init__(gm, inputs, region, options[0], mode)
        self._all_options = options
        self._group = self._agreement = None  # nothing is agreed on, as if this rank were alone

    def partition(self, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Cut the joint graph as in any compile, and plan both halves at once."""

        def ways() -> WaysToCut:
            return self.ways_to_cut(copy_of(joint), joint_inputs, **kwargs)

        shared_ways = functools.cache(ways)

        def halves() -> Halves:
            return self.cut(ways() if self.options.memory_budget is None else shared_ways())

        self._plan(("forward", "backward"), halves)

    def rewrite(self, gm: GraphModule, phase: str) -> GraphModule:
        """Plan the graph of a call without gradients."""
        self._plan((phase,), lambda: (copy_of(gm),))

    def _plan(self, phases: Sequence[str], graphs: Callable[[], Sequence[GraphModule]]) -> NoReturn:
        plans: list[Plan] = []
        for options in self._all_options:
            self.options, reports = options, []
            try:
                for graph, phase in zip(graphs(), phases, strict=True):
                    super().rewrite(graph, phase)
                    assert self.pending is not None
                    reports.append(self.pending)
            except OverBudget as error:
                plans.append(error.with_traceback(None))  # whose frames hold all graphs
            else:
                plans.append(tuple(report for report in reports if report.reads))
        raise _Planned(plans)

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
        OverBudget: no plan fits into the memory budget.
        ValueError: a bad option.
        RuntimeError: Dynamo is switched off, so that the call would be made.
        NotImplementedError: one of the model's ops has no gradient on the meta device.
    """
    [plan], breaks = plans_under_budgets(model, args, kwargs, options=options)
    if isinstance(plan, OverBudget):
        raise plan
    return plan, breaks


def plans_under_budgets(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | Mapping[str, Any] | None = None,
    budgets: Sequence[float | None] | None = None,
) -> tuple[list[Plan], tuple[tuple[str, str], ...]]:
    """Plan the graphs of ``model(*args, **kwargs)`` under several memory budgets; the model is captured once.

    Args:
        model, args, kwargs, options: as for ``planned_graphs``.
        budgets: bytes, None for no limit; each replaces the option ``memory_budget``. None: as that option says.

    Returns:
        The plan under each budget, and the reason and code line of the graph break, if there is one.

    Raises:
        ValueError, RuntimeError, NotImplementedError: as for ``planned_graphs``.
    """
    given = compile_arguments(model)
    module = uncompiled(model)
    run = uncompiled_call(module)
    fullgraph, mode = bool(given.get("fullgraph")), None
    if given.get("backend") == BACKEND:
        options, mode = given.get("options") if options is None else options, given.get("mode")
    # A bad option is an error even if the graph breaks before the backend is called.
    parsed = Options.parse(options)
    asked = [parsed] if budgets is None else [replace(parsed, memory_budget=budget) for budget in budgets]

    def backend(gm: GraphModule, inputs: list[Any], **_: Any) -> Any:
        inline_nested_regions(gm)
        region = find_region(gm, inputs)
        checked = [checked_options(one, mode, region, inputs, runs=False) for one in asked]
        return _Preview(gm, inputs, region, checked, mode).compile()

    nothing: list[Plan] = [()] * len(asked)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise _NotTraced
        return run(*args, **kwargs)  # traced, hooks included; a call of the compiled module would run its hooks

    def plans(switches: contextlib.AbstractContextManager[Any]) -> list[Plan]:
        capture = torch.compile(call, backend=backend, fullgraph=fullgraph, dynamic=given.get("dynamic"))
        try:
            with before_code_runs(_stop), switches:
                capture(*args, **kwargs or {})
        except _Planned as planned:
            return list(planned.plans) or nothing
        raise AssertionError("Dynamo has run the call that it was to trace")

    with stage("planning a step"), dynamo_untouched(), _meta_allowed(units_of(model)), warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{_NO_GRADIENT}")
        try:
            return plans(errors_at_graph_breaks()), ()
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
                return nothing, (found,)
        try:
            return plans(graphs_in_front_of_breaks()), (found,)
        except _NotTraced:  # at a graph break in a loop, Dynamo gives up the whole function
            return nothing, (found,)
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
