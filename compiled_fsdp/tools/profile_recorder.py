"""Names for all that runs inside a profile: graphs, launches and waits, each a ``record_function`` of the profiler.

Names come from two sources. A graph's report lists the collectives that the graph launches, in order. Code outside of
graphs announces the parameters of its launches (``base/watch.py``). A wait finds its launch by the address of the
tensor that it waits for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from compiled_fsdp.base.errors import CompiledFsdpError
from compiled_fsdp.base.watch import Parameter
from compiled_fsdp.buckets.transport import KINDS, kind_of
from compiled_fsdp.compat.autograd import backward_id, process_group_of
from compiled_fsdp.compat.modules import tree_flatten
from compiled_fsdp.compat.profiling import called_through, functional_collectives, is_traced
from compiled_fsdp.reporting.report import GraphLaunch, GraphReport
from compiled_fsdp.state import registry
from compiled_fsdp.tools.words import bucket_name, common_module


class ProfileError(CompiledFsdpError, RuntimeError):
    """A profile has no valid figures, for example because a rank did not leave it."""


@dataclass(eq=False)
class Run:
    """One call of a compiled graph.

    Attributes:
        report: the graph's report.
        name: its phase, and the module that contains its parameters: "forward of layers.3".
        compiled_inside: whether the graph was compiled while the profile was active, and this is its first call.
        to_come: the collectives that it has not launched yet.
        mistake: how its launches differ from the report; "" if they do not.
        names: the names of the parameters in this call, one for each of the report's reads.
    """

    report: GraphReport
    name: str
    compiled_inside: bool
    to_come: list[GraphLaunch]
    mistake: str = ""
    names: tuple[str, ...] = ()


@dataclass(eq=False)
class Launched:
    """One collective that was launched.

    Attributes:
        kind: "gather", "reduce", "all_reduce" (over replicas), "broadcast", or "question".
        name: the name of its bucket, for example "layers.3.* (4)".
        names: the names of all its parameters; empty for a question, and for the model's own collectives.
        bytes: of the full tensors; for an all-reduce, the bytes that are sent.
        ranks: the global ranks of its group.
        numel: elements that this rank gives to it.
        run: the graph's call that launched it; None outside of graphs.
        collective: its bucket's place in ``run.report.collectives``; None if the runtime launched it, or if it is the
            model's own.
        bucket: an object that all collectives of one bucket's launch share. For example, a coalesced bucket on the CPU
            has one collective for each parameter.
    """

    kind: str
    name: str
    names: tuple[str, ...]
    bytes: int
    ranks: tuple[int, ...]
    numel: int
    run: Run | None
    collective: int | None
    bucket: object = field(default_factory=object)

    @property
    def title(self) -> str:
        """Its kind and name, for people: "gather layers.3.* (4)"."""
        return f"{self.kind} {self.name}".strip()


@dataclass(eq=False)
class Span:
    """A named range in the profiler's record.

    Attributes:
        what: "run", "launch", "wait", or "blocking" (launch and wait at once).
        label: its name in the record.
        in_backward: whether it began during a backward.
        step: the value of ``Recorder.steps_ended`` when it began.
        run: the graph's call that it is, or that it lies in.
        launched: for a launch or a wait: the collective.
        thread: the thread that it ran in.
        ran: nanoseconds for which that thread had run on a core, at the beginning and at the end.
    """

    what: str
    label: str
    in_backward: bool
    step: int
    run: Run | None = None
    launched: Launched | None = None
    thread: int = 0
    ran: tuple[int, int] = (0, 0)


@dataclass
class _Announced:
    kind: str
    names: tuple[str, ...]
    bytes: int
    bucket: object


class _OfThread(threading.local):
    """The state of one thread, because forward and backward may run in different threads."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.announced: list[_Announced] = []
        # The first parameter of the compiled region that was called last, and one of the layer that the graph runs for.
        self.called_for: int | None = None
        self.layer: Parameter | None = None
        self.in_op = False

    @contextlib.contextmanager
    def only_once(self) -> Iterator[None]:
        """Surround an op: under a dispatch mode, as in compiled code's first call, it is called again from inside."""
        self.in_op = True
        try:
            yield
        finally:
            self.in_op = False


