"""Turn one Dynamo graph into code: agree on plans, mark and cut the joint graph, run the passes.

    find_region -> AOTAutograd's joint graph -> reshard -> cut
                -> arrange, plan, bucket, schedule, lower, verify -> Inductor

Both code generators call ``Compilation.partition`` to cut the joint graph, and ``Compilation.rewrite`` to run the
passes on each graph. Neither calls a collective: ranks agree through ``ranks/agreement.py``.

More than 400 lines: code has its own collectives, or those of a plan for another graph, or none, because it follows a
plan. This turns out while the passes run, and one object has to know it.
"""

# Why: docs/design/torch.md, "Passes run before Inductor's cache"; "A backward is compiled with its forward"

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from compiled_fsdp.base.frames import frames_in_one_piece
from compiled_fsdp.base.logs import speaks_for_all
from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.base.progress import Stage, stage
from compiled_fsdp.buckets.agreed_plan import AgreedBucket, AgreedPlan
from compiled_fsdp.compat.code_cache import AGAIN, Again, LoadedCode, OnRun, cache_directory, code_caches_are_on
from compiled_fsdp.compat.compilers import aot_compile, has_triton_package, inductor_compile
from compiled_fsdp.compat.dynamo import batch_of, graph_break_of, is_dynamo_restart, trace_artifact
from compiled_fsdp.compat.graphs import min_cut_partition
from compiled_fsdp.compat.region_calls import EqualLayers, traced_once
from compiled_fsdp.compiler.cached_code import BUILD, CachedCode, Decision, cache_key, keys_of, taken_by_all
from compiled_fsdp.compiler.cuda_graphs import may_be_captured
from compiled_fsdp.compiler.equal_layers import call_equal_layers
from compiled_fsdp.compiler.following import PlanFinder, agreed_plan, check_can_be_followed
from compiled_fsdp.compiler.hardware import (
    groups_of,
    hardware_and_source,
    hardware_of,
    measured_for,
    place_of_group,
    use_bucket_kernels,
    warn_of_other_kernels,
)
from compiled_fsdp.compiler.memory_budget import budget_in_bytes, bytes_outside_graph, host_memory_for_activations
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.precompiled import warn_of_missing_code
from compiled_fsdp.compiler.region import Region, model_of
from compiled_fsdp.compiler.shared_code import with_parameters
from compiled_fsdp.compiler.unintended import warn_if_unsharded, warn_of_int_attributes
from compiled_fsdp.compiler.user_buckets import user_buckets
from compiled_fsdp.passes import plan_pass
from compiled_fsdp.passes.context import ForBackward, PassContext
from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.passes.cut import cut
from compiled_fsdp.passes.graph import is_ours, keeps_order
from compiled_fsdp.passes.pipeline import (
    FOLLOWING_PASSES,
    GRAPH_PASSES,
    INDUCTOR_PASSES,
    JOINT_PASSES,
    run_on_halves,
    run_passes,
)
from compiled_fsdp.passes.plan import GraphPlan
from compiled_fsdp.passes.plan.choose import PlanRules
from compiled_fsdp.passes.plan.convert import PlanDoesNotFit
from compiled_fsdp.passes.views import show_shared_memory
from compiled_fsdp.passes.ways_to_cut import Halves, WaysToCut
from compiled_fsdp.ranks.agreement import CODE, Follows, agreement_of
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.question import Signature, region_for_people
from compiled_fsdp.reporting import lines
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from compiled_fsdp.reporting.lines import best_effort
from compiled_fsdp.reporting.report import GraphReport, collectives_of, launches_of
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.followed import BoundPlan
from compiled_fsdp.state import registry

_SHARED = int | tuple[int, ...]  # the values that ranks agree on before they cut a joint graph
log = logging.getLogger(__name__)
for _log in (log, *map(logging.getLogger, (cut.__module__, plan_pass.__name__, run_passes.__module__))):
    speaks_for_all(_log)


