"""What torch's pipeline schedules want of a stage that is sharded, beyond FSDPModule's methods.

They turn gradient sync off before each backward and on after the last one. From torch 2.15 on they call ``finalize_backward()`` then; before,
they ask torch for the module's FSDP2 state and finish its backward by hand. There they get this stand-in.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from compiled_fsdp.compat import set_fsdp2_state


class StageState:
    """Stands for the FSDP2 state of ``module``, for torch's ``perform_reduce_grad``."""

    _state_ctx = SimpleNamespace(all_states=())  # whose parameter groups would be finished one by one

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def _root_post_backward_final_callback(self) -> None:
        module = cast(Any, self._module())
        # from now on it is known for a stage: the first forwards of the next step come while gradient sync is still on
        module.set_manual_backward_finalization(True)
        module.finalize_backward()


def let_schedules_finalize(module: nn.Module) -> None:
    """Let torch's pipeline schedules reduce what waits on ``module``."""
    set_fsdp2_state(module, StageState(module))
