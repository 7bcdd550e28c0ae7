"""Compute with whole matrices of which each rank holds a part.

    parts on all ranks  ->  whole matrices, each on one rank, its owner  ->  function  ->  parts of the results

One all-to-all brings a round of matrices to their owners, another one brings the results back. While owners compute,
the next round is on its way. A rank sends each byte of its parts once and gets as many back, but for the matrices that
it owns. If every rank gathered every matrix instead, each would receive all bytes of all matrices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from compiled_fsdp.base import traffic
from compiled_fsdp.buckets import transport
from compiled_fsdp.compat.autograd import dtensor_like, local_of
from compiled_fsdp.optim.owners import Round, rounds

Cost = Callable[[torch.Size], float]


@dataclass(frozen=True)
class Parts:
    """How one tensor is divided among the ranks of a group: along one dimension, as by ``torch.chunk``.

    Attributes:
        shape: of the whole tensor.
        dim: the divided dimension.
        group: the ranks that have a part.
    """

    shape: torch.Size
    dim: int
    group: dist.ProcessGroup

    def span(self, rank: int) -> tuple[int, int]:
        """The first index of a rank's part in ``dim``, and the number of indices; 0 for a rank without a part."""
        total = self.shape[self.dim]
        step = -(-total // self.group.size())
        start = min(rank * step, total)
        return start, min(step, total - start)

    def size_of(self, rank: int) -> list[int]:
        """The shape of a rank's part."""
        return [self.span(rank)[1] if i == self.dim else n for i, n in enumerate(self.shape)]

    def numel_of(self, rank: int) -> int:
        return math.prod(self.size_of(rank))


def parts_of(tensor: Tensor) -> Parts | None:
    """How a tensor is divided among ranks; None if this rank has all of it.

    Raises:
        NotImplementedError: a DTensor is divided along several dimensions of its mesh (tensor parallelism), or its
            placement is neither ``Shard`` nor ``Replicate``.
    """
    if not isinstance(tensor, DTensor):
        return None
    sizes = tensor.device_mesh.shape
    divided = [i for i, place in enumerate(tensor.placements) if not isinstance(place, Replicate) and sizes[i] > 1]
    shards = [place for i in divided if type(place := tensor.placements[i]) is Shard]
    if len(divided) > 1 or len(shards) < len(divided):
        raise NotImplementedError(
            f"A whole matrix can be put together from parts along one dimension of a mesh, but a tensor of shape "
            f"{tuple(tensor.shape)} has placements {tensor.placements}. Leave it to an optimizer that does not need "
            "whole matrices, such as torch.optim.AdamW."
        )
    if not divided:
        return None
    return Parts(tensor.shape, shards[0].dim % tensor.ndim, tensor.device_mesh.get_group(divided[0]))


@torch.no_grad()
def map_whole(
    function: Callable[[int, Tensor], Tensor], tensors: Sequence[Tensor], *, cost: Cost | None = None
) -> list[Tensor]:
    """Apply a function to whole tensors of which each rank holds a part.

    Each tensor is put together on one rank, which calls ``function``; all ranks get their parts of the result. Ranks
    own about equal work. All ranks must call this with the same tensors in the same order. Gradients are not recorded.
    For example, an optimizer with a preconditioner for each weight matrix::

        grads = [p.grad for p in matrices]
        updates = map_whole(lambda i, grad: shampoo[i].precondition(grad), grads)  # shampoo[i] is used by one rank

    Args:
        function: takes the tensor's place in ``tensors`` and the whole tensor, a copy, and returns a tensor of the
            same shape and dtype. It is always the same rank that calls it for a tensor, as long as the list's shapes
            stay the same, so it may keep a state there.
        tensors: DTensors with one ``Shard`` placement, as ``fully_shard`` makes them, of one dtype in each process
            group. With replicas (HSDP) each group of replicas computes for itself. A tensor that this rank has as a
            whole needs no communication.
        cost: the time for a shape, in any unit, by which work is divided. By default the number of elements.

    Returns:
        For each tensor the result, with its placements and dtype.

    Raises:
        NotImplementedError: a tensor is divided along several dimensions of its mesh.
        ValueError: the function returned another shape or dtype, or dtypes differ within a process group.
        Exception: what the function raises, on the rank that called it. The other ranks get NaN for that tensor
            instead of waiting for it.
    """
    results: list[Any] = [None] * len(tensors)

    def write(i: int, part: Tensor) -> None:
        tensor = tensors[i]
        results[i] = dtensor_like(tensor, part) if isinstance(tensor, DTensor) else part

    def part(i: int) -> Tensor:
        tensor = tensors[i].detach()
        part = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        return part if layouts[i] is not None else part.clone()

    layouts = [parts_of(tensor) for tensor in tensors]
    exchange(layouts, part, function, write, cost=cost or _numel)
    return results


def _numel(shape: torch.Size) -> float:
    return float(shape.numel())


def exchange(
    layouts: Sequence[Parts | None],
    part: Callable[[int], Tensor],
    function: Callable[[int, Tensor], Tensor],
    write: Callable[[int, Tensor], None],
    *,
    cost: Cost,
) -> None:
    """Apply a function to whole tensors, as ``map_whole`` does, with parts that are made and used one round at a time.

    Args:
        layouts: how each tensor is divided; None for one that this rank has as a whole.
        part: makes this rank's part of a tensor, right before it is sent.
        function: takes a tensor's place and the whole tensor; returns a tensor of the same shape and dtype.
        write: takes a tensor's place and this rank's part of the result.
        cost: the time of ``function`` for a shape, in any unit.
    """
    by_group: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for i, layout in enumerate(layouts):
        if layout is None:
            write(i, _result_of(function, i, part(i)))
        else:
            by_group[layout.group].append(i)
    for group, members in by_group.items():
        divided = {i: layout for i in members if (layout := layouts[i]) is not None}
        _Exchange(group, divided, part, function, write).run(cost)


def _result_of(function: Callable[[int, Tensor], Tensor], i: int, whole: Tensor) -> Tensor:
    shape, dtype = whole.shape, whole.dtype
    result = function(i, whole)
    if result.shape != shape or result.dtype != dtype:
        raise ValueError(
            f"The function must return a tensor of shape {tuple(shape)} and dtype {dtype}, but returned "
            f"{tuple(result.shape)} and {result.dtype}."
        )
    return result


class _Exchange:
    """The exchange of the tensors that one group shares."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        layouts: dict[int, Parts],
        part: Callable[[int], Tensor],
        function: Callable[[int, Tensor], Tensor],
        write: Callable[[int, Tensor], None],
    ) -> None:
        self.group, self.layouts = group, layouts
        self.part, self.function, self.write = part, function, write
        self.ranks, self.rank = group.size(), group.rank()
        self.error: Exception | None = None

    def run(self, cost: Cost) -> None:
        numbers = list(self.layouts)
        shapes = [self.layouts[i].shape for i in numbers]
        # 4 bytes an element: the size only decides on how many small tensors share a round
        plan = rounds([cost(shape) for shape in shapes], [4 * shape.numel() for shape in shapes], self.ranks)
        plan = [tuple(tuple(numbers[i] for i in own) for own in each) for each in plan]
        on_the_way, going_back = self._to_owners(plan[0]), None
        for number, each in enumerate(plan):
            received, arrived = on_the_way, each
            if number + 1 < len(plan):
                on_the_way = self._to_owners(plan[number + 1])
            results = self._compute(arrived, received)
            if going_back is not None:
                self._take(*going_back)
            going_back = arrived, self._to_parts(arrived, results, received.like)
        assert going_back is not None
        self._take(*going_back)
        if self.error is not None:
            raise self.error

    def _to_owners(self, each: Round) -> _Sent:
        """Send this rank's parts of a round's tensors to their owners."""
        given = [[self.part(i).reshape(-1) for i in own] for own in each]
        received = [sum(self.layouts[i].numel_of(rank) for i in each[self.rank]) for rank in range(self.ranks)]
        return _Sent(given, received, next(tensor for tensors in given for tensor in tensors), self.group)

    def _compute(self, each: Round, sent: _Sent) -> list[Tensor]:
        """Put together the tensors that this rank owns, and return the function's results."""
        by_rank = sent.wait()
        results = []
        for i in each[self.rank]:
            layout, pieces = self.layouts[i], []
            for rank in range(self.ranks):
                numel = layout.numel_of(rank)
                pieces.append(by_rank[rank][:numel].view(layout.size_of(rank)))
                by_rank[rank] = by_rank[rank][numel:]
            whole = torch.cat(pieces, layout.dim)
            try:
                result = _result_of(self.function, i, whole)
            except Exception as error:
                self.error = self.error or error  # raised at the end, because the other ranks wait for results
                result = torch.full_like(whole, math.nan if whole.is_floating_point() else 0)
            results.append(result)
        return results

    def _to_parts(self, each: Round, results: Sequence[Tensor], like: Tensor) -> _Sent:
        """Send the results of the tensors that this rank owns to the ranks that have the parts."""
        given: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for i, result in zip(each[self.rank], results, strict=True):
            layout = self.layouts[i]
            for rank in range(self.ranks):
                given[rank].append(result.narrow(layout.dim, *layout.span(rank)).reshape(-1))
        received = [sum(self.layouts[i].numel_of(self.rank) for i in own) for own in each]
        return _Sent(given, received, like, self.group)

    def _take(self, each: Round, sent: _Sent) -> None:
        """Hand over this rank's parts of a round's results."""
        for own, flat in zip(each, sent.wait(), strict=True):
            for i in own:
                layout = self.layouts[i]
                numel = layout.numel_of(self.rank)
                self.write(i, flat[:numel].view(layout.size_of(self.rank)))
                flat = flat[numel:]


class _Sent:
    """An all-to-all under way: flat tensors of one dtype for each rank, and from each rank a flat tensor."""

    def __init__(
        self, given: Sequence[Sequence[Tensor]], received: Sequence[int], like: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Start it.

        Args:
            given: the tensors for each rank.
            received: how many elements come from each rank.
            like: a tensor of the elements' dtype, on the device.
            group: the ranks.
        """
        flat = [tensor for tensors in given for tensor in tensors]
        dtypes = {tensor.dtype for tensor in (*flat, like)}
        if len(dtypes) > 1:
            raise ValueError(
                "Tensors that are divided among the same ranks must have one dtype, but have "
                f"{', '.join(sorted(map(str, dtypes)))}. Call map_whole once for each dtype."
            )
        self.like = like.new_empty(0)
        self._sent = torch.cat(flat) if flat else self.like  # lives until the end
        self._taken = list(received)
        given_counts = [sum(tensor.numel() for tensor in tensors) for tensors in given]
        self._received, self._work = transport.exchange(self._sent, given_counts, self._taken, group)
        traffic.launched("exchange", len(flat), self._sent.nbytes, group.size())

    def wait(self) -> list[Tensor]:
        """Wait until everything has arrived; return the flat tensor of each rank."""
        self._work.wait()
        del self._sent
        return list(self._received.split(self._taken))
