"""Faults put into compiled_fsdp on purpose: the fuzzer has to find each one (`python -m tests.fuzz --mutations`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from compiled_fsdp.buckets import collectives, host_copies, transport
from compiled_fsdp.buckets.reduction import ReduceSpec
from compiled_fsdp.buckets.spec import BucketSpec
from compiled_fsdp.compat import region_calls
from compiled_fsdp.compiler import compilation, equal_layers
from compiled_fsdp.frontend import optimizer_hooks
from compiled_fsdp.ops import impl
from compiled_fsdp.optim import compiled, local, norm
from compiled_fsdp.passes import recompute, reshard
from compiled_fsdp.ranks.agreement import Agreement, Follows
from compiled_fsdp.ranks.question import Signature
from compiled_fsdp.runtime import accumulation, prefetcher, reducer
from compiled_fsdp.state.unit import Unit
from compiled_fsdp.training import train_step
from tests.fuzz import execute

MOST_PROGRAMS = 300

Mutation = Callable[[], AbstractContextManager[Any]]


def _sums() -> AbstractContextManager[Any]:
    """Gradients are summed instead of averaged."""
    return mock.patch.object(ReduceSpec, "op", "sum")


def _loses_hooks() -> AbstractContextManager[Any]:
    """Post-accumulate-grad hooks of biases do not run."""
    run = reducer.run_hooks

    def run_some(parameter: Any, *arguments: Any) -> None:
        if not parameter.name.endswith("bias"):
            run(parameter, *arguments)

    return mock.patch.object(reducer, "run_hooks", run_some)


def _takes_stale_gathers() -> AbstractContextManager[Any]:
    """A prefetched gather is used even if the shards were written to in between."""
    return mock.patch.object(prefetcher.PrefetchedGather, "ask_if_stale", return_value=lambda: False)


def _drops_waits() -> AbstractContextManager[Any]:
    """A collective's result is used without waiting for the collective."""
    return mock.patch.object(transport, "wait", lambda bucket: bucket)


def _takes_the_first_slot() -> AbstractContextManager[Any]:
    """Each parameter of a bucket is read from the bucket's beginning."""
    unpack = collectives.unpack_gather

    def from_the_beginning(bucket: torch.Tensor, offset: int, *rest: Any, **named: Any) -> torch.Tensor:
        return unpack(bucket, 0, *rest, **named)

    return mock.patch.object(collectives, "unpack_gather", from_the_beginning)


def _packs_by_rank() -> AbstractContextManager[Any]:
    """Odd ranks put the gradients of a bucket in the opposite order."""
    pack = collectives.pack_grads

    def by_rank(grads: Any, spec: BucketSpec, param_ids: Any) -> list[torch.Tensor]:
        turn = -1 if dist.get_rank() % 2 else 1
        turned = dataclasses.replace(spec, numels=spec.numels[::turn], dims=spec.dims[::turn])
        return pack(grads[::turn], turned, param_ids[::turn])

    return mock.patch.object(collectives, "pack_grads", by_rank)


def _does_not_copy() -> AbstractContextManager[Any]:
    """A parameter's first pending gradient is autograd's own tensor and not a copy."""
    accumulate = reducer.accumulate_unreduced

    def without_copy(parameter: Any, grad: torch.Tensor) -> None:
        if parameter.grads.unsharded_accumulated_grad is None:
            accumulate(parameter, grad)
            parameter.grads.unsharded_accumulated_grad = grad.to(parameter.reduce_dtype)
        else:
            accumulate(parameter, grad)

    return mock.patch.object(reducer, "accumulate_unreduced", without_copy)


def _ignores_the_budget() -> AbstractContextManager[Any]:
    """The option `memory_budget` is ignored."""
    return mock.patch.object(compilation, "budget_in_bytes", return_value=None)


def _keeps_the_first_variant() -> AbstractContextManager[Any]:
    """Settings of the reduction that change between steps do not reach the graphs."""
    return mock.patch.object(Unit, "apply_sync", return_value=False)


