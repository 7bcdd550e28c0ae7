"""``profile``: measure a few steps, and show them beside their plans."""

# Why: docs/profiling.md

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from compiled_fsdp.base.renamed import warn_renamed
from compiled_fsdp.base.watch import watched_by
from compiled_fsdp.compat.profiling import profiled_events, profiler_runs
from compiled_fsdp.compiler.hardware import device_name
from compiled_fsdp.frontend.gradient_methods import units_of
from compiled_fsdp.passes.cost import Hardware
from compiled_fsdp.ranks.liveness import Liveness, sign_in
from compiled_fsdp.reporting.compile_log import COMPILE_LOG
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.tools.profile_costs import measured_costs, planned_for, shared_wires
from compiled_fsdp.tools.profile_kernels import KernelCall, kernel_calls
from compiled_fsdp.tools.profile_ranks import Meeting, Together
from compiled_fsdp.tools.profile_recorder import ProfileError, Recorder
from compiled_fsdp.tools.profile_steps import Step, alone_on_wires, steps_in, summary_of
from compiled_fsdp.tools.profile_text import Measurement, measurement
from compiled_fsdp.tools.profile_times import times_of
from compiled_fsdp.tools.timeline import Timeline
from compiled_fsdp.tools.timeline_files import write

WAIT_FOR_RANKS = timedelta(seconds=60)
"""How long ranks wait for one another at the end of a profile."""


def profile(model: nn.Module, *, timeout: timedelta = WAIT_FOR_RANKS) -> StepProfile:
    """Measure a few steps of a sharded, compiled model, each collective beside its plan.

    ::

        with compiled_fsdp.profile(model) as p:
            for batch in batches:
                train_step(batch)
        print(p)
        p.timeline("step.html")

    All ranks that share the model must enter and leave the profile at the same place, because at its end they tell each
    other, through the process group's store, how long their collectives took. The profile is built on
    ``torch.profiler``, whose record has each launch and each wait under the name of its bucket; ``p.trace(FILE)``
    writes the record.

    A step begins with the first graph or collective after a backward. If a step has several backwards, call
    ``p.step()`` after each step. Steps in which a graph is compiled do not count.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it.
        timeout: how long ranks wait for one another at the end.

    Returns:
        A context manager; once it is left, ``print()`` it, or see ``StepProfile``.

    Raises:
        ValueError: the model has no sharded parameter.
        RuntimeError: on entering: another profile, of compiled_fsdp or of torch, is active.
        ProfileError: on leaving: no compiled graph of the model ran, a graph was compiled in every step, a graph ran
            other collectives than its report lists, or a rank did not leave the profile, too.
    """
    parameters = _parameters_of(model, "profile")
    widest = max((parameter.group for parameter in parameters), key=lambda group: len(group.ranks))
    ids = frozenset(parameter.param_id for parameter in parameters)
    device = device_name(parameters[0].device.type)
    return StepProfile(ids, sign_in(widest), widest.ranks, device, timeout)


@contextlib.contextmanager
def record_collective_names(model: nn.Module) -> Iterator[None]:
    """Give launches and waits the names of their buckets in the record of a ``torch.profiler`` of your own.

    ::

        with torch.profiler.profile() as own, compiled_fsdp.record_collective_names(model):
            train_step(batch)
        own.export_chrome_trace("trace.json")

    Each launch and each wait is a range, "gather layers.3.* (4): launch" and "...: wait". On GPUs, the kernels are
    under the range that launched them. No other rank has to take part.

    Args:
        model: the sharded model, as it is or as ``torch.compile`` returned it.

    Raises:
        ValueError: the model has no sharded parameter.
        RuntimeError: a profile of compiled_fsdp is active, which gives these names already.
        ProfileError: on leaving: a graph ran other collectives than its report lists, so names would be wrong.
    """
    ids = frozenset(parameter.param_id for parameter in _parameters_of(model, "record_collective_names"))
    recorder = Recorder({}, ids)
    with watched_by(recorder), recorder.at_work():
        yield
    recorder.check()


def _parameters_of(model: nn.Module, caller: str) -> list[ShardedParameter]:
    found = [parameter for unit in units_of(model) for parameter in unit.parameters]
    if not found:
        raise ValueError(f"{caller}: the model has no sharded parameter; call compiled_fsdp.fully_shard(model) first.")
    return found


