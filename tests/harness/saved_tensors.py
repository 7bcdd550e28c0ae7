"""Tensors that autograd saves for backward."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor


def saved_for_backward(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that the autograd graph behind `out` saves. Python's garbage collector does not see them."""
    stack, seen = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        found = [_saved(node, name) for name in dir(node) if name.startswith("_saved_")]
        found += [getattr(node, name, ()) for name in ("saved_tensors", "_tensors_no_vc_check")]
        for value in found:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    yield tensor


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError as error:
        if "is not kept from forward to backward" in str(error):  # a parameter that eager code has read
            return None
        raise


def bytes_of_full_parameters(full: list[torch.Tensor], out: torch.Tensor) -> int:
    """Return the bytes of live tensors that are copies of one of the given matrices, as it is or transposed."""
    gc.collect()
    mine = {tensor.data_ptr() for tensor in full}
    living = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    found: dict[int, int] = {}
    for tensor in [*living, *saved_for_backward(out)]:
        if isinstance(tensor, DTensor) or tensor.dim() != 2 or tensor.untyped_storage().nbytes() == 0:
            continue
        tensor = tensor.detach()
        if tensor.data_ptr() in mine:
            continue
        if any(
            torch.equal(shown, value) for value in full for shown in (tensor, tensor.t()) if shown.shape == value.shape
        ):
            found[tensor.data_ptr()] = tensor.nbytes
    return sum(found.values())
