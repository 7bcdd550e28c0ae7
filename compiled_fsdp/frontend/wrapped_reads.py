"""How a parameter with all-gather extensions is read in a graph: its hooks are traced, around gathers of pieces.

Hooks that cannot be traced break the graph, and are run in eager code.
"""

# Why: docs/design.md, note N64

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_fsdp.buckets.reduction import PIECE
from compiled_fsdp.compat.dynamo import break_graph, skip_as_frame
from compiled_fsdp.frontend.in_checkpoints import runs_twice
from compiled_fsdp.ops import calls, schema
from compiled_fsdp.ops.pieces import NotTraceable, hook_code, hooks_failed
from compiled_fsdp.ranks.failures import RanksDiffer
from compiled_fsdp.ranks.same_models import compare_how_hooks_run
from compiled_fsdp.state.equal_hooks import one_of, share_changed
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import ShardState, Unit


@skip_as_frame
def read_wrapped(parameter: ShardedParameter, unit: Unit) -> torch.Tensor:
    """The full parameter; Dynamo traces this."""
    if unit.retain_across_microbatches or (
        not runs_twice() and (unit.unsharded_params is not None or unit.state is ShardState.RETAINED)
    ):
        _break("is full already, or stays full over microbatches")
    full = gather_in_graph(parameter, unit.keep_for_backward)
    return calls.attach(parameter, full)


@skip_as_frame
def gather_in_graph(parameter: ShardedParameter, keep: bool) -> torch.Tensor:
    """The full parameter, without a gradient; ``keep``: it stays from forward to backward."""
    of, read_text = parameter.hooks_text, parameter.read_text
    tensors, present = [], []
    for name in _attribute_names(of, read_text):
        value = parameter.attributes[name]
        if value is not None:
            tensors.append(value)
            present.append(name)
    key = ",".join(present)
    why = _prepare(of, read_text, key)
    if why:
        _break(f"that cannot be traced: {why}")
    failed = _failed(of, read_text, key)
    if failed:
        return hooks_failed(parameter.id_tensor, failed, *_as_computed(of, read_text))
    code = parameter.hook_codes[key]
    encoded = code.encode(*tensors)
    gathered = []
    texts = _texts(of, read_text, key)
    for i, text in enumerate(texts):
        gathered.append(schema.read(encoded[i], None, parameter.block_ids, text, keep, 0))
    return code.decode(*gathered, *encoded[len(texts) :], *tensors)


def _break(why: str) -> None:
    break_graph(f"a parameter with all-gather extensions {why}")


# ---- decided while Dynamo traces, once for equal parameters ----------------------------------------------------------
# Dynamo guards on the texts; torch 2.11 takes no other objects in such calls.
@torch.compiler.assume_constant_result
@skip_as_frame
def _attribute_names(of: str, read_text: str) -> tuple[str, ...]:
    """Of the local tensor's attributes those that are tensors, or nothing."""
    parameter = one_of(of, read_text)
    return tuple(
        name for name, value in parameter.attributes.items() if value is None or isinstance(value, torch.Tensor)
    )


@torch.compiler.assume_constant_result
@skip_as_frame
def _prepare(of: str, read_text: str, key: str) -> str:
    """Trace the hooks, with these attributes; why they cannot be, or "" if they can."""
    if share_changed(of):
        return "attributes of a local tensor have changed since it was sharded; traced anew in the next call"
    names = key.split(",") if key else []
    parameter = one_of(of, read_text, names)
    if key not in parameter.hook_codes:
        try:
            parameter.hook_codes[key] = hook_code(parameter, names)
        except NotTraceable as reason:
            return str(reason)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            parameter.hook_codes[key] = error
        if different := compare_how_hooks_run(parameter, in_graph=True):
            parameter.hook_codes[key] = RanksDiffer(different)
    return ""


@torch.compiler.assume_constant_result
@skip_as_frame
def _failed(of: str, read_text: str, key: str) -> str:
    """What went wrong when the hooks were tried; they are tried anew next time."""
    parameter = one_of(of, read_text)
    if isinstance(error := parameter.hook_codes[key], Exception):
        del parameter.hook_codes[key]
        return str(error)
    return ""


@torch.compiler.assume_constant_result
@skip_as_frame
def _as_computed(of: str, read_text: str) -> tuple[tuple[int, ...], str]:
    """The full parameter's shape and dtype."""
    parameter = one_of(of, read_text)
    return tuple(parameter.layout.size), str(parameter.dtype).removeprefix("torch.")


@torch.compiler.assume_constant_result
@skip_as_frame
def _texts(of: str, read_text: str, key: str) -> tuple[str, ...]:
    """What graphs are told of the pieces, each a ``ReadSpec``."""
    parameter = one_of(of, read_text)
    code = parameter.hook_codes[key]
    return tuple(
        str(
            replace(
                parameter.read_spec,
                size=(size[0] * parameter.world, *size[1:]) if size else (parameter.world,),
                dim=0,
                dtype=dtype,
                reduce=f"{PIECE} {number} {code.digest}",
                device=None,
            )
        )
        for number, (size, dtype) in enumerate(zip(code.sizes, code.dtypes, strict=True))
    )
