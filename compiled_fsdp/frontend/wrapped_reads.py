"""Reads of a parameter with all-gather extensions in a graph: its hooks are traced, around the gathers of its pieces.

If the hooks cannot be traced, the graph is broken there and they run in eager code.
"""

# Why: docs/design/communication.md, "AOTAutograd traces the extensions' hooks"

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_fsdp.buckets.reduction import PIECE
from compiled_fsdp.compat.dynamo import break_graph
from compiled_fsdp.frontend.in_checkpoints import runs_twice
from compiled_fsdp.ops import calls, schema
from compiled_fsdp.ops.pieces import NotTraceable, hook_code, hooks_failed
from compiled_fsdp.ranks.same_models import compare_how_hooks_run
from compiled_fsdp.state.equal_hooks import one_of, share_changed
from compiled_fsdp.state.parameter import ShardedParameter
from compiled_fsdp.state.unit import ShardState, Unit


def read_wrapped(parameter: ShardedParameter, unit: Unit) -> torch.Tensor:
    """The full parameter. Dynamo traces this function."""
    if unit.retain_across_microbatches or (
        not runs_twice() and (unit.unsharded_params is not None or unit.state is ShardState.RETAINED)
    ):
        _break("is full already, or stays full over microbatches")
    full = gather_in_graph(parameter, unit.keep_for_backward)
    return calls.attach(parameter, full)


def gather_in_graph(parameter: ShardedParameter, keep: bool) -> torch.Tensor:
    """The full parameter, without a gradient.

    Args:
        parameter: a ``wrapped`` one.
        keep: whether the full parameter stays from forward to backward.
    """
    of, read_text = parameter.hooks.text, parameter.read_text
    tensors, present = [], []
    for name in _attribute_names(of, read_text):
        value = parameter.attributes[name]
        if value is not None:
            tensors.append(value)
            present.append(name)
    key = ",".join(present)
    why, failed, texts = _prepare(of, read_text, key)
    if why:
        _break(f"that cannot be traced: {why}")
    if failed:
        return hooks_failed(parameter.id_tensor, failed, read_text)
    code = parameter.hooks.codes[key]
    encoded = code.encode(*tensors)
    gathered = []
    for i, text in enumerate(texts):
        gathered.append(schema.read(encoded[i], None, parameter.block_ids, text, keep, 0))
    return code.decode(*gathered, *encoded[len(texts) :], *tensors)


def _break(why: str) -> None:
    break_graph(f"a parameter with all-gather extensions {why}")


# ---- decided while Dynamo traces, once for equal parameters ----------------------------------------------------------
# The arguments are texts, on which Dynamo guards, because torch 2.11 takes no other objects in such calls.
@torch.compiler.assume_constant_result
def _attribute_names(of: str, read_text: str) -> tuple[str, ...]:
    """The names of the local tensor's attributes that are tensors or None."""
    parameter = one_of(of, read_text)
    return tuple(
        name for name, value in parameter.attributes.items() if value is None or isinstance(value, torch.Tensor)
    )


@torch.compiler.assume_constant_result
def _prepare(of: str, read_text: str, key: str) -> tuple[str, str, tuple[str, ...]]:
    """Trace the hooks of equal parameters, for one set of attributes that are tensors.

    Args:
        of: the parameters' ``hooks.text``.
        read_text: their ``read_text``.
        key: the names of the attributes, joined by commas.

    Returns: why the hooks cannot be traced, or ""; the error that they raised, or "" (after an error they are tried
    again next time); and the ``ReadSpec`` of each piece, as text.
    """
    if share_changed(of):
        return "attributes of a local tensor have changed since it was sharded; traced anew in the next call", "", ()
    names = key.split(",") if key else []
    parameter, failed = one_of(of, read_text, names), ""
    if key not in parameter.hooks.codes:
        try:
            parameter.hooks.codes[key] = hook_code(parameter, names)
        except NotTraceable as reason:
            return str(reason), "", ()
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            failed = str(error)
        failed = compare_how_hooks_run(parameter, in_graph=True) or failed
        if failed:
            parameter.hooks.codes.pop(key, None)
            return "", failed, ()
    spec, code = parameter.read_spec, parameter.hooks.codes[key]
    texts = []
    for number, (size, dtype) in enumerate(zip(code.sizes, code.dtypes, strict=True)):
        full = (size[0] * spec.world, *size[1:]) if size else (spec.world,)
        piece = f"{PIECE} {number} {code.digest}"
        texts.append(str(replace(spec, size=full, dim=0, dtype=dtype, reduce=piece, device=None)))
    return "", "", tuple(texts)
