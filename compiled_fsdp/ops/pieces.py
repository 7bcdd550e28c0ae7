"""Read parameters with all-gather extensions in graphs: the user's hooks are traced, around a read of each piece.

A *piece* is one of the tensors that ``fsdp_pre_all_gather`` returns to be gathered.

    encode(inner tensors) -> pieces, tensors of the metadata              fsdp_pre_all_gather
    read(piece), ...      -> gathered pieces                              in the plan's buckets, like any read
    decode(gathered pieces, the metadata's, inner tensors) -> parameter   fsdp_post_all_gather
    attach(parameter, gate) -> the parameter with a gate                  its backward is reduce_grad

Dynamo puts these functions into its graph as they are, so it need not understand the Python code of the hooks.
AOTAutograd then runs the hooks on fake tensors and traces their operations.
"""

# Why: docs/design/communication.md, "AOTAutograd traces the extensions' hooks"

from __future__ import annotations

import hashlib
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.buckets.collectives import to_gather
from compiled_fsdp.buckets.spec import ReadSpec
from compiled_fsdp.buckets.transport import wire_dtype
from compiled_fsdp.compat.autograd import is_wrapper
from compiled_fsdp.compat.graphs import needs_values, new_fake_mode
from compiled_fsdp.compat.modules import tree_flatten, tree_unflatten
from compiled_fsdp.compat.profiling import is_traced
from compiled_fsdp.ops.autograd import attach
from compiled_fsdp.runtime.pieces import Encoded, arranged, decode, encode, text_of
from compiled_fsdp.sharding.extension import PRE_HOOK
from compiled_fsdp.state.equal_hooks import constants_of, one_of
from compiled_fsdp.state.parameter import ShardedParameter


class NotTraceable(Exception):
    """The hooks cannot be part of a graph; the message says why."""


class _Rebuild:
    """Rebuilds a wrapper subclass around other inner tensors; it keeps no tensor alive."""

    def __init__(self, local: Tensor, names: Sequence[str]) -> None:
        if not is_wrapper(local):
            raise NotTraceable(f"a {type(local).__name__} is no tensor that is made of others")
        inner, self.context = local.__tensor_flatten__()  # type: ignore[attr-defined]
        if missing := [name for name in inner if name not in names]:
            raise NotTraceable(f"its inner tensors {missing} are no attributes of it")
        if nested := [name for name in names if is_wrapper(getattr(local, name))]:
            raise NotTraceable(f"its inner tensors {nested} are made of others themselves")
        self.kind, self.inner, self.names = type(local), tuple(inner), tuple(names)
        self.size, self.stride = local.shape, local.stride()
        self.others = constants_of(local)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        given = dict(zip(self.names, (tensor.detach() for tensor in tensors), strict=True))
        kind: Any = self.kind
        inner = {name: given[name] for name in self.inner}
        try:
            made = kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        except Exception as error:
            reason = f"its __tensor_unflatten__ raised {type(error).__name__}: {error}"
            raise NotTraceable(reason) from error
        if type(made) is not self.kind:
            raise NotTraceable(f"its __tensor_unflatten__ made a {type(made).__name__}")
        for name in (name for name in self.names if name not in self.inner):
            setattr(made, name, given[name])
        for name, value in self.others.items():
            if name not in vars(made):
                setattr(made, name, types.MethodType(value, made) if isinstance(value, types.FunctionType) else value)
        return made


@dataclass(eq=False)
class HookCode:
    """The hooks of a parameter as functions of plain tensors; parameters with equal hooks share them (``EqualHooks``).

    Attributes:
        encode: takes the attributes of the local tensor that are tensors; returns the pieces as they are sent, then the
            tensors of the metadata.
        decode: takes the gathered pieces, the tensors of the metadata, and the arguments of ``encode``; returns the
            full parameter.
        sizes: the shapes of the pieces as they are sent.
        dtypes: the dtypes of the pieces as they are sent.
        digest: a hash of the shapes, dtypes and metadata that all ranks must have in common.
    """

    encode: Callable[..., tuple[Tensor, ...]]
    decode: Callable[..., Tensor]
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    digest: str


