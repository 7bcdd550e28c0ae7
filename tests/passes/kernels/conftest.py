"""The kernels as they run here: compiled where there is a CUDA device, else under Triton's interpreter."""

import importlib.util
from types import ModuleType

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def copy() -> ModuleType:
    """``compiled_fsdp/comm/kernels/copy.py``, or a second copy of it under the interpreter.

    The interpreter has to be chosen before a kernel is defined.
    """
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.find_spec("compiled_fsdp.comm.kernels.copy")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
