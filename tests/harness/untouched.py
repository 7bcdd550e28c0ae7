"""Check that an error leaves the model unchanged."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def hooks_of(tensor: torch.Tensor) -> dict | None:
    return tensor._post_accumulate_grad_hooks


def picture(model: nn.Module) -> list:
    """Return all that sharding changes: classes, attributes, parameters with their memory, hooks."""
    return [
        (
            name,
            type(module),
            sorted(module.__dict__),
            [
                (n, id(p), type(p), p is not None and (local(p).data_ptr(), p.requires_grad, bool(hooks_of(p))))
                for n, p in dict.items(module._parameters)
            ],
            [(n, id(b), b.data_ptr()) for n, b in module._buffers.items()],
            [list(hooks) for hooks in module.__dict__.values() if isinstance(hooks, dict)],
        )
        for name, module in model.named_modules()
    ]


@contextlib.contextmanager
def refused(error: type[Exception], match: str, *models: nn.Module) -> Iterator[None]:
    """Expect an error that leaves the models unchanged."""
    before = [picture(model) for model in models]
    with pytest.raises(error, match=match):
        yield
    for model, was in zip(models, before, strict=True):
        assert picture(model) == was
