"""Gathers of parameters with all-gather extensions: one hook makes the pieces to send, another the full parameter.

``encode`` and ``decode`` run the hooks, in eager code and while a graph is traced. ``PiecesInFlight`` gathers a bucket
of such parameters outside of graphs, with one collective for all pieces of one dtype. The first time, ranks compare
the results of their hooks and tell each other of a hook that failed, because pieces of different sizes would end a
process without a Python error (gloo) or make ranks wait for ever.
"""

# Why: docs/design/communication.md, "Extensions gather a list of pieces"

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_fsdp.base.plain_data import from_json
from compiled_fsdp.base.texts import gather_texts
from compiled_fsdp.buckets import collectives, transport
from compiled_fsdp.compat.autograd import is_wrapper, local_of, outside_of_autocast, outside_of_transforms
from compiled_fsdp.compat.graphs import fake_mode_is_active
from compiled_fsdp.compat.modules import tree_flatten
from compiled_fsdp.ranks import failures
from compiled_fsdp.ranks.liveness import sign_in
from compiled_fsdp.ranks.same_models import compare_how_hooks_run
from compiled_fsdp.runtime.in_flight import announce
from compiled_fsdp.sharding.extension import POST_HOOK, PRE_HOOK, check_hooks, number_of_arguments
from compiled_fsdp.state.parameter import ShardedParameter

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, enum.Enum)


class Encoded(NamedTuple):
    """The result of ``fsdp_pre_all_gather``."""

    # The tensors to gather, each of any shape.
    pieces: tuple[Tensor, ...]
    # An argument of ``fsdp_post_all_gather``.
    metadata: Any


# ---- the hooks -------------------------------------------------------------------------------------------------------
def encode(parameter: ShardedParameter, local: Tensor) -> Encoded:
    """Run ``fsdp_pre_all_gather`` of a local shard.

    Raises:
        RuntimeError: the hook raised.
        TypeError: the hook did not return tensors and metadata.
        ValueError: ``local`` has no such hook, or ranks cannot gather the pieces.
        NotImplementedError: the parameter is sharded on another dimension than 0, and a piece has another shape than
            the padded shard.
    """
    who = f"parameter {parameter.name!r}, a {type(local).__name__}"
    if not hasattr(local, PRE_HOOK):
        raise ValueError(
            f"compiled_fsdp: {who}, is made of other tensors, and has no {PRE_HOOK} that returns the tensors to "
            "gather. Define the two hooks of FSDP2's all-gather extensions, or keep it whole on each rank: "
            "fully_shard(ignored_params=...)."
        )
    check_hooks(repr(parameter.name), local)
    arguments: list[Any] = [parameter.hooks.arguments.mesh]
    if number_of_arguments(local) == 5:
        size = torch.Size(parameter.layout.size)
        arguments += [size, _contiguous_stride(size), parameter.owner[0], parameter.hooks.arguments.mp_policy]
    given = _called(who, PRE_HOOK, lambda: getattr(local, PRE_HOOK)(*arguments))
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], (tuple, list))):
        raise TypeError(
            f"compiled_fsdp: {PRE_HOOK} of {who}, must return ((tensor, ...), metadata), not {_kind(given)}."
        )
    pieces, metadata = given
    for piece in pieces:
        if not isinstance(piece, Tensor):
            raise TypeError(f"compiled_fsdp: {PRE_HOOK} of {who}, returned {_kind(piece)} among the tensors to gather.")
        if piece.device != parameter.device:
            raise ValueError(
                f"compiled_fsdp: {PRE_HOOK} of {who}, returned a tensor on {piece.device}, but {parameter.device} "
                "gathers it."
            )
    if not pieces:
        raise ValueError(f"compiled_fsdp: {PRE_HOOK} of {who}, returned no tensor to gather.")
    padded = torch.Size(parameter.layout.padded)
    if local.shape != padded and any(piece.shape != padded for piece in pieces):
        raise ValueError(
            f"compiled_fsdp: {who}, is unevenly sharded ({tuple(parameter.layout.size)} over {parameter.world} ranks): "
            f"{PRE_HOOK} must return all-gather inputs with the padded sharded size {tuple(padded)}, but got "
            f"{[tuple(piece.shape) for piece in pieces]}."
        )
    if parameter.dim > 0 and any(piece.shape != padded for piece in pieces):
        raise NotImplementedError(
            f"compiled_fsdp: {who}, is sharded on dimension {parameter.dim}, so {PRE_HOOK} must return tensors of the "
            f"shard's size {tuple(padded)}, but got {[tuple(piece.shape) for piece in pieces]}. Return Shard(0) from "
            "shard_placement_fn."
        )
    return Encoded(tuple(_plain_piece(who, piece).detach().contiguous() for piece in pieces), metadata)


