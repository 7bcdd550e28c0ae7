"""Parameters with all-gather extensions in graphs: their hooks as code that is traced, and the read around them.

    encode(inner tensors) -> pieces, tensors of the metadata              fsdp_pre_all_gather
    read(piece), ...      -> gathered pieces                              in the plan's buckets, as any read
    decode(gathered pieces, the metadata's, inner tensors) -> parameter   fsdp_post_all_gather
    attach(parameter, gate) -> what is computed with; its backward is reduce_grad

Dynamo puts these functions into its graph as they are, and AOTAutograd traces what they do: hooks are Python, which
Dynamo need not understand, on tensors that have no memory then.
"""

# Why: docs/design.md, note N64

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
    """Why hooks cannot be a part of a graph."""


class _Rebuild:
    """Makes a tensor that is made of others again, of other inner tensors; it keeps none."""

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
    """The hooks of a parameter as functions of plain tensors, which equal parameters share (``EqualHooks``).

    Attributes:
        encode: takes the local tensor's attributes; returns the pieces as they are sent, then the tensors of the
            metadata.
        decode: takes the gathered pieces, the tensors of the metadata, and what ``encode`` takes; returns the full
            parameter.
        sizes: of the pieces as they are sent.
        dtypes: the same.
        digest: of what ranks must have in common.
    """

    encode: Callable[..., tuple[Tensor, ...]]
    decode: Callable[..., Tensor]
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    digest: str


_functions: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def hook_code(parameter: ShardedParameter, names: Sequence[str]) -> HookCode:
    """The hooks of a parameter and of those that are equal, tried with tensors that have no memory.

    Args:
        parameter: with all-gather extensions.
        names: of the attributes of its local tensor that are tensors.

    Raises:
        NotTraceable: its local tensor cannot be made again of its attributes, or a hook needs values.
        RuntimeError, TypeError, ValueError: as ``runtime.pieces.encode`` and ``decode``.
    """
    local = parameter.local
    assert local is not None
    rebuild = _Rebuild(local, names)
    if not hasattr(local, PRE_HOOK):
        raise NotTraceable(f"a {rebuild.kind.__name__} has no {PRE_HOOK}")
    tensors = [getattr(local, name) for name in names]
    one_alive = partial(one_of, parameter.hooks_text)  # compiled code keeps the functions, which must keep no model

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
    """A piece's shape as it is sent: its own, or one dimension where the dtype that sends it has smaller elements."""
    per_element = piece.dtype.itemsize // wire_dtype(piece.dtype).itemsize
    return tuple(piece.shape) if per_element == 1 else (piece.numel() * per_element,)


@torch.compiler.allow_in_graph
def hooks_failed(param_id: Tensor, problem: str, spec_text: str) -> Tensor:
    """In the place of a parameter whose hooks went wrong while they were traced: our backend raises the error.

    There all ranks hear of it; what is traced after it goes on with a tensor of the parameter's size.
    """
    if not is_traced([param_id]):  # torch 2.11 computes Dynamo's fake tensors without saying that it compiles
        raise ValueError(problem)
    spec = ReadSpec.parse(spec_text)
    return torch.empty(spec.size, dtype=spec.dtype, device=param_id.device)


def is_hook_code(target: Any) -> bool:
    """Whether a call target in Dynamo's graph is one of these functions: with the same inputs it does the same."""
    return target is attach or target in _functions
