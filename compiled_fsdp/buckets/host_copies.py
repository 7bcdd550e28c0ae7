"""Ops that copy activations to host memory in forward, and back to the device in backward.

    offload(tensor)          ->  a tensor in host memory
    reload(host, device)     ->  a tensor on the device

Each is complete when it returns, and runs as it is in eager code. The pass ``start_copies`` takes it apart, so that
compute hides the copy:

    start_offload(tensor), start_reload(host, device)  ->  a copy that is valid after its wait
    wait_copy(copy, source)                            ->  the copy; ``source`` may be freed from here on

On a GPU the copies run on two streams of their own, one for each direction, and the host waits for nothing. Host memory
is pinned and comes from torch's caching allocator, which uses it again. On the CPU "host memory" is an account of its
own, for tests: memory of the operating system that torch's allocator does not count.
"""

# Why: docs/design/memory.md, "Activations in host memory"

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

_lib = torch.library.Library("compiled_fsdp", "FRAGMENT")
# Pinned memory is allocated outside of a capture.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_lib.define("offload(Tensor tensor) -> Tensor", tags=_UNSAFE)
_lib.define("reload(Tensor host, Device device) -> Tensor", tags=_UNSAFE)
_lib.define("start_offload(Tensor tensor) -> Tensor", tags=_UNSAFE)
_lib.define("start_reload(Tensor host, Device device) -> Tensor", tags=_UNSAFE)
# its schema says that it returns a view, so only graphs that are functional already may hold it
_lib.define("wait_copy(Tensor(a) copy, Tensor source) -> Tensor(a)", tags=_UNSAFE)

_ops = torch.ops.compiled_fsdp
OFFLOAD, RELOAD = _ops.offload.default, _ops.reload.default
START_OFFLOAD, START_RELOAD = _ops.start_offload.default, _ops.start_reload.default
WAIT_COPY = _ops.wait_copy.default
STARTS: dict[Any, Any] = {OFFLOAD: START_OFFLOAD, RELOAD: START_RELOAD}
KINDS: dict[Any, str] = {START_OFFLOAD: "offload", START_RELOAD: "reload"}
"""The ops that start a copy, and the names of these copies in plans and reports."""

_streams: dict[tuple[torch.device, str], Any] = {}
# The event at the end of each copy that nobody waited for yet, by the copy's address.
_ends: dict[int, Any] = {}


def _host_memory(like: Tensor) -> Tensor:
    """An empty tensor in host memory, with the shape and the strides of ``like``."""
    if like.device.type != "cpu":
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu", pin_memory=True)
    if not like.numel():
        return torch.empty_like(like)
    memory = torch.frombuffer(mmap.mmap(-1, like.numel() * like.element_size()), dtype=torch.uint8)
    return memory.view(like.dtype).as_strided(like.size(), like.stride())


def _start(copy: Tensor, source: Tensor, device: torch.device, kind: str) -> Tensor:
    """Start to copy on the stream of this kind, after everything that the current stream has to do."""
    if device.type == "cpu":
        return copy.copy_(source)
    if (stream := _streams.get((device, kind))) is None:
        stream = _streams[device, kind] = torch.Stream(device=device)
    current = torch.accelerator.current_stream(device)
    stream.wait_stream(current)
    torch.accelerator.set_stream(stream)
    try:
        copy.copy_(source, non_blocking=True)
        _ends[copy.data_ptr()] = stream.record_event()
    finally:
        torch.accelerator.set_stream(current)
    return copy


def _start_offload(tensor: Tensor) -> Tensor:
    return _start(_host_memory(tensor), tensor, tensor.device, "offload")


def _start_reload(host: Tensor, device: torch.device) -> Tensor:
    copy = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    return _start(copy, host, copy.device, "reload")


def _wait_copy(copy: Tensor, source: Tensor) -> Tensor:
    if (end := _ends.pop(copy.data_ptr(), None)) is not None:
        torch.accelerator.current_stream(source.device if copy.device.type == "cpu" else copy.device).wait_event(end)
    return torch.ops.aten.alias.default(copy)


def _offload(tensor: Tensor) -> Tensor:
    copy = _start_offload(tensor)
    _wait_copy(copy, tensor)
    return copy


def _reload(host: Tensor, device: torch.device) -> Tensor:
    copy = _start_reload(host, device)
    _wait_copy(copy, host)
    return copy


def _fake_offload(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _fake_reload(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


for _name, _run, _fake in (
    ("offload", _offload, _fake_offload),
    ("reload", _reload, _fake_reload),
    ("start_offload", _start_offload, _fake_offload),
    ("start_reload", _start_reload, _fake_reload),
    ("wait_copy", _wait_copy, lambda copy, source: torch.ops.aten.alias.default(copy)),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compiled_fsdp::{_name}", _fake, lib=_lib)