def _reduces_in_bfloat16() -> AbstractContextManager[Any]:
    """Gradients are rounded to bfloat16 before they are reduced."""
    pack = collectives.pack_grads

    def rounded(grads: Any, *rest: Any) -> list[torch.Tensor]:
        return pack([grad.to(torch.bfloat16).to(grad.dtype) for grad in grads], *rest)

    return mock.patch.object(collectives, "pack_grads", rounded)


def _reloads_late() -> AbstractContextManager[Any]:
    """A copy of an activation back to the device is done only when the next one starts."""
    start = host_copies._start
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start_late(copy: torch.Tensor, source: torch.Tensor, device: torch.device, kind: str) -> torch.Tensor:
        if kind != "reload":
            return start(copy, source, device, kind)
        for earlier, its_source in late:
            earlier.copy_(its_source)
        late[:] = [(copy.zero_(), source)]
        return copy

    return mock.patch.object(host_copies, "_start", start_late)


def _shares_host_memory() -> AbstractContextManager[Any]:
    """All activations have the same host memory, which is written again while it is needed."""
    memory = torch.empty(2**26, dtype=torch.uint8)

    def shared(like: torch.Tensor) -> torch.Tensor:
        own = memory[: like.numel() * like.element_size()]
        return own.view(like.dtype).as_strided(like.size(), like.stride())

    return mock.patch.object(host_copies, "_host_memory", shared)


@contextmanager
def _draws_again() -> Iterator[None]:
    """Under a memory budget, backward draws a dropout's mask again, and gets other random numbers."""

    def as_they_are(joint: Any, forward: Any, backward: Any, *_: Any) -> tuple[Any, Any]:
        return forward, backward

    with (
        mock.patch.object(recompute, "draws_numbers", return_value=False),
        mock.patch.object(reshard, "draws_numbers", return_value=False),
        mock.patch("torch._functorch.partitioners.functionalize_rng_ops", as_they_are),
    ):
        yield


def _exceeds_the_budget() -> AbstractContextManager[Any]:
    """Plans may hold a bucket more than the memory budget."""
    budget = compilation.budget_in_bytes

    def more(*given: Any) -> float | None:
        found = budget(*given)
        return None if found is None else found + 1000

    return mock.patch.object(compilation, "budget_in_bytes", more)


def _chooses_by_rank() -> AbstractContextManager[Any]:
    """Under a memory budget, odd ranks compute everything again and plan for that, whatever the ranks agree on."""
    agree = Agreement.agree

    def own(
        self: Agreement, signature: Signature, topic: str, propose: Callable[[], str], *more: Any, **named: Any
    ) -> str:
        try:
            found = agree(self, signature, topic, propose, *more, **named)
        except Follows:
            found = ""
        if dist.get_rank() % 2 and "memory_budget=None" not in signature[0]:
            if "computed again" in topic:
                return json.dumps([10**6, 0])
            if topic in ("forward", "backward"):
                return propose()
        return found

    return mock.patch.object(Agreement, "agree", own)


@contextmanager
def _gathers_before_the_update() -> Iterator[None]:
    """The next step's first gather sends the shards from before the update."""
    ask = prefetcher.AllGatherPrefetcher.next_forward

    def launch_at_once(self: prefetcher.AllGatherPrefetcher) -> list[Any]:
        ask(self)
        self.launch_next_forward()
        return []

    with (
        mock.patch.object(prefetcher.AllGatherPrefetcher, "next_forward", launch_at_once),
        mock.patch.object(prefetcher.PrefetchedGather, "ask_if_stale", return_value=lambda: False),
    ):
        yield


def _leaves_a_gradient_out() -> AbstractContextManager[Any]:
    """The norm lacks the first gradient."""
    compute = norm.norm_of_gradients
    return mock.patch.object(norm, "norm_of_gradients", lambda grads, *rest: compute(list(grads)[1:], *rest))


def _updates_twice() -> AbstractContextManager[Any]:
    """Parameters whose gather waits for their update are updated twice."""
    step = train_step.step_without_hooks

    def twice(optimizer: torch.optim.Optimizer) -> None:
        step(optimizer)
        step(optimizer)

    return mock.patch.object(train_step, "step_without_hooks", twice)