def decode(parameter: ShardedParameter, local: Tensor, gathered: Sequence[Tensor], metadata: Any) -> Tensor:
    """Run ``fsdp_post_all_gather`` of a local shard, and return the full parameter, of its ``size``.

    Args:
        gathered: the pieces as ``arranged`` returns them.

    Raises:
        RuntimeError: the hook raised.
        TypeError: the hook did not return a tensor and a tuple of the tensors that own its memory.
        ValueError: the returned tensor has fewer elements than the parameter.
    """
    who = f"parameter {parameter.name!r}, a {type(local).__name__}"
    given = _called(who, POST_HOOK, lambda: getattr(local, POST_HOOK)(tuple(gathered), metadata, parameter.dtype))
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not (is_pair and isinstance(given[0], Tensor) and isinstance(given[1], (Tensor, tuple, list))):
        raise TypeError(
            f"compiled_fsdp: {POST_HOOK} of {who}, must return (tensor, (tensor, ...)) where out is None, not "
            f"{_kind(given)}."
        )
    full, size = given[0], torch.Size(parameter.layout.size)
    if full.shape == size:
        return full
    if full.numel() < math.prod(size):
        raise ValueError(
            f"compiled_fsdp: {POST_HOOK} of {who}, returned a tensor of shape {tuple(full.shape)}, but the parameter's "
            f"is {tuple(size)}."
        )
    return torch.as_strided(full, size, _contiguous_stride(size), 0)  # without the padding


def arranged(parameter: ShardedParameter, gathered: Tensor, size: Sequence[int]) -> Tensor:
    """A gathered piece as ``fsdp_post_all_gather`` gets it, with all ranks' parts along the first dimension.

    If the parameter is sharded on another dimension, the elements have the order of the full tensor's memory.

    Args:
        gathered: the parts of all ranks, one after the other.
        size: the shape of one rank's piece.
    """
    if parameter.dim > 0:
        gathered = gathered.view(parameter.world, *size).movedim(0, parameter.dim).reshape(-1)
    return gathered.view(-1, *size[1:])


def as_plain(tensor: Tensor) -> Tensor:
    """The tensor, or a plain copy if it is a wrapper subclass, as FSDP2 copies such pieces and gradients."""
    if not is_wrapper(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _plain_piece(who: str, piece: Tensor) -> Tensor:
    try:
        return as_plain(piece)
    except Exception as error:
        raise TypeError(
            f"compiled_fsdp: {PRE_HOOK} of {who}, returned a {type(piece).__name__} to gather, which is made of other "
            f"tensors and cannot be copied into a plain one ({type(error).__name__}: {error}); return those."
        ) from error


def _contiguous_stride(size: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))


def _called(who: str, hook: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise RuntimeError(f"compiled_fsdp: {hook} of {who}, raised {type(error).__name__}: {error}") from error


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"


# ---- comparison between ranks ----------------------------------------------------------------------------------------
def text_of(encoded: Encoded) -> str:
    """Pieces (dtypes and shapes) and metadata as text, which must be equal on all ranks."""
    return f"{[_text(piece) for piece in encoded.pieces]}, metadata {_text(encoded.metadata)}"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}{_text([getattr(value, field.name) for field in dataclasses.fields(value)])}"
    return type(value).__name__  # not its repr, which may have an address in it


def _digest_of_tensors(metadata: Any) -> str:
    tensors = [leaf for leaf in tree_flatten(metadata)[0] if isinstance(leaf, Tensor) and not is_wrapper(leaf)]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if tensors else ""


def _agree(parameters: Sequence[ShardedParameter], texts: list[str], error: Exception | None) -> None:
    """Compare texts, one for each parameter, with the other ranks, or tell them of an error: a collective call.

    Raises:
        RanksDiffer: the texts differ, or another rank's hook failed.
        Exception: ``error``, unless it is None.
    """
    first = parameters[0]
    group = first.group.first_group
    with failures.naming_ended_ranks:
        mine = json.dumps([texts, "" if error is None else str(error)])
        all_ranks = [from_json(tuple[list[str], str], text) for text in gather_texts(mine, group, first.device)]
    if error is not None:
        raise error
    for rank, (theirs, problem) in enumerate(all_ranks):
        if problem:
            raise failures.RanksDiffer(f"{problem} (reported by rank {rank} of the group; all its ranks stop)")
        for parameter, text, other in zip(parameters, texts, theirs, strict=False):
            if text != other:
                raise failures.RanksDiffer(
                    f"compiled_fsdp: the all-gather extensions of parameter {parameter.name!r} differ between ranks: "
                    f"rank {group.rank()} of the group has {text}; rank {rank} has {other}. {PRE_HOOK} has to return "
                    "tensors of the same shapes and dtypes, and the same metadata, on every rank."
                )


