"""An optimizer's update as compiled code: clipping and the step on this rank's shards, as one graph."""

# Why: docs/design/gradients.md, "A compiled update has no guards"

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compiled_fsdp.base.logs import warn_once
from compiled_fsdp.compat.optim import compile_update, create_state, step_without_hooks, trace_update
from compiled_fsdp.optim.local import as_state, local

log = logging.getLogger(__name__)

MOST_COMPILES = 16
"""In how many steps something may be compiled, before updates are no longer compiled."""
TOGETHER = 8
"""The most parameters of one graph whose code is C++: g++ needs minutes for a function with hundreds of loops."""

Clip = tuple[float, Tensor]
"""The gradients' largest norm, and their norm."""


class CompiledUpdate:
    """Updates of an optimizer's parameters, each as one graph; on a CPU with Inductor as several small ones.

    A graph is compiled for the parameters that have gradients, for the names, shapes and dtypes of their state, and for
    all values in the parameter groups except learning rates, which are tensors in the graph. A call looks its graph up
    by these facts, without guards.

    Args:
        optimizer: one of ``BY_ELEMENT``. Its steps are those of torch's ``foreach`` implementation, compiled.
        codegen: as the backend's option: "aot_eager" runs the graph operation by operation.
        inductor: Inductor's own options.
        compiled: called, in a step that compiles something, with the parameters of each graph that the step calls, and
            the bytes that it reads and writes.

    Raises:
        ValueError: a parameter group has a tuple of tensors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        codegen: Literal["inductor", "aot_eager"] = "inductor",
        inductor: Mapping[str, Any] | None = None,
        compiled: Callable[[Sequence[Tensor], int], None] = lambda params, moved: None,
    ) -> None:
        self._optimizer, self._codegen, self._inductor = optimizer, codegen, inductor or {}
        self._when_compiled = compiled
        self._graphs: dict[Hashable, _Graph] = {}
        self._compiles = 0
        for name, value in (item for group in optimizer.param_groups for item in group.items()):
            if name != "params" and isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value):
                raise ValueError(
                    f"compiled_fsdp: TrainStep(compile_update=True): the optimizer's {name!r} has tensors. Give "
                    "numbers, or leave 'compile_update' out."
                )

    @property
    def has_too_many_graphs(self) -> bool:
        """Whether the facts that graphs are compiled for change so often that compiling is a loss."""
        if self._compiles < MOST_COMPILES:
            return False
        warn_once(
            log,
            "too many updates",
            "TrainStep(compile_update=True) has compiled graphs in %d steps, so the update goes on without being "
            "compiled. Each change of a value in param_groups other than 'lr' is a graph more, and so is each other "
            "set of parameters with gradients. For example, OneCycleLR changes momentum unless it has "
            "cycle_momentum=False.",
            MOST_COMPILES,
        )
        return True

    @torch.no_grad()
    def step(self, params: Iterable[Tensor], clip: Clip | None = None) -> None:
        """Update those of ``params`` that have gradients; scale the gradients first if ``clip`` is given.

        The graph reads gradients and does not write to them.
        """
        before, calls = len(self._graphs), []
        for chosen in self._parts(set(params)):
            call = _Call(self._optimizer, chosen, clip)
            if call.key not in self._graphs:
                create_state(self._optimizer)
                call = _Call(self._optimizer, chosen, clip)
            graph = self._graphs.get(call.key) or self._compiled(call)
            calls.append(call)
            for (number, name), value in zip(graph.new, graph.code(*call.inputs), strict=True):
                param = call.params[number]
                self._optimizer.state[param][name] = as_state(param, value)
        if len(self._graphs) > before:
            self._compiles += 1
            for call in calls:
                self._when_compiled(call.params, call.moved)

    def _parts(self, params: set[Tensor]) -> Iterable[set[Tensor]]:
        """The parameters of each graph. Small graphs have parameters of one shape, so that equal layers share them."""
        if self._codegen != "inductor" or any(local(param).device.type != "cpu" for param in params):
            return [params]
        alike: dict[Hashable, list[Tensor]] = defaultdict(list)
        for number, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param in params and param.grad is not None:
                    alike[number, local(param).shape, param.dtype].append(param)
        return [set(same[i : i + TOGETHER]) for same in alike.values() for i in range(0, len(same), TOGETHER)]

    def _compiled(self, call: _Call) -> _Graph:
        begin = time.perf_counter()
        new: list[tuple[int, str]] = []

        def update(*inputs: Tensor) -> Iterator[Tensor]:
            new.clear()
            for at, value in call.updated(iter(inputs)):
                new.append(at)
                yield value

        code: Callable[..., Any] = trace_update(update, call.inputs)
        if self._codegen == "inductor":
            code = compile_update(code, call.inputs, self._inductor)  # type: ignore[arg-type]
        seconds = time.perf_counter() - begin
        name = type(self._optimizer).__name__
        log.info(
            "%s's update of %d parameters is one graph, compiled in %.1f s: it reads and writes %.1f MB",
            name, len(call.params), seconds, call.moved / 1e6,
        )  # fmt: skip
        graph = self._graphs[call.key] = _Graph(code, new)
        return graph


def _scale_gradients(params: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Clip as ``clip_grads_with_norm_``, but into new tensors."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        assert param.grad is not None
        param.grad = param.grad * factor.to(param.device)


@dataclass
class _Graph:
    code: Callable[..., Any]
    # The state that the graph returns, because this step creates it: parameters by their place in the call, and names.
    new: list[tuple[int, str]]


class _Call:
    """The tensors of one update, and the facts that its graph depends on.

    Attributes:
        key: the facts.
        inputs: of the graph: for each group its numbers that are tensors, and for each parameter the shard, its
            gradient and its state; last the norm.
        params: the parameters, in the same order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Set[Tensor], clip: Clip | None) -> None:
        self._optimizer, self._max_norm = optimizer, None if clip is None else clip[0]
        self.params: list[Tensor] = []
        self.inputs: list[Tensor] = []
        # For each group the names of its values that are inputs; for each of its parameters the names of its state.
        self._groups: list[tuple[dict[str, Any], list[str], list[list[str]]]] = []
        facts: list[Any] = [self._max_norm]
        for group in optimizer.param_groups:
            facts.append(self._add(group, params))
        if clip is not None:
            self.inputs.append(local(clip[1]))
        facts += [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in self.inputs]
        self.key: Hashable = tuple(facts)

    @property
    def moved(self) -> int:
        """The bytes that the graph reads and writes: it writes to all inputs but gradients."""
        return 2 * sum(t.nbytes for t in self.inputs) - sum(local(param.grad).nbytes for param in self.params)

    def _add(self, group: dict[str, Any], params: Set[Tensor]) -> Hashable:
        """Add the tensors of a group. Returns the group's facts."""
        own = [param for param in group["params"] if param.grad is not None and param in params]
        values = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        numbers = {name: value for name, value in values.items() if name == "lr" or isinstance(value, Tensor)}
        self.inputs += [value if isinstance(value, Tensor) else torch.tensor(value) for value in numbers.values()]
        states = [self._optimizer.state.get(param, {}) for param in own]
        for param, state in zip(own, states, strict=True):
            self.inputs += (local(param).detach(), local(param.grad), *map(local, state.values()))
        self.params += own
        self._groups.append((group, list(numbers), [list(state) for state in states]))
        others = tuple((name, repr(value)) for name, value in values.items() if name not in numbers)
        return others, tuple(numbers), tuple(map(tuple, states))

    def updated(self, inputs: Iterator[Tensor]) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Step a copy of the optimizer that has ``inputs`` in the place of this call's tensors.

        Yields: state that the step has created, after the parameter's place in ``params`` and the state's name.
        """
        groups, given, params = [], [], list[Tensor]()
        for group, numbers, states in self._groups:
            values = {name: next(inputs) for name in numbers} | {"foreach": True, "fused": None, "capturable": True}
            own = []
            for names in states:
                param, grad = next(inputs), next(inputs)
                if grad.dtype != param.dtype:
                    param.grad_dtype = grad.dtype
                param.grad = grad
                own.append(param)
                given.append({name: next(inputs) for name in names})
            groups.append(group | {name: value for name, value in values.items() if name in group} | {"params": own})
            params += own
        if self._max_norm is not None:
            _scale_gradients(params, self._max_norm, next(inputs))
        traced = object.__new__(type(self._optimizer))
        traced.__dict__.update(self._optimizer.__dict__)
        traced.param_groups = groups
        traced.state = defaultdict(dict, zip(params, map(dict, given), strict=True))
        step_without_hooks(traced)
        for number, (param, state) in enumerate(zip(params, given, strict=True)):
            for name, value in traced.state[param].items():
                if value is not state.get(name):
                    yield (number, name), value
