"""The Dynamo backend: options in, reads found, joint graph marked and cut, passes, code out.

    Dynamo graph -> nested regions inlined -> find_region -> AOTAutograd's joint graph -> reshard -> cut
                 -> bucket, schedule, lower, verify -> Inductor

Both code generators take the same two functions: ``Compilation.partition`` cuts the joint graph,
``Compilation.rewrite`` runs the passes on each graph. Neither is a collective: what ranks must agree on goes through
``agreement.py``.
"""

# Why: docs/design.md, note N34; docs/design.md, note N38; docs/design.md, note N39

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.fx import GraphModule

from compiled_fsdp import compat
from compiled_fsdp.comm.logs import speaks_for_all
from compiled_fsdp.comm.plain_data import from_json
from compiled_fsdp.compiler.agreement import agreement_of
from compiled_fsdp.compiler.cached_code import BUILD, CachedCode, Decision, cache_key, keys_of, taken_by_all
from compiled_fsdp.compiler.checks import checked_options
from compiled_fsdp.compiler.cuda_graphs import may_be_captured
from compiled_fsdp.compiler.hardware import (
    groups_of,
    hardware_and_source,
    hardware_of,
    measured_for,
    place_of_group,
    use_bucket_kernels,
)
from compiled_fsdp.compiler.memory_budget import budget_in_bytes, bytes_outside_graph
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.question import Signature
from compiled_fsdp.compiler.recompile_limit import compile_past_limits
from compiled_fsdp.compiler.region import Region, find_region, model_of
from compiled_fsdp.compiler.shared_code import noting_parameters
from compiled_fsdp.compiler.unintended import warn_if_unsharded, warn_of_int_attributes
from compiled_fsdp.compiler.user_buckets import PatternsDiffer, user_buckets
from compiled_fsdp.passes import plan_pass
from compiled_fsdp.passes.context import PassContext
from compiled_fsdp.passes.cut import cut
from compiled_fsdp.passes.graph import is_ours, keeps_order, show_shared_memory
from compiled_fsdp.passes.pipeline import GRAPH_PASSES, JOINT_PASSES, run_on_halves, run_passes
from compiled_fsdp.passes.plan import GraphPlan
from compiled_fsdp.passes.plan.convert import PlanDoesNotFit
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.reporting import lines
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from compiled_fsdp.reporting.lines import best_effort
from compiled_fsdp.reporting.report import GraphReport, collectives_of, launches_of
from compiled_fsdp.sharding.failures import RanksDiffer
from compiled_fsdp.sharding.heartbeat import beating
from compiled_fsdp.sharding.process_groups import ShardGroup

_SHARED = float | tuple[int, ...]  # what ranks agree on before they cut a joint graph
log = logging.getLogger(__name__)
for _log in (log, *map(logging.getLogger, (cut.__module__, plan_pass.__name__, run_passes.__module__))):
    speaks_for_all(_log)


@compat.guards_breaks
def compiled_fsdp(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(model, backend="compiled_fsdp")`` calls with each graph.

    Args:
        gm: the graph.
        example_inputs: its inputs in the first call.
        options: see ``Options``.
        mode: as for torch's default backend.

    A mistake of the user's (an unknown option, ranks that differ, a module of torch's own FSDP2) is raised when the
    compiled code is called, not here: Dynamo would wrap it, and ``suppress_errors`` would turn it into silent eager.
    """
    try:
        compat.inline_nested_regions(gm)
    except NotImplementedError as error:
        return _raiser(error)
    region = find_region(gm, example_inputs)
    try:
        parsed = checked_options(options, mode, region, example_inputs)
    except (ValueError, NotImplementedError) as error:
        if region.groups:
            agreement_of(_widest(region)).abandon(error)
        return _raiser(error)
    try:
        with beating(agreement_of(_widest(region)).liveness if region.groups else None):
            return Compilation(gm, example_inputs, region, parsed, mode).compile()
    except (RanksDiffer, PlanDoesNotFit, OverBudget, PatternsDiffer) as error:
        return _raiser(error)


compiled_fsdp.reset = lambda: (COMPILE_LOG.clear(), compat.forget_breaks())  # type: ignore  # torch._dynamo.reset()


def _widest(region: Region) -> ShardGroup:
    """The group whose ranks agree on the region's plan: of several the largest, which mostly holds the others."""
    return max(region.groups, key=lambda group: len(group.ranks))