# ---- outside of graphs -----------------------------------------------------------------------------------------------
class PiecesInFlight:
    """The gathers of parameters with all-gather extensions, in flight until ``fulls``.

    Args:
        parameters: parameters of one group. Their pieces are launched at once, which is a collective call.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self._parameters = list(parameters)
        # Ranks compare the results of a parameter's hooks once, at its first gather, which all ranks launch together.
        # They do not compare fake tensors, because the other ranks may not run this code.
        self._is_fake = fake_mode_is_active()
        not_compared = any(parameter.hooks.pieces_text is None for parameter in parameters)
        self._first = parameters[0].world > 1 and not_compared and not self._is_fake
        self._liveness = sign_in(parameters[0].group)
        with torch.no_grad(), outside_of_transforms(), failures.telling(self._liveness):
            self._locals = [_on_device(parameter) for parameter in parameters]
            self._encoded = self._encode()
            # By dtype on the wire: the bucket, and the numbers of the parameter and of the piece for each piece in it.
            self._buckets: dict[torch.dtype, tuple[Tensor, list[tuple[int, int]]]] = {}
            self._launch()

    def _encode(self) -> list[Encoded]:
        for parameter in self._parameters if self._first else ():
            if different := compare_how_hooks_run(parameter, in_graph=False):
                raise failures.RanksDiffer(different)
        encoded, problem = [], None
        try:
            encoded = [encode(*each) for each in zip(self._parameters, self._locals, strict=True)]
        except (RuntimeError, TypeError, ValueError) as error:
            if not self._first:
                raise
            problem = error
        texts = [text_of(each) for each in encoded]
        if self._first:
            compared = [
                f"{text} {_digest_of_tensors(each.metadata)}" for text, each in zip(texts, encoded, strict=True)
            ]
            _agree(self._parameters, compared, problem)
        for parameter, text in zip(self._parameters, texts, strict=True):
            if parameter.hooks.pieces_text not in (None, text):
                raise ValueError(
                    f"compiled_fsdp: {PRE_HOOK} of parameter {parameter.name!r} returned {text}, but "
                    f"{parameter.hooks.pieces_text} in an earlier forward. Shapes, dtypes and metadata must not "
                    "change, because ranks compare them only once."
                )
            if not self._is_fake:
                parameter.hooks.pieces_text = text
        return encoded

    @outside_of_autocast
    def _launch(self) -> None:
        first = self._parameters[0]
        members: dict[torch.dtype, list[tuple[int, int]]] = {}
        for number, encoded in enumerate(self._encoded):
            for index, piece in enumerate(encoded.pieces):
                members.setdefault(transport.wire_dtype(piece.dtype), []).append((number, index))
        if first.world == 1:
            return
        for dtype, places in members.items():
            sent = [collectives.to_gather(self._piece(*place)) for place in places]
            size = first.world * dtype.itemsize * sum(piece.numel() for piece in sent)
            announce("gather", [[self._parameters[number] for number, _ in places]], [size], first.world)
            packed = sent[0] if len(sent) == 1 else torch.cat(sent)
            self._buckets[dtype] = transport.gather(packed, first.world, first.group.name), places

    def _piece(self, number: int, index: int) -> Tensor:
        return self._encoded[number].pieces[index]

    def fulls(self) -> list[Tensor]:
        """Wait for the pieces, and return the full parameters."""
        world = self._parameters[0].world
        gathered: dict[tuple[int, int], Tensor] = {}
        with torch.no_grad(), outside_of_transforms(), failures.telling(self._liveness):
            for bucket, places in self._buckets.values():
                by_rank, offset = failures.wait(bucket).view(world, -1), 0
                for place in places:
                    piece = self._piece(*place)
                    numel = piece.nbytes // bucket.itemsize
                    gathered[place] = by_rank.narrow(1, offset, numel).reshape(-1).view(piece.dtype)
                    offset += numel
            self._buckets.clear()
            fulls, problem = [], None
            try:
                for number, (parameter, local) in enumerate(zip(self._parameters, self._locals, strict=True)):
                    pieces, metadata = self._encoded[number]
                    outputs = [
                        # in a group of one a copy, because nobody may write to the rank's own pieces
                        arranged(parameter, piece.clone() if world == 1 else gathered[number, index], piece.shape)
                        for index, piece in enumerate(pieces)
                    ]
                    fulls.append(decode(parameter, local, outputs, metadata))
            except (RuntimeError, TypeError, ValueError) as error:
                if not self._first:
                    raise
                problem = error
            if self._first:
                _agree(self._parameters, [], problem)
        return fulls


def _on_device(parameter: ShardedParameter) -> Tensor:
    local = local_of(parameter.param)
    return local if local.device == parameter.device else local.to(parameter.device, non_blocking=True)