_functions: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def hook_code(parameter: ShardedParameter, names: Sequence[str]) -> HookCode:
    """Try a parameter's hooks on fake tensors, and return their code, which serves all parameters with equal hooks.

    Args:
        parameter: has all-gather extensions.
        names: the attributes of its local tensor that are tensors.

    Raises:
        NotTraceable: the local tensor cannot be rebuilt from its attributes, or a hook reads values of tensors.
        RuntimeError, TypeError, ValueError: as in ``runtime.pieces.encode`` and ``decode``.
    """
    local = parameter.local
    assert local is not None
    rebuild = _Rebuild(local, names)
    if not hasattr(local, PRE_HOOK):
        raise NotTraceable(f"a {rebuild.kind.__name__} has no {PRE_HOOK}")
    tensors = [getattr(local, name) for name in names]
    # compiled code keeps the functions below, so they look the parameter up: they must not keep its model alive
    one_alive = partial(one_of, parameter.hooks.text)

    def run_pre(given: Sequence[Tensor]) -> Encoded:
        one = one_alive()
        return encode(one, rebuild([tensor.to(one.device) for tensor in given]))

    def run_post(given: Sequence[Tensor], outputs: Sequence[Tensor], metadata: Any) -> Tensor:
        one = one_alive()
        return decode(one, rebuild([tensor.to(one.device) for tensor in given]), outputs, metadata)

    with new_fake_mode(), torch.no_grad():
        given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        try:
            found = run_pre(given)
            gathered = [
                torch.empty([parameter.world * piece.numel()], dtype=piece.dtype, device=piece.device)
                for piece in found.pieces
            ]
            sizes = [piece.shape for piece in found.pieces]
            outputs = [arranged(parameter, *each) for each in zip(gathered, sizes, strict=True)]
            run_post(given, outputs, found.metadata)
        except RuntimeError as error:
            if needs_values(error.__cause__):
                raise NotTraceable(str(error).removeprefix("compiled_fsdp: ")) from error
            raise
    leaves, spec = tree_flatten(found.metadata)
    is_tensor, text = [isinstance(leaf, Tensor) for leaf in leaves], text_of(found)
    constants = [None if tensor else leaf for tensor, leaf in zip(is_tensor, leaves, strict=True)]
    dtypes, count = [piece.dtype for piece in found.pieces], len(found.pieces)
    sent_sizes = tuple(map(_sent_size, found.pieces))

    @torch.compiler.allow_in_graph
    def encode_pieces(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            pieces, metadata = encoded = run_pre(given)
            if text_of(encoded) != text:
                raise RuntimeError(
                    f"compiled_fsdp: fsdp_pre_all_gather of parameter {one_alive().name!r} returned "
                    f"{text_of(encoded)} while it was traced, and {text} before."
                )
            sent = [to_gather(piece).view(size) for piece, size in zip(pieces, sent_sizes, strict=True)]
            return *sent, *(leaf for leaf in tree_flatten(metadata)[0] if isinstance(leaf, Tensor))

    @torch.compiler.allow_in_graph
    def decode_pieces(*given: Tensor) -> Tensor:
        with torch.no_grad():
            one, of_metadata = one_alive(), iter(given[count:])
            outputs = [
                arranged(one, tensor.reshape(-1).view(dtype), size)
                for tensor, dtype, size in zip(given[:count], dtypes, sizes, strict=True)
            ]
            leaves = [next(of_metadata) if tensor else leaf for tensor, leaf in zip(is_tensor, constants, strict=True)]
            return run_post(list(of_metadata), outputs, tree_unflatten(leaves, spec))

    _functions.update((encode_pieces, decode_pieces))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return HookCode(encode_pieces, decode_pieces, sent_sizes, tuple(map(wire_dtype, dtypes)), digest)


def _sent_size(piece: Tensor) -> tuple[int, ...]:
    """A piece's shape as it is sent: its own, or one dimension if the wire dtype has smaller elements."""
    per_element = piece.dtype.itemsize // wire_dtype(piece.dtype).itemsize
    return tuple(piece.shape) if per_element == 1 else (piece.numel() * per_element,)


@torch.compiler.allow_in_graph
def hooks_failed(param_id: Tensor, problem: str, spec_text: str) -> Tensor:
    """Stand in a Dynamo graph for a parameter whose hooks failed while they were traced.

    compiled_fsdp's backend raises the error when it compiles the graph, so that all ranks hear of it. Until then
    Dynamo traces on with a tensor of the parameter's size.

    Raises:
        ValueError: the call is not traced; the message is ``problem``.
    """
    if not is_traced([param_id]):  # torch 2.11 calls this on fake tensors while ``is_compiling()`` is False
        raise ValueError(problem)
    spec = ReadSpec.parse(spec_text)
    return torch.empty(spec.size, dtype=spec.dtype, device=param_id.device)


def is_hook_code(target: Any) -> bool:
    """Whether a call target in Dynamo's graph is one of these functions; calls with equal inputs can be merged."""
    return target is attach or target in _functions
