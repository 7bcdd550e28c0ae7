"""Tell compiled code that equal layers share which parameters it is called with.

Reports, the user's own buckets and the follower of plans need to know. For example, code that was compiled for the
first layer's parameters follows the third layer's plan when the third layer calls it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from compiled_fsdp.base import watch
from compiled_fsdp.compat.autograd import backward_id
from compiled_fsdp.compat.compiled_autograd import compiled_autograd_runs
from compiled_fsdp.compiler.following import parameters_of_call
from compiled_fsdp.compiler.options import Options
from compiled_fsdp.compiler.region import Region
from compiled_fsdp.compiler.user_buckets import check_same_buckets
from compiled_fsdp.ops.autograd import follow_in_backward
from compiled_fsdp.reporting.report import GraphReport
from compiled_fsdp.runtime.context import RUNTIME
from compiled_fsdp.runtime.followed import BoundPlan
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.registry import unit_of

Code = Callable[..., Any]


def with_parameters(
    code: Code,
    region: Region,
    reports: list[GraphReport],
    options: Options,
    plan: BoundPlan | None,
    follows: dict[int, int] | None,
) -> Code:
    """Return ``code`` so that each call notes in the reports of its graphs which parameters it is called with.

    Args:
        code: the code of a region's graphs.
        region: the region that it was compiled from.
        reports: the reports of its graphs.
        options: the compile's options; the patterns in ``bucket`` must give each layer the same buckets.
        plan: the plan that consists of the code's collectives, or that the code follows; None without other ranks.
        follows: if the code launches no collective and follows ``plan``: the number of gradients that it brings for
            each read. Otherwise None.
    """
    places = region.id_places
    if region.kind == "backward":
        return _in_compiled_autograd(code, region, plan, follows)
    if not places or places[0] is None:
        return code
    reads, compiled_for, patterns = region.reads, region.param_ids, options.bucket
    which = tuple(dict.fromkeys(place[0] for place in places if place is not None))
    first, position = places[0]
    kind, is_broken, retained = region.kind, region.is_broken, region.retained
    # Reads that need no gather. The plan may still reduce their gradients.
    full = [n for n, read in enumerate(reads) if read.already_unsharded or (kind == "training" and read.world == 1)]
    noted: dict[tuple[int, ...], _Call] = {}  # by id() of tensors, which those of another model may get later

    def call_of(args: tuple[Any, ...]) -> _Call:
        tensors = [args[place] for place in which]
        key = tuple(map(id, tensors))
        call = noted.get(key)
        if call is None or any(known() is not given for known, given in zip(call.ids, tensors, strict=True)):
            param_id = int(args[first][position])
            if param_id not in compiled_for:
                check_same_buckets(patterns, reads, param_id)
            for report in reports:
                report.param_ids |= {param_id}
                report.first_params |= {param_id}
            call = noted[key] = _Call(tensors, plan, parameters_of_call(args, places))
        return call

    def without_retained(results: Any, call: _Call) -> Any:
        if not retained:
            return results
        parameters, end = call.parameters(), len(results) - len(retained)
        for read, full in zip(retained, results[end:], strict=True):
            unit_of(parameters[read]).retain(parameters[read], full)
        return results[:end]

    def run(*args: Any) -> Any:
        RUNTIME.saved_tensors.stop()
        if (watcher := watch.current()) is not None:
            watcher.call_for(int(args[first][position]))
        call = call_of(args)
        if backward_id() != -1:
            call.takes_part()
        if call.bound is not None:
            RUNTIME.follower.other_code_begins(call.bound)
        return without_retained(code(*args), call)

    def follow(*args: Any) -> Any:
        RUNTIME.saved_tensors.stop()
        call = call_of(args)
        parameters = call.parameters()
        if backward_id() != -1:
            call.takes_part()
        RUNTIME.follower.code_begins(parameters, is_broken=is_broken)
        if full:
            RUNTIME.follower.note_full_by_block(parameters[0], [parameters[place] for place in full], kind)
        result = without_retained(code(*args), call)
        bound = RUNTIME.follower.code_ends(parameters, follows or {})
        return result if bound is None or kind == "inference" else follow_in_backward(result, bound)

    return run if follows is None else follow


def _in_compiled_autograd(code: Code, region: Region, plan: BoundPlan | None, follows: dict[int, int] | None) -> Code:
    """Return ``code`` of compiled autograd's graph, whose parameters are always those that it was compiled for."""
    if plan is None:
        return code
    bound = plan
    parameters = [weakref.ref(parameter) for parameter in region.parameters]

    def run(*args: Any) -> Any:
        bound.begins()
        return code(*args)

    def follow(*args: Any) -> Any:
        brings = Counter[ShardedParameter]()
        for read, reference in enumerate(parameters):
            if (parameter := reference()) is not None:
                brings[parameter] += (follows or {}).get(read, 0)
        RUNTIME.follower.graph_begins(bound, brings)
        result = code(*args)
        RUNTIME.reducer.end_graph()
        RUNTIME.follower.graph_ends(brings)
        return result

    return run if follows is None else follow


class _Call:
    """The parameters that shared code is called with.

    Attributes:
        ids: the tensors with the parameters' numbers.
        bound: the code's plan for these parameters; None without other ranks.
    """

    def __init__(
        self, tensors: list[Any], template: BoundPlan | None, parameters: list[ShardedParameter] | None
    ) -> None:
        self.ids = [weakref.ref(tensor) for tensor in tensors]
        self._parameters = [weakref.ref(parameter) for parameter in parameters or ()]
        self.bound = None
        if template is not None and parameters is not None:
            follower = RUNTIME.follower
            same = follower.known.same(template.plan, template.kind, parameters)
            self.bound = same or follower.learn_shared(template.plan, template.kind, parameters)

    def parameters(self) -> list[ShardedParameter]:
        """Return the parameters of the reads, as far as their model is alive."""
        return [parameter for reference in self._parameters if (parameter := reference()) is not None]

    def takes_part(self) -> None:
        """Note that a backward runs the code again, for example in a checkpoint.

        Another backward may run inside of it. The units' gradients are then complete only at the end of the outer one.
        In compiled autograd nothing is noted, because its graph has all gradients.
        """
        if compiled_autograd_runs():
            return
        for unit in dict.fromkeys(map(unit_of, self.parameters())):
            unit.eager.in_parts |= unit.is_group
            RUNTIME.reducer.take_part(unit)
