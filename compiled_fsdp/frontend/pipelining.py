"""A stand-in for FSDP2's state of a module, for code in torch and other libraries that asks for that state.

Torch's ``register_fsdp_forward_method`` and ``share_comm_ctx`` use the state, and so do pipeline schedules. A schedule
turns gradient sync off before each backward and on after the last one. Then, from torch 2.15 on, it calls
``finalize_backward()``; before torch 2.15 it asks for the state and calls the methods that finish its backward.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

from torch import nn

from compiled_fsdp.compat.modules import fsdp2_comm_context, register_torch_forward_methods, set_fsdp2_state
from compiled_fsdp.frontend.forward_hooks import ForwardHooks

register_torch_forward_methods()


class _StandIn:
    """A stand-in for an object of FSDP2's runtime. Attributes that are not ``known`` can neither be read nor set."""

    _called = "object"

    def __init__(self, called: str, *known: str, **attributes: Any) -> None:
        vars(self).update(attributes, _called=called, _known={*known, *attributes})

    def __getattr__(self, name: str) -> NoReturn:
        raise _not_there(f"{self._called}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._known:
            raise _not_there(f"{self._called}.{name}")
        super().__setattr__(name, value)


class FSDP2State(_StandIn):
    """The stand-in for the FSDP2 state of one unit's modules."""

    _hooks: ForwardHooks

    def __init__(self, hooks: ForwardHooks) -> None:
        # ``share_comm_ctx`` sets its streams; it has no other attribute
        group = _StandIn("parameter group", "comm_ctx")
        super().__init__(
            "state",
            _hooks=hooks,
            # shared by the states of a model; empty, so that a schedule finds no parameter groups to finish
            _state_ctx=_StandIn("state context", all_states=()),
            # torch's functions tell pipeline stages apart by it, and pass it on
            _comm_ctx=fsdp2_comm_context(),
            _fsdp_param_group=group,
            _fsdp_param_groups=[group],
        )

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._hooks.begin(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._hooks.end(module, args, output)

    def _root_post_backward_final_callback(self) -> None:
        for module in self._hooks.unit.modules:
            stage = cast(Any, module)
            # now the module is known to be a pipeline stage; this stays set, because the first forwards of the next
            # step come while gradient sync is still on
            stage.set_manual_backward_finalization(True)
            stage.finalize_backward()


def _not_there(what: str) -> AttributeError:
    return AttributeError(
        f"compiled_fsdp: {what!r} of torch's FSDP2 was asked of a module that compiled_fsdp sharded. It is a part of "
        "FSDP2's own runtime, in whose place there are operations of a graph. Use the module's methods (unshard(), "
        "reshard(), finalize_backward(), reset_iter_state() and the set_... ones) and its parameters, which are "
        "DTensors; or shard this model with torch.distributed.fsdp.fully_shard."
    )


def answer_as_fsdp2(hooks: ForwardHooks) -> None:
    """Give a unit's modules a stand-in for FSDP2's state, and tell torch's composable APIs that they are sharded."""
    state = FSDP2State(hooks)
    for root in hooks.unit.modules:
        root.__dict__["_fsdp2_state"] = state
        set_fsdp2_state(root, state)


def expect_fsdps_mark(managed: list[nn.Module]) -> None:
    """Prepare modules for the mark ``_is_fsdp_managed_module``, which transformers sets on modules that it shards.

    Dynamo breaks the graph at a module with that mark and without ``_fsdp_use_orig_params``. compiled_fsdp does not set
    the mark itself, as FSDP2 does, because Dynamo would then make symbols of the integers in compiled_fsdp's state,
    which are arguments of ops.
    """
    for module in managed:
        # because the module's own ``__setattr__`` may refuse
        module.__dict__["_fsdp_use_orig_params"] = True