class StepProfile:
    """A profile of a few steps: a context manager, and its figures once it is left.

    Attributes:
        result: all figures as data.
    """

    def __init__(
        self, param_ids: frozenset[int], liveness: Liveness, ranks: tuple[int, ...], device: str, timeout: timedelta
    ) -> None:
        self._param_ids, self._liveness, self._ranks = param_ids, liveness, ranks
        self._device, self._timeout = device, timeout
        self._stack = contextlib.ExitStack()
        self._recorder: Recorder | None = None
        self._steps: list[Step] = []
        self._result: Measurement | None = None
        self._profiler: torch_profile | None = None
        self._costs: Hardware | None = None

    def __enter__(self) -> StepProfile:
        if self._recorder is not None:
            raise RuntimeError("profile: it was entered before; make a new one with compiled_fsdp.profile(model).")
        known = {id(report): report for report in COMPILE_LOG.graphs}
        recorder = Recorder(known, self._param_ids)
        with contextlib.ExitStack() as stack:
            stack.enter_context(watched_by(recorder))
            if profiler_runs():
                raise RuntimeError(
                    "profile: a torch.profiler is active already, and only one can be active at a time. Leave it "
                    "first; p.trace(FILE) then writes this profile's trace. To get collectives' names in your own "
                    "trace, enter compiled_fsdp.record_collective_names(model) instead of profile."
                )
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = stack.enter_context(torch_profile(activities=activities, record_shapes=True))
            stack.enter_context(recorder.at_work())
            self._stack = stack.pop_all()
        self._meeting = Meeting(self._liveness, self._timeout)
        self._recorder, self._begun = recorder, time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._begun
        self._stack.close()
        if error is not None:
            self._meeting.abandon(error)
            return
        try:
            self._steps, calls = self._seen()
        except ProfileError as mistake:
            self._meeting.abandon(mistake)
            raise

        def counted_in(together: Together) -> list[Step]:
            return [step for step in self._steps if step.number not in together.left_out]

        def costs(together: Together) -> str:
            steps, seconds = counted_in(together), shared_wires(self._steps, together)
            hardware = planned_for(steps)
            if len(hardware) != 1:
                return ""
            return measured_costs(hardware[0], steps, calls, seconds, self._device).to_json()

        left_out = [step.number for step in self._steps if step.compiled]
        together = self._meeting.exchange(summary_of(self._steps), left_out, costs)
        counted = counted_in(together)
        if not counted:
            raise ProfileError(
                "profile: a graph was compiled in each step inside; take a step before it, or more steps inside."
            )
        self._costs = Hardware.from_json(together.costs) if together.costs else None
        self._result = measurement(counted, len(self._steps), alone_on_wires(self._steps, together), together,
                                   self._ranks, self._ranks[self._liveness.rank], seconds)  # fmt: skip

    def _seen(self) -> tuple[list[Step], list[KernelCall]]:
        """Return the steps and the library kernels that ran inside the profile.

        Raises:
            ProfileError: no compiled graph ran, or a graph ran other collectives than its report lists.
        """
        recorder = self._recorder
        assert recorder is not None
        assert self._profiler is not None
        recorder.check()
        if not any(span.what == "run" for span in recorder.spans):
            raise ProfileError(
                "profile: no compiled graph of the model ran inside: compile the model with "
                "torch.compile(model, backend='compiled_fsdp'), and take a step inside of the profile."
            )
        events = profiled_events(self._profiler)
        steps = steps_in(times_of(recorder.spans, events), said=recorder.steps_ended > 0)
        return steps, kernel_calls(events)

    def step(self) -> None:
        """End a step here, on every rank. If this is never called, steps end after backwards."""
        if self._recorder is None:
            raise RuntimeError("profile: call step() inside of `with compiled_fsdp.profile(model) as p`.")
        self._recorder.steps_ended += 1

    # ---- figures, once the profile is left ---------------------------------------------------------------------------
    @property
    def result(self) -> Measurement:
        """All figures.

        Raises:
            RuntimeError: the profile was not left, or it failed.
        """
        if self._result is None:
            raise RuntimeError("profile: read figures after leaving `with compiled_fsdp.profile(model) as p`.")
        return self._result

    def __str__(self) -> str:
        return str(self.result)

    @property
    def costs(self) -> Hardware:
        """The hardware that the plans were made for, with measured costs in place of estimates; equal on all ranks.

        Compile the model again with it, and its plans use the measured times::

            model.compile(backend="compiled_fsdp", options={"hardware": p.costs})
            Path("costs.json").write_text(p.costs.to_json())   # for later runs: options={"hardware": "costs.json"}

        Raises:
            RuntimeError: the profile was not left, or it failed.
            ProfileError: the graphs were planned for different hardware.
        """
        if self._costs is None and self._result is not None:
            names = ", ".join(hardware.name for hardware in planned_for(self._steps))
            raise ProfileError(
                f"profile: the model's graphs were planned for different hardware ({names}), so there are no costs to "
                "plan with. Compile all of them with the same option 'hardware', after measure_hardware()."
            )
        if self._costs is None:
            raise RuntimeError("profile: read costs after leaving `with compiled_fsdp.profile(model) as p`.")
        return self._costs

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for ``json.dumps``: see ``Measurement.to_dict``."""
        return self.result.to_dict()

    def json(self) -> dict[str, Any]:
        """Return ``to_dict()``, whose old name this is."""
        warn_renamed("StepProfile.json()", "to_dict()")
        return self.to_dict()

    def table(self) -> str:
        """Draw a table with a line for each collective, measured beside planned."""
        return self.result.table()

    def timeline(self, file: str | Path | None = None) -> Timeline:
        """Show the step of median length in time, planned and measured, as ``explain(model).timeline(FILE)`` draws it.

        Args:
            file: a file to write, too: FILE.html is a page, FILE.json is a trace for Perfetto.

        Raises:
            RuntimeError: the profile was not left.
            ValueError: ``file`` has another ending.
            ModuleNotFoundError: a page needs plotly, which is not installed (``pip install plotly``).
        """
        timeline = self.result.timeline
        if file is not None:
            write(timeline, Path(file))
        return timeline

    def trace(self, file: str | Path) -> None:
        """Write the record of torch's profiler, with the names of buckets, as a Chrome trace: FILE.json.

        Raises:
            RuntimeError: the profile was not left.
        """
        if self._profiler is None or self._result is None:
            raise RuntimeError("profile: write the trace after leaving `with compiled_fsdp.profile(model) as p`.")
        self._profiler.export_chrome_trace(str(file))