@dataclass
class Recorder:
    """The watcher of a profile (``base/watch.py``).

    Attributes:
        known: the reports of graphs that were compiled before or have run, by their ``id``.
        param_ids: of the model's parameters; graphs of other models are not recorded.
        spans: the recorded ranges, in the order in which they began.
        steps_ended: how often ``step()`` was called.
        mistakes: for each graph call whose launches differ from the report: how they differ.
    """

    known: dict[int, GraphReport]
    param_ids: frozenset[int]
    spans: list[Span] = field(default_factory=list)
    steps_ended: int = 0
    mistakes: list[str] = field(default_factory=list)
    _thread: _OfThread = field(default_factory=_OfThread)
    # By the address of the tensor to wait for.
    _in_flight: dict[int, Launched] = field(default_factory=dict)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Record launches and waits while the context lasts."""
        functions: dict[Any, Callable[..., Any]] = {}
        for op in functional_collectives():
            kind = kind_of(op)
            if kind is not None:
                functions[op] = partial(self._launch, kind)
            elif op._opname == "wait_tensor":
                functions[op] = self._wait
        with called_through(functions):
            yield

    def check(self) -> None:
        """Raise ProfileError if a graph's launches differ from its report, because names would be wrong."""
        if self.mistakes:
            raise ProfileError(
                f"profile: {self.mistakes[0]}. Calls that Python does not make, as in CUDA graphs or with Inductor's "
                "cpp_wrapper, have no names; switch those off to profile."
            )

    # ---- methods of a Watcher (base/watch.py) ------------------------------------------------------------------------
    @contextlib.contextmanager
    def graph(self, report: GraphReport) -> Iterator[None]:
        """Record a call of a graph; to be entered around it."""
        thread = self._thread
        if not report.param_ids & self.param_ids:
            yield
            return
        if report.phase != "backward" and thread.called_for is not None:
            thread.layer = registry.find(thread.called_for)
        names = [name for name, _ in _names(report, range(len(report.reads)), thread.layer)]
        name = f"{report.phase} of {common_module(names) or 'the model'}" if names else report.phase
        run = Run(report, name, id(report) not in self.known, list(report.launches))
        self.known[id(report)] = report
        thread.run = run
        try:
            with self._span(Span("run", name, backward_id() != -1, self.steps_ended, run)):
                yield
        finally:
            run.names = tuple(name for name, _ in _names(report, range(len(report.reads)), thread.layer))
            thread.run = thread.layer = thread.called_for = None
        if run.to_come and not run.mistake:
            run.mistake = f"{len(run.to_come)} of its {len(report.launches)} collectives were not seen"
        if run.mistake:
            self.mistakes.append(f"the {name}: {run.mistake}")

    def call_for(self, param_id: int) -> None:
        """Note the first parameter of the compiled region that is called now."""
        self._thread.called_for = param_id

    def reads(self, parameters: Sequence[Parameter]) -> None:
        """Note parameters of the running graph."""
        if self._thread.layer is None and parameters:
            self._thread.layer = parameters[0]

    def expect(self, kind: str, calls: Sequence[Sequence[Parameter]], sizes: Sequence[int]) -> None:
        """Note the parameters and bytes of the next launches."""
        names = tuple(parameter.name for call in calls for parameter in call)
        self._thread.announced = [_Announced(kind, names, sum(sizes), object())] * len(calls)

    @contextlib.contextmanager
    def blocking(self, name: str) -> Iterator[None]:
        """Record a collective that the host waits for at once."""
        launched = Launched("question", name, (), 0, (), 1, self._thread.run, None)
        with self._span(self._of("blocking", launched)):
            yield

    # ---- ops ---------------------------------------------------------------------------------------------------------
    def _launch(self, op_kind: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
        if self._thread.in_op or not tensors or is_traced(tensors):
            return op(*args, **kwargs)
        launched = self._identify(op_kind, tensors, _ranks_of(args, kwargs))
        with self._span(self._of("launch", launched)), self._thread.only_once():
            result = op(*args, **kwargs)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            self._in_flight[tensor.data_ptr()] = launched
        return result

    def _wait(self, op: Callable[..., Any], tensor: Tensor) -> Any:
        if self._thread.in_op or is_traced([tensor]):
            return op(tensor)
        launched = self._in_flight.pop(tensor.data_ptr(), None)
        if launched is None:  # it was waited for already, or launched before the profile
            return op(tensor)
        with self._span(self._of("wait", launched)), self._thread.only_once():
            return op(tensor)

    def _identify(self, op_kind: str, tensors: Sequence[Tensor], ranks: tuple[int, ...]) -> Launched:
        thread, numel = self._thread, sum(tensor.numel() for tensor in tensors)
        sent = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        kind = KINDS[op_kind].does
        if thread.announced:
            announced = thread.announced.pop(0)
            name = bucket_name(announced.names)
            return Launched(
                announced.kind, name, announced.names, announced.bytes, ranks, numel, thread.run, None, announced.bucket
            )  # fmt: skip
        size = sent * len(ranks) if kind == "gather" else sent
        launch = self._next_of_graph(op_kind)
        if launch is None or launch.collective is None or thread.run is None:
            return Launched(kind, "of the model's own", (), size, ranks, numel, thread.run, None)
        report = thread.run.report
        collective = report.collectives[launch.collective]
        found = _names(report, collective.bucket.reads, thread.layer)
        names = tuple(name for name, _ in found)
        unsure = "" if all(sure for _, sure in found) else " or of an equal layer"
        kind = collective.bucket.kind if kind != "all_reduce" else kind
        size = size if kind == "all_reduce" else collective.bucket.bytes
        bucket = thread.run, launch.collective, kind
        title = bucket_name(names) + unsure
        return Launched(kind, title, names, size, ranks, numel, thread.run, launch.collective, bucket)

    def _next_of_graph(self, op_kind: str) -> GraphLaunch | None:
        run = self._thread.run
        if run is None or not run.report.launches or run.mistake:
            return None
        if not run.to_come:
            run.mistake = f"it launched more than its {len(run.report.launches)} collectives"
            return None
        launch = run.to_come.pop(0)
        if launch.op != op_kind:
            number = len(run.report.launches) - len(run.to_come)
            run.mistake = f"its collective number {number} was to be {launch.op}, but is {op_kind}"
            return None
        return launch

    # ---- spans -------------------------------------------------------------------------------------------------------
    def _of(self, what: str, launched: Launched) -> Span:
        label = launched.title if what == "blocking" else f"{launched.title}: {what}"
        return Span(what, label, backward_id() != -1, self.steps_ended, self._thread.run, launched)

    @contextlib.contextmanager
    def _span(self, span: Span) -> Iterator[None]:
        self.spans.append(span)
        begin = time.thread_time_ns()
        try:
            with record_function(span.label):
                yield
        finally:
            span.thread, span.ran = threading.get_ident(), (begin, time.thread_time_ns())


def _ranks_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the global ranks of a functional collective's group, which is its last argument."""
    group = kwargs.get("group_name", args[-1])
    return tuple(dist.get_process_group_ranks(process_group_of(group)))


def _names(report: GraphReport, reads: Sequence[int], layer: Parameter | None) -> list[tuple[str, bool]]:
    """Return the names of the parameters of some of a graph's reads, and whether each name is certain.

    Equal layers share a graph, whose report has the names of the first layer. ``layer`` is a parameter of the layer
    that the graph runs for now.
    """
    blocks = {read.block_number for read in report.reads}
    shared = report.is_fragment and len(report.param_ids) > len({read.name for read in report.reads})
    at_place: dict[int, str] = {}
    if layer is not None and len(blocks) == 1:
        unit = registry.unit_of(registry.parameter_of(layer.param_id))
        block = registry.parameter_of(layer.param_id).block
        at_place = {p.read_spec.position: p.name for p in unit.parameters if p.block == block}
    known = {read.index: read for read in report.reads}
    return [
        (at_place.get(known[i].position, known[i].name), known[i].position in at_place or not shared) for i in reads
    ]