def _raiser(error: Exception) -> Callable[..., Any]:
    """Code that raises ``error`` and is compiled anew afterwards.

    If it were kept, an equal model, which may be all right by then, would run it, too.
    """
    code = compat.code_being_compiled()

    def fail(*_: Any) -> Any:
        if code is not None:
            compat.forget_code(code)
        raise error

    return fail


class Compilation:
    """One Dynamo graph on its way to code.

    Attributes:
        gm: the graph.
        inputs: of the call that it is compiled for.
        region: the graph's reads.
        options: the backend's.
        mode: as for torch's default backend.
        graph_break: why Dynamo ended the graph there and the user's code line, if it broke.
        signature: what has to be the same on all ranks.
        param_names: of the region's reads.
        batch: the first size of the tensors that the graph is called with, None where they share none; and whether it
            is symbolic.
        pending: of the graph that is being rewritten or compiled.
        reports: of the graphs that are compiled.
        decisions: that the ranks have agreed on for them, in order.
    """

    def __init__(self, gm: GraphModule, inputs: list[Any], region: Region, options: Options, mode: str | None) -> None:
        self.gm, self.inputs, self.region, self.options, self.mode = gm, inputs, region, options, mode
        self.graph_break = best_effort("reason for a graph break", lambda: compat.graph_break_of(gm), None)
        # A plan made before measure_hardware is not one for what it measured.
        chosen = [f"option {field.name}={getattr(options, field.name)!r}" for field in dataclasses.fields(options)]
        chosen += [f"{measured_for(region) or 'nothing'} measured", *BUILD]
        if not region.on_cpu:  # what our kernels pack has gaps, which are sent: no rank may pack otherwise
            chosen.append(f"Triton is {'there' if compat.has_triton_package() else 'missing'}")
        self.signature = ("\n".join(chosen), *self.region.signature())
        self.param_names = tuple(read.name for read in region.reads)
        unknown: tuple[int | None, bool] = None, False
        self.batch = best_effort("batch size", lambda: compat.batch_of(gm), unknown)
        self.pending: GraphReport | None = None
        self.reports: list[GraphReport] = []
        self.decisions: list[Decision] = []
        self._group = _widest(region) if region.groups else None
        self._agreement = None if self._group is None else agreement_of(self._group)
        # Whether this rank alone compiles another variant of a region that the ranks have agreed on before.
        self._is_variant = self._agreement is not None and self._agreement.already_agreed(self.signature, "code")
        if any(len(group.ranks) > 1 for group in region.groups):
            compile_past_limits(compiled_fsdp)
        best_effort("frames that Dynamo gave up on", COMPILE_LOG.collect_failed_frames, None)
        best_effort("reason for a compile", warn_of_int_attributes, None)
        if not self.region.reads:
            warn_if_unsharded()

    def compile(self) -> Callable[..., Any]:
        """Code for the graph, once every rank has some: a rank that failed would leave the others in a collective."""
        _trace("compiled_fsdp_dynamo_graph", self.gm)
        try:
            code = self._generate()
        except RanksDiffer:
            raise
        except BaseException as error:
            # The others know nothing of a variant that one rank compiles alone: they would take its failure for one of
            # what comes next.
            if self._agreement is not None and not self._is_variant and not compat.is_dynamo_restart(error):
                self._agreement.abandon(error)
            raise
        self._agree("code", lambda: "")
        if self.options.codegen == "inductor":
            best_effort("note for the cache", self._keep, None)
        code = noting_parameters(code, self.region, self.reports, self.options)
        # Compiled code keeps this object, which must not keep the first batch, its autograd graph or process groups.
        del self.gm, self.inputs, self.region, self._agreement, self._group, self.decisions
        return code

    def _generate(self) -> Callable[..., Any]:
        if self.options.codegen == "aot_eager":
            return compat.aot_compile(
                self.gm, self.inputs, partition=self.partition, rewrite=self.rewrite, compiled=self.compiled
            )
        return compat.inductor_compile(
            self.gm,
            self.inputs,
            partition=self.partition,
            rewrite=self.rewrite,
            compiled=self.compiled,
            may_be_captured=lambda gm: may_be_captured(gm, self.region),
            keeps_order=keeps_order,
            trusts=lambda op: is_ours(op) and self.options.verify != "full",
            # compiled autograd's graphs hold functions of this process
            take_cached=None if self.region.kind == "backward" else self._take_cached,
            key=cache_key(self.options, self.region, self._context("joint"), self.inputs),
            reuse_buffers=not self.region.on_cpu,
            user_options=self.options.inductor,
            mode=self.mode,
        )

    # ---- code from the cache -----------------------------------------------------------------------------------------
    def _take_cached(self, found: Sequence[compat.LoadedCode]) -> Sequence[compat.OnRun] | None:
        """What to call whenever the graphs that the cache has code for run; None if they are to be compiled."""
        nothing: tuple[CachedCode | None, dict[str, GraphReport]] = None, {}
        cached, reports = best_effort("code from the cache", lambda: self._cached(found), nothing)
        if self._agreement is not None:
            names, model = self.param_names, self._model
            cached = taken_by_all(cached, self._agreement, self.signature, names, model, is_variant=self._is_variant)
        if cached is None:
            return None
        for report in reports.values():
            self._note(report)
        return [reports[code.key].about_to_run for code in found]

    def _cached(self, found: Sequence[compat.LoadedCode]) -> tuple[CachedCode | None, dict[str, GraphReport]]:
        """What is known of code that was found, and its graphs' reports by Inductor's key."""
        keys = keys_of(found)
        cached = CachedCode.load(keys) if found else None
        reports = {} if cached is None else {key: self._report("") for key in keys}
        for report, text in zip(reports.values(), () if cached is None else cached.reports, strict=True):
            report.restore(text)
        return cached, reports

    def _keep(self) -> None:
        """Write down what a later process has to know, if it finds this compile's code in the cache."""
        if self.region.kind == "backward" or not compat.code_caches_are_on():
            return
        keys = [report.cache_key for report in self.reports if report.cache_key is not None]
        if len(keys) == len(self.reports) and not any(report.from_cache for report in self.reports):
            texts = tuple(report.to_json() for report in self.reports)
            CachedCode(tuple(self.decisions), texts).save(keys)

    # ---- joint graph -------------------------------------------------------------------------------------------------
    def partition(self, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Mark what is gathered again in backward and cut the graph."""
        ctx = self._context("joint")
        halves = cut(
            joint,
            ctx,
            mark=lambda gm, ctx: run_passes(JOINT_PASSES, gm, ctx),
            partition=lambda gm: compat.min_cut_partition(gm, joint_inputs, **kwargs),
            agree=lambda topic, propose: from_json(_SHARED, self._agree(topic, lambda: json.dumps(propose()))),
        )
        run_on_halves(*halves, ctx)
        show_shared_memory(halves[0])
        return halves

    # ---- each graph --------------------------------------------------------------------------------------------------
    def rewrite(self, gm: GraphModule, phase: str) -> GraphModule:
        """Run the passes on a forward, backward or inference graph."""
        phase = "backward" if self.region.kind == "backward" else phase
        report = self._report(phase)
        ctx = self._context(phase)

        def record(name: str, graph: GraphModule) -> None:
            if name == "schedule":
                report.planned = best_effort("text of a graph", lambda: _text(graph), "")
            log.debug("%s graph after %s:\n%s", phase, name, lines.LazyText(lambda: _text(graph)))

        ctx.record = record
        _trace(f"compiled_fsdp_{phase}_before", gm)
        gm = run_passes(GRAPH_PASSES, gm, ctx)
        _trace(f"compiled_fsdp_{phase}_after", gm)
        report.note_plan(ctx)
        places = partial(collectives_of, gm, ctx, self.region.reads)
        report.collectives = best_effort("places of collectives", places, ())
        report.launches = best_effort("launches of a graph", lambda: launches_of(gm), ())
        self.pending = report
        return gm

    def compiled(self, gm: GraphModule, result: Any) -> compat.OnRun:
        """Called when there is code for a rewritten graph; returns what is to be called whenever that code runs.

        ``result`` is Inductor's, or None.
        """
        report = self.pending
        assert report is not None
        report.cache_key = getattr(result, "_fx_graph_cache_key", None)
        self._note(report)
        return report.about_to_run

    def _report(self, phase: str) -> GraphReport:
        region = self.region
        hardware, source = hardware_and_source(self.options, region)
        return GraphReport(
            phase,
            region.reads,
            region.param_ids,
            self.graph_break,
            region.is_fragment,
            *self.batch,
            hardware=f"{hardware.name} ({source})",
        )

    def _note(self, report: GraphReport) -> None:
        self.reports.append(report)
        COMPILE_LOG.graphs.append(report)
        best_effort("line for a compiled graph", lambda: lines.log_graph(log, report), None)

    def _context(self, phase: str) -> PassContext:
        hardware = hardware_of(self.options, self.region)
        resolved = {
            "phase": phase,
            "reads": {read.index: read for read in self.region.reads},
            "groups": {label: groups_of(group, hardware) for label, group in enumerate(self.region.groups)},
            "place_of_group": partial(place_of_group, hardware=hardware),
            "bucket_option": self.options.bucket,
            "user_bucket_of_read": user_buckets(self.options, self.region),
            "budget": budget_in_bytes(self.options, self.region),
            "bytes_outside_graph": bytes_outside_graph(self.options, self.region),
            "keep_as_sharded": self.options.reshard_after_forward == "as sharded",
            "hardware": hardware,
            "fused": (fused := self.options.codegen == "inductor"),
            "library_copies": fused and self.region.on_cpu,
            "may_use_all_to_all": self.region.on_gloo,
            "overlap_collectives": self.options.overlap,
            "verify_level": self.options.verify,
            "kernels": use_bucket_kernels(self.options, self.region),
            "is_fragment": self.region.is_fragment and self.options.overlap,
            "ends_at_break": self.graph_break is not None,
            "disabled_passes": frozenset(self.options.disable_passes),
            "agree": partial(self._agree_on_plan, phase),
            "already_agreed": partial(self._already_agreed, phase),
        }
        return PassContext(**(self._options_of_passes() | resolved))

    def _options_of_passes(self) -> dict[str, Any]:
        """The options that passes read as the user gave them: PassContext has a field of the same name."""
        names = {field.name for field in dataclasses.fields(PassContext)}
        return {name: value for name, value in vars(self.options).items() if name in names}

    # ---- agreement ---------------------------------------------------------------------------------------------------
    def _agree_on_plan(
        self, phase: str, collectives: Signature, propose: Callable[[], GraphPlan], timeout: timedelta | None = None
    ) -> GraphPlan:
        # The collectives are part of what is agreed on: the same reads have others where an input needs no gradient.
        return GraphPlan.from_json(self._agree(phase, lambda: propose().to_json(), collectives, timeout))

    def _agree(
        self, topic: str, propose: Callable[[], str], collectives: Signature = (), timeout: timedelta | None = None
    ) -> str:
        if self._agreement is None:
            return propose()
        decision = self._agreed(topic, propose, collectives, timeout)
        if topic != "code":  # which is said of each compile anew
            self.decisions.append(Decision(topic, collectives, decision))
        return decision

    def _agreed(self, topic: str, propose: Callable[[], str], collectives: Signature, timeout: timedelta | None) -> str:
        assert self._agreement is not None
        self._is_variant = self._is_variant and self._already_agreed(topic, collectives)
        return self._agreement.agree(
            self.signature, topic, propose, collectives, self.param_names, timeout, self._model
        )

    def _already_agreed(self, topic: str, collectives: Signature) -> bool:
        return self._agreement is not None and self._agreement.already_agreed(self.signature, topic, collectives)

    def _model(self) -> Signature:
        """All parameters over the group in the models that are read, with what has to agree of them."""
        assert self._group is not None
        return model_of(self.region, self._group)


def _trace(name: str, gm: GraphModule) -> None:
    best_effort("trace of a graph", lambda: compat.trace_artifact(name, lambda: _text(gm)), None)


def _text(gm: GraphModule) -> str:
    return gm.print_readable(print_output=False)