def _updates_twice_when_compiled() -> AbstractContextManager[Any]:
    """The code of a compiled update has the optimizer's step twice."""
    step = compiled.step_without_hooks

    def twice(optimizer: torch.optim.Optimizer) -> None:
        step(optimizer)
        step(optimizer)

    return mock.patch.object(compiled, "step_without_hooks", twice)


def _does_not_clip_all() -> AbstractContextManager[Any]:
    """A compiled update does not clip its first gradient."""
    scale = compiled._scale_gradients
    return mock.patch.object(compiled, "_scale_gradients", lambda params, *rest: scale(list(params)[1:], *rest))


def _loses_states() -> AbstractContextManager[Any]:
    """The optimizer's state is that from before the step."""
    return mock.patch.object(local, "_take_back", return_value=None)


def _gives_gradients_away() -> AbstractContextManager[Any]:
    """A parameter of the first of the equal layers gets the gradient of the same parameter of another one."""
    run = region_calls._Inlining.run
    earlier: dict[tuple[Any, ...], Any] = {}

    def run_and_swap(self: Any) -> None:
        users = [] if self.backward is None else [user for each in self.backward.users for user in each.users]
        run(self)
        for reduction in (user for user in users if "reduce_grad" in str(user.target)):
            key = (self.graph, *map(str, reduction.args[2:4]), *reduction.args[0].meta["val"].shape)
            later = earlier.setdefault(key, reduction)
            if later is not reduction and reduction.args[0] < later:
                later.replace_input_with(later.args[0], reduction.args[0])

    return mock.patch.object(region_calls._Inlining, "run", run_and_swap)


def _takes_other_layers_for_equal() -> AbstractContextManager[Any]:
    """Layers that differ only in constants are traced as one."""

    def without_constants(node: Any, of_node: Callable[[Any], Any]) -> tuple[Any, ...]:
        return node.target, tuple(map(of_node, node.all_input_nodes)), ()

    return mock.patch.object(equal_layers, "form_of_arguments", without_constants)


def _keeps_copies() -> AbstractContextManager[Any]:
    """Parameters that stay over microbatches, in full or in parts, also stay when an optimizer has written new ones."""
    return mock.patch.object(optimizer_hooks, "retaining_units", return_value=[])


def _forgets_pending_parts() -> AbstractContextManager[Any]:
    """A second reduction leaves out the gradients that are pending for it."""
    add = accumulation.add_accumulated

    def add_full_gradients(parameters: Any, bucket: torch.Tensor, numels: Any, partial: bool) -> None:
        add(parameters, torch.zeros_like(bucket) if partial else bucket, numels, partial)

    return mock.patch.object(impl, "add_accumulated", add_full_gradients)


MUTATIONS: dict[str, Mutation] = {
    "a wrong divisor": _sums,
    "a lost hook": _loses_hooks,
    "a stale prefetch": _takes_stale_gathers,
    "a dropped wait": _drops_waits,
    "a wrong slot": _takes_the_first_slot,
    "a rank-dependent order": _packs_by_rank,
    "a missing clone": _does_not_copy,
    "a budget ignored": _ignores_the_budget,
    "a wrong variant taken": _keeps_the_first_variant,
    "a reduced dtype": _reduces_in_bfloat16,
    "a late reload": _reloads_late,
    "shared host memory": _shares_host_memory,
    "a mask drawn again": _draws_again,
    "a budget exceeded": _exceeds_the_budget,
    "a choice by rank": _chooses_by_rank,
    "a gather before the update": _gathers_before_the_update,
    "a norm without a gradient": _leaves_a_gradient_out,
    "an update twice": _updates_twice,
    "a lost state": _loses_states,
    "a gradient of another layer": _gives_gradients_away,
    "a constant of another layer": _takes_other_layers_for_equal,
    "a stale working copy": _keeps_copies,
    "a pending part forgotten": _forgets_pending_parts,
    "a compiled update twice": _updates_twice_when_compiled,
    "a gradient not clipped": _does_not_clip_all,
}


def run(rank: int, world_size: int, text: str, way: str, mutation: str = "", shares: bool = False) -> execute.Notes:
    """Call `execute.run`; if `mutation` is not "" and the way is "ours", under that mutation."""
    with MUTATIONS[mutation]() if mutation and way == "ours" else nullcontext():
        return execute.run(rank, world_size, text, way, shares)
