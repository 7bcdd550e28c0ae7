"""The kernels as they run here: compiled where there is a CUDA device, else under Triton's interpreter."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _interpreted() -> Iterator[None]:
    """Kernels that are defined meanwhile run under the interpreter, where there is no CUDA device."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield


def _load(name: str) -> ModuleType:
    """A second module of the text of one of ``compiled_fsdp/buckets/kernels``."""
    spec = importlib.util.find_spec(f"compiled_fsdp.buckets.kernels.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def copy() -> ModuleType:
    with _interpreted():
        return _load("copy")


@pytest.fixture(scope="session")
def _codec() -> ModuleType:
    with _interpreted():
        return _load("codec")


@pytest.fixture
def codec(_codec: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if DEVICE.type == "cpu":
        import triton.language as tl

        # A kernel of Triton's own, defined before, that the interpreter cannot call; what it consists of, it can
        maximum = tl.standard._elementwise_max
        monkeypatch.setattr(tl, "max", lambda values, axis: tl.reduce(values, axis, maximum))
    return _codec