class Compilation:
    """The steps that turn one Dynamo graph into code.

    More than 20 attributes: each step leaves values that later steps need.

    Attributes:
        gm: Dynamo's graph.
        inputs: its inputs in the call that it is compiled for.
        region: the graph's reads.
        options: the backend's options.
        mode: as for torch's default backend.
        graph_break: the reason and the user's code line of the graph break that ends the graph; None if none does.
        signature: the facts that must be the same on all ranks: options and versions, the kind of region, its reads.
        param_names: the names of the region's parameters, in the order of the reads.
        batch: the first size that all tensor arguments share (or None), and whether it is symbolic.
        pending: the report of the graph that is being rewritten or compiled.
        reports: the reports of the graphs that have code.
        decisions: the ranks' decisions about these graphs, in order.
        bound: the agreed plan with the parameters of the first call; None without other ranks.
        gradients: for code that follows a plan which was made for other code: the number of gradients that its backward
            brings, by the index of the read. None for code with collectives of its own.
    """

    def __init__(self, gm: GraphModule, inputs: list[Any], region: Region, options: Options, mode: str | None) -> None:
        self.gm, self.inputs, self.region, self.options, self.mode = gm, inputs, region, options, mode
        self.graph_break = best_effort("reason for a graph break", lambda: graph_break_of(gm), None)
        # Measured hardware is in it, because a plan made before measure_hardware does not fit the measurement.
        chosen = [f"option {field.name}={getattr(options, field.name)!r}" for field in dataclasses.fields(options)]
        chosen += [f"{measured_for(region) or 'nothing'} measured", *BUILD]
        if not region.on_cpu:  # all ranks must pack alike: the gaps that Triton kernels leave are sent, too
            chosen.append(f"Triton is {'there' if has_triton_package() else 'missing'}")
        self.signature = ("\n".join(chosen), *self.region.signature())
        self.param_names = tuple(read.name for read in region.reads)
        unknown: tuple[int | None, bool] = None, False
        self.batch = best_effort("batch size", lambda: batch_of(gm), unknown)
        self.pending: GraphReport | None = None
        self.reports: list[GraphReport] = []
        self.decisions: list[Decision] = []
        self.bound: BoundPlan | None = None
        self.gradients: Counter[int] | None = None
        self._group = region.agreeing_group
        self._agreement = None if self._group is None else agreement_of(self._group)
        self._buckets: dict[str, tuple[AgreedBucket, ...]] = {}
        self._for_backward: ForBackward | None = None
        self._layers = EqualLayers()
        # Whether the ranks have decided to compile; whether this rank may do so twice without the others' knowledge.
        self._compiles_anyway, self._may_begin_again = False, True
        self._has_waited = False  # for another rank of this machine that compiles
        self._generating = Stage("")
        self._finder = PlanFinder(region, self._agreement, self.signature, self._model)
        # The plan to follow after a meeting; whether this region's plan replaces another one.
        self._met_plan: BoundPlan | None = None
        self._replaces = False
        # The plan that this rank posts for the ranks that follow it, if it is not this graph's plan.
        self._leads_with: AgreedPlan | None = None
        # The plan whose collectives this graph must have (``_conform``).
        self._conforms_to: BoundPlan | None = None
        # Not cached: code for another graph's plan, and compiled autograd's graphs (they have functions of this
        # process).
        self._may_be_cached = region.kind != "backward"
        # Whether the ranks have agreed on this region before, so that one rank may compile this variant alone. An
        # agreement for another model does not count, because the other ranks may have other graphs for this model.
        self._is_variant = self._already_agreed(CODE, ()) and self._finder.is_known_model()
        best_effort("frames that Dynamo gave up on", COMPILE_LOG.collect_failed_frames, None)
        best_effort("reason for a compile", warn_of_int_attributes, None)
        if not self.region.reads:
            warn_if_unsharded()

    @frames_in_one_piece
    def compile(self) -> Callable[..., Any]:
        """Return code once all ranks have code, because a rank that failed would leave the others in a collective."""
        _trace("compiled_fsdp_dynamo_graph", self.gm)
        if self.options.trace_equal_layers_once and self.region.kind != "backward":
            self._layers = call_equal_layers(self.gm)
        try:
            follows, code = self._plan_to_follow(), None
            if follows is None:
                try:
                    code = self._generate(self.gm, self.partition, self.rewrite)
                    if self._may_be_cached and self.options.codegen == "inductor":
                        best_effort("note for the cache", self._keep, None)
                    self._agree_on_code()
                except (Follows, PlanDoesNotFit):
                    code, follows = self._conform(self._plan_of_the_others())
            if follows is not None:
                code = self._follow(follows)
            assert code is not None
        except RanksDiffer as error:
            if self._agreement is not None:
                if self._leads_with is not None:  # the others wait for its plan, and do not know of the error
                    self._agreement.abandon(error)
                self._agreement.sharing.say_that_code_is_kept(str(error))
                self._agreement.end_region()  # the next region begins with a meeting of all ranks
            raise
        except BaseException as error:
            # If one rank compiles a variant alone, the others do not know of it. They would take its failure for a
            # failure of the next region.
            is_alone = self._is_variant and self._leads_with is None
            is_alone &= self._agreement is None or not self._agreement.is_awaited
            if self._agreement is not None and not is_alone and not is_dynamo_restart(error):
                self._agreement.abandon(error)
            raise
        code = with_parameters(code, self.region, self.reports, self.options, self.bound, self.gradients)
        # Compiled code keeps this object, which must not keep the first batch, its autograd graph or process groups.
        del self.gm, self.inputs, self.region, self._agreement, self._group, self.decisions, self._finder
        del self._layers
        return code

    def _generate(
        self, gm: GraphModule, partition: Callable[..., Any], rewrite: Callable[..., GraphModule]
    ) -> Callable[..., Any]:
        with stage("tracing forward and backward") as self._generating:
            if self._layers.calls:
                self._may_begin_again = True
                try:
                    with traced_once(self._layers):
                        return self._generate_code(gm, partition, rewrite)
                except Exception as error:
                    # Not if the error came from a decision of all ranks, or from the passes, which agree with them.
                    if self._layers.are_inlined or not self._may_begin_again or is_dynamo_restart(error):
                        raise
                    self._layers.take_back(gm, error)
            return self._generate_code(gm, partition, rewrite)

    def _generate_code(
        self, gm: GraphModule, partition: Callable[..., Any], rewrite: Callable[..., GraphModule]
    ) -> Callable[..., Any]:
        if self.options.codegen == "aot_eager":
            return aot_compile(gm, self.inputs, partition=partition, rewrite=rewrite, compiled=self.compiled)
        return inductor_compile(
            gm,
            self.inputs,
            partition=partition,
            rewrite=rewrite,
            finish=self.for_inductor,
            compiled=self.compiled,
            may_be_captured=lambda gm: may_be_captured(gm, self.region),
            keeps_order=keeps_order,
            trusts=lambda op: is_ours(op) and self.options.verify != "full",
            take_cached=self._take_cached_once if self._may_be_cached else None,
            key=cache_key(self.options, self.region, self._context("joint"), self.inputs),
            reuse_buffers=not self.region.on_cpu,
            user_options=self.options.inductor,
            mode=self.mode,
        )

    # ---- code from the cache -----------------------------------------------------------------------------------------
    def _take_cached_once(self, found: Sequence[LoadedCode], key: str | None) -> Sequence[OnRun] | Again | None:
        """Decide as ``_take_cached``, but only once, because the other ranks decide once.

        If this graph is compiled a second time, because its equal layers are traced one by one after all, the first
        decision was to compile.
        """
        if self._compiles_anyway:
            return None
        self._may_begin_again = False
        taken = self._take_cached(found, key)
        self._may_begin_again = self._compiles_anyway = taken is None
        return taken

    def _take_cached(self, found: Sequence[LoadedCode], key: str | None) -> Sequence[OnRun] | Again | None:
        """Decide on the code that the cache has.

        Args:
            found: the code of each graph.
            key: the cache's key; None if it can hold no code for this graph.

        Returns:
            An ``OnRun`` for each graph that the cache has code for; None if the graphs must be compiled; or AGAIN, once
            another rank of this machine has compiled them.

        Raises:
            Follows: another rank has compiled, but this rank's graph is another one.
        """
        nothing: tuple[CachedCode | None, dict[str, GraphReport]] = None, {}
        cached, reports = best_effort("code from the cache", lambda: self._cached(found), nothing)
        own = cached
        if self._agreement is not None:
            cached, can_share = taken_by_all(
                cached,
                self._agreement,
                self.signature,
                self.param_names,
                is_variant=self._is_variant or self._has_waited,
                key=key,
            )
            shares = can_share and self.options.one_rank_compiles and not self._agreement.liveness.alone
            if shares and not self._agreement.sharing.compiles_here(str(cache_directory())):
                self._agreement.take_part_until_code()
                self._has_waited = True
                return AGAIN
        if cached is None:
            if self._has_waited:
                raise Follows
            warn_of_missing_code(self.signature, found=own is not None, may_be_cached=key is not None)
            return None
        for report in reports.values():
            self._note(report)
        self._buckets = cached.plan.buckets
        return [reports[code.key].about_to_run for code in found]

    def _cached(self, found: Sequence[LoadedCode]) -> tuple[CachedCode | None, dict[str, GraphReport]]:
        """Return the facts kept beside the code that was found, and the reports of its graphs by Inductor's key."""
        keys = keys_of(found)
        cached = CachedCode.load(keys) if found else None
        reports = {} if cached is None else {key: self._report("") for key in keys}
        for report, text in zip(reports.values(), () if cached is None else cached.reports, strict=True):
            report.restore(text)
        return cached, reports

    def _keep(self) -> None:
        """Write down the facts that a later process needs, if it finds this compile's code in the cache."""
        if self.region.kind == "backward" or not code_caches_are_on():
            return
        keys = [report.cache_key for report in self.reports if report.cache_key is not None]
        if len(keys) == len(self.reports) and not any(report.from_cache for report in self.reports):
            texts = tuple(report.to_json() for report in self.reports)
            CachedCode(tuple(self.decisions), texts, self._agreed_plan()).save(keys)

    # ---- joint graph -------------------------------------------------------------------------------------------------
    def partition(self, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Mark the parameters that backward gathers again, and cut the graph."""
        return self.cut(self.ways_to_cut(joint, joint_inputs, **kwargs))

    def ways_to_cut(self, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> WaysToCut:
        """Return the ways to cut a joint graph; the arguments are those of a partitioner."""
        return WaysToCut(
            joint,
            self._context_of_joint(),
            mark_reads=lambda gm, ctx: run_passes(JOINT_PASSES, gm, ctx),
            partition=lambda gm: min_cut_partition(gm, joint_inputs, **kwargs),
        )

    @stage("choosing what forward leaves for backward")
    def cut(self, ways: WaysToCut) -> Halves:
        """Choose a way to cut, and return forward and backward."""
        ctx = self._context_of_joint()
        halves = cut(
            ways,
            ctx,
            agree=lambda topic, propose: from_json(_SHARED, self._agree(topic, lambda: json.dumps(propose()))),
        )
        self._for_backward = ctx.for_backward
        run_on_halves(*halves, ctx)
        show_shared_memory(halves[0])
        return halves

    def _context_of_joint(self) -> PassContext:
        ctx = self._context("joint")
        if (plan := self._conforms_to) is not None:
            anyway = frozenset(
                read
                for read, p in enumerate(self.region.parameters)
                if plan.read_of.get(p.param_id) in plan.gathered("backward")
            )
            return dataclasses.replace(ctx, kept_reads=self._kept_under(plan), gathered_anyway=anyway)
        return ctx

    # ---- each graph --------------------------------------------------------------------------------------------------
    def rewrite(self, gm: GraphModule, phase: str) -> GraphModule:
        """Run the passes on a forward, backward or inference graph."""
        phase = "backward" if self.region.kind == "backward" else phase
        self._generating.goes_on(f"preparing the {phase} graph")
        report = self._report(phase)
        ctx = self._context(phase)

        def record(name: str, graph: GraphModule) -> None:
            if name == "schedule":
                report.planned = best_effort("text of a graph", lambda: _text(graph), "")
            log.debug("%s graph after %s:\n%s", phase, name, lines.LazyText(lambda: _text(graph)))

        ctx.record = record
        _trace(f"compiled_fsdp_{phase}_before", gm)
        with stage(f"planning the {phase} graph"):
            gm = run_passes(GRAPH_PASSES, gm, ctx)
        _trace(f"compiled_fsdp_{phase}_after", gm)
        self._buckets[phase] = ctx.agreed_buckets
        report.note_plan(ctx)
        report.for_backward = self._for_backward if phase == "forward" else None
        warn_of_other_kernels(ctx.hardware, phase, ctx.library_kernels)
        places = partial(collectives_of, gm, ctx, self.region.reads)
        report.collectives = best_effort("places of collectives", places, ())
        report.launches = best_effort("launches of a graph", lambda: launches_of(gm), ())
        self.pending = report
        return gm

    def for_inductor(self, gm: GraphModule, phase: str) -> GraphModule:
        """Change a rewritten graph so that Inductor takes less time for it."""
        phase = "backward" if self.region.kind == "backward" else phase
        self._generating.goes_on(f"generating code for the {phase} graph")
        return run_passes(INDUCTOR_PASSES, gm, self._context(phase))

    def compiled(self, gm: GraphModule, result: Any) -> OnRun:
        """Note that a rewritten graph has code, and return the ``OnRun`` for this code.

        ``result`` is Inductor's result, or None.
        """
        report = self.pending
        assert report is not None
        report.cache_key = getattr(result, "_fx_graph_cache_key", None)
        self._note(report)
        has_collectives = self.region.reads and self.gradients is None
        if report.phase != "backward" or not has_collectives:
            return report.about_to_run

        def backward_runs() -> contextlib.AbstractContextManager[None]:
            RUNTIME.reducer.pass_frozen()
            RUNTIME.follower.backwards.end_run()
            return report.about_to_run()

        return backward_runs

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
            planned_for=hardware,
        )

    def _note(self, report: GraphReport) -> None:
        self.reports.append(report)
        COMPILE_LOG.graphs.append(report)
        best_effort("line for a compiled graph", lambda: lines.log_graph(log, report), None)

    def _context(self, phase: str) -> PassContext:
        hardware = hardware_of(self.options, self.region)
        groups = {label: groups_of(group, hardware) for label, group in enumerate(self.region.groups)}
        resolved = {
            "phase": phase,
            "grad_enabled": self.region.kind != "inference",
            "reads": {read.index: read for read in self.region.reads},
            "groups": groups,
            "place_of_group": partial(place_of_group, hardware=hardware),
            "rules": self._rules(hardware),
            "bytes_outside_graph": bytes_outside_graph(self.options, self.region),
            "host_memory": host_memory_for_activations(self.options, self.region, hardware),
            "hardware": hardware,
            "fused": (fused := self.options.codegen == "inductor"),
            "library_copies": fused and self.region.on_cpu,
            "may_use_all_to_all": self.region.on_gloo,
            "verify_level": self.options.verify,
            "kernels": use_bucket_kernels(self.options, self.region),
            "disabled_passes": frozenset(self.options.disable_passes),
            "agree": partial(self._agree_on_plan, phase),
            "agree_anew": partial(self._agree_on_plan, phase, anew=True),
            "already_agreed": partial(self._already_agreed, phase),
        }
        return PassContext(**(self._options_of_passes() | resolved))

    def _rules(self, hardware: Hardware) -> PlanRules:
        """Return the rules that the plans of the region's graphs must follow."""
        options, region = self.options, self.region
        bucket: Any = options.bucket  # ``Options`` has made tuples of its lists
        return PlanRules(
            bucket=bucket,
            user_buckets=tuple(user_buckets(options, region).items()),
            overlap=options.overlap,
            prefetch=options.prefetch,
            budget=budget_in_bytes(options, region),
            device_bytes=hardware.memory,
            keep_as_sharded=options.reshard_after_forward == "as sharded",
            is_fragment=region.is_fragment and options.overlap,
            gathers_ahead=options.gathers_ahead and options.overlap,
            replicates=any(group.replicas > 1 and group.size > 1 for group in region.groups),
        )

    def _options_of_passes(self) -> dict[str, Any]:
        """Return the options that passes read unchanged: ``PassContext`` has fields with their names."""
        names = {field.name for field in dataclasses.fields(PassContext)}
        return {name: value for name, value in vars(self.options).items() if name in names}

    # ---- agreement ---------------------------------------------------------------------------------------------------
    def _agree_on_plan(
        self, phase: str, collectives: Signature, propose: Callable[[], GraphPlan], anew: bool = False
    ) -> GraphPlan:
        # Part of the question, because the same reads have fewer collectives if an input needs no gradient.
        return GraphPlan.from_json(self._agree(phase, lambda: propose().to_json(), collectives, anew))

    def _agree(self, topic: str, propose: Callable[[], str], collectives: Signature = (), anew: bool = False) -> str:
        if self._agreement is None:
            return propose()
        conforms_to = self._conforms_to
        if conforms_to and not (conforms_to.plan.is_of(topic) and self._already_agreed(topic, collectives)):
            raise Follows
        if self._is_variant and not (self._already_agreed(topic, collectives) and self._fits(topic, collectives)):
            self._ask_for_another_plan(topic, collectives, anew)
        decision = self._agreement.agree(self.signature, topic, propose, collectives, self.param_names)
        self.decisions.append(Decision(topic, collectives, decision))
        return decision

    def _fits(self, topic: str, collectives: Signature) -> bool:
        """Return whether all ranks have a graph with these collectives for these parameters, as far as it is known.

        Equal layers share decisions, but one may have more collectives than another. For example, the input of the
        first one needs no gradient. Ranks might choose different decisions for the next layer.
        """
        assert self._agreement is not None
        if (own := self._finder.own()) is not None:
            return not collectives or own.plan.has(topic, collectives)
        return len(self._agreement.collectives_agreed_on(self.signature, topic)) == 1

    def _ask_for_another_plan(self, topic: str, collectives: Signature, anew: bool) -> None:
        """Ask if all ranks compile this variant, because its graph has other collectives than the known plan.

        Only a plan with more collectives can replace the known one. Otherwise some ranks could run code for one plan
        and some for the other, with collectives that do not match.

        Raises:
            Follows: this rank has to follow a plan in other code.
        """
        assert self._agreement is not None
        agreement, own = self._agreement, self._finder.own()
        replaces = own is not None
        if own is not None and (anew or not own.plan.has_fewer(topic, collectives)):
            raise Follows
        self._met_plan = self._finder.meet((topic, *collectives))
        if self._met_plan is not None:
            raise Follows
        if agreement.others_follow and not replaces:
            # Equal layers have the known plan, and will call this code, too.
            self._leads_with = agreement.plan_of(self.signature)
            self._met_plan = self._finder.learn(self._leads_with)
        # Ranks that follow a plan of this region wait for its last round.
        agreement.forget(self.signature, CODE)
        if self._leads_with is not None:
            raise Follows
        self._is_variant, self._replaces = False, replaces
        if replaces:
            agreement.forget(self.signature, topic)

    def _agree_on_code(self) -> None:
        """Wait until all ranks have code, because a rank that failed would leave the others in a collective."""
        if self._agreement is None:
            return
        if self._agreement.waits_for_code:
            self._agreement.end_last_round()
        else:
            self._agreement.sharing.say_that_code_is_kept()
            self._agreement.agree_on_code(self.signature, self._agreed_plan, self.param_names)
        if self.region.reads and not self._agreement.liveness.alone:
            self.bound = self._learn(self._agreed_plan())

    def _learn(self, plan: AgreedPlan) -> BoundPlan:
        """Note that all ranks have agreed on a plan for the region, in the place of another one if there is one."""
        follower, kind, parameters = RUNTIME.follower, self.region.kind, self.region.parameters
        replaces = self._replaces or follower.known.has_other(plan, kind, parameters)
        bound = follower.known.learn(plan, kind, parameters)
        for unit in dict.fromkeys(map(registry.unit_of, parameters)) if replaces and kind != "backward" else ():
            unit.code_version += "+"  # code for the other plan is invalid from now on
        return bound

    def _agreed_plan(self) -> AgreedPlan:
        return agreed_plan(self.region, self.options, self.signature, self._buckets)

    # ---- code that follows another plan ------------------------------------------------------------------------------
    def _plan_to_follow(self) -> BoundPlan | None:
        """Return the agreed plan that this region's code follows; None if the region has, or gets, its own plan."""
        if self._agreement is None or self._agreement.liveness.alone or not self.region.reads:
            return None
        if (bound := self._finder.known()) is not None:
            return bound
        if self._is_variant:
            return None
        bound = self._finder.meet()
        if not self._already_agreed(CODE, ()):
            return bound
        if bound is None and self._agreement.others_follow:  # the others hear of the plan in rounds
            self._agreement.forget(self.signature)
        elif bound is None or (bound.plan.signature == self.signature and not self._agreement.waits_for_code):
            self._is_variant, bound = True, None  # all ranks have this region's plan, and none leads
        return bound

    def _plan_of_the_others(self) -> BoundPlan:
        """Return the plan to follow, because this rank's graph cannot have the collectives that the ranks agree on."""
        if self._met_plan is not None:
            return self._met_plan
        if self._has_waited:
            assert self._agreement is not None
            return self._learn(self._agreement.plan_of(self.signature))
        own = self._finder.own() if self._is_variant else None
        return own if own is not None else self._finder.of_this_region()

    def _conform(self, bound: BoundPlan) -> tuple[Callable[..., Any] | None, BoundPlan | None]:
        """Generate code with the collectives of a plan that was made for another graph with the same reads.

        Parameters that the plan does not gather in backward are kept from forward on. Parameters that the plan gathers
        in backward are gathered there, even if this graph does not need them. Returns the code and None; or, if the
        graph cannot have these collectives, None and the plan to follow in other code.
        """
        if bound.plan.signature != self.signature or self.region.kind == "backward":
            return None, bound
        self._conforms_to, self._is_variant, self._may_be_cached = bound, True, False
        self.reports.clear()
        try:
            code = self._generate(self.gm, self.partition, self.rewrite)
        except (Follows, PlanDoesNotFit):
            return None, bound
        finally:
            self._conforms_to = None
        self._end_last_round()
        self.bound = bound
        return code, None

    def _follow(self, bound: BoundPlan) -> Callable[..., Any]:
        """Generate code without collectives. The runtime serves its reads and gradients."""
        assert self._agreement is not None
        check_can_be_followed(bound)
        log.info(
            "this rank's code for %s follows the plan of other code, because the other ranks have different code",
            region_for_people(self.signature, self.param_names),
        )
        self.reports.clear()
        self.bound, self.gradients = (bound if self.region.kind == "backward" else None), Counter()
        self._may_be_cached = False
        code = self._generate(
            self.gm, partial(self._partition_following, self._kept_under(bound)), self._rewrite_following
        )
        self._end_last_round()
        return code

    def _kept_under(self, bound: BoundPlan) -> frozenset[int]:
        """Return the reads to keep for backward: those kept anyway, and those that the plan does not gather there."""
        gathered, reads = bound.gathered("backward"), self.region.reads
        return frozenset(
            read
            for read, parameter in enumerate(self.region.parameters)
            if reads[read].keep_for_backward or bound.read_of.get(parameter.param_id) not in gathered
        )

    def _end_last_round(self) -> None:
        """Tell the other ranks that this rank has code that fits a plan of other code."""
        assert self._agreement is not None
        self._agreement.sharing.say_that_code_is_kept()  # ranks that wait for it look, and compile for themselves
        plan, self._leads_with = self._leads_with, None
        if plan is None:
            self._agreement.end_last_round()
        else:
            self._agreement.agree_on_code(self.signature, lambda: plan, self.param_names)

    def _partition_following(self, kept: frozenset[int], joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        ctx = dataclasses.replace(self._context("joint"), kept_reads=kept)
        halves = min_cut_partition(run_passes(JOINT_PASSES, joint, ctx), joint_inputs, **kwargs)
        show_shared_memory(halves[0])
        return halves

    def _rewrite_following(self, gm: GraphModule, phase: str) -> GraphModule:
        phase = "backward" if self.region.kind == "backward" else phase
        ctx = self._context(phase)
        gm = run_passes(FOLLOWING_PASSES, gm, ctx)
        if phase == "backward":
            self.gradients = Counter(ctx.followed_gradients)
        self.pending = self._report(phase)
        self.pending.note_plan(ctx)
        return gm

    def _already_agreed(self, topic: str, collectives: Signature) -> bool:
        return self._agreement is not None and self._agreement.decision(self.signature, topic, collectives) is not None

    def _model(self) -> Signature:
        """Return a line for each parameter over the group in the models that are read, the same on all ranks."""
        assert self._group is not None
        return model_of(self.region, self._group)


def _trace(name: str, gm: GraphModule) -> None:
    best_effort("trace of a graph", lambda: trace_artifact(name, lambda: _text(gm)), None)


def _text(gm: GraphModule) -> str:
    return gm.print_readable(print_output=False)
