"""The functions of torch that compiled_fsdp replaces, why, and what does not work without each replacement.

Torch has no hook at these places, so compiled_fsdp replaces torch's function by one that calls it. Nothing is replaced
at import: some functions are replaced at the first ``fully_shard`` or compile, for good, the others only while torch
compiles. Before that, the parameters of torch's function are compared with the parameters that the replacement needs.
``python -m compiled_fsdp patches`` shows the result for the installed torch.
"""

# Why: docs/design/torch.md, "Unknown versions of torch"

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_fsdp.compat.versions import OLDEST, Needed, needed_names, version_of

Function = Callable[..., Any]


@dataclass(frozen=True)
class Patch:
    """A function of torch that compiled_fsdp replaces.

    Attributes:
        owner: the module that has the function: "torch._dynamo.convert_frame", or with a class,
            "torch.library:Library".
        attribute: the function's name there.
        parameters: names of its parameters that the replacement needs, in order; several tuples if torch versions
            differ.
        since: the first version of torch that has the function; older versions need no replacement.
        caller: a function in the same module, whose local variables the replacement reads; "" for none.
        variables: the names of those variables.
        when: when it is replaced: "at the first `fully_shard`" (and from then on) or "while torch compiles".
        why: the purpose of the replacement.
        lost: the features that do not work without it.
        instead: the feature of torch that would make the replacement unnecessary.
    """

    owner: str
    attribute: str
    parameters: tuple[tuple[str, ...], ...]
    when: str
    why: str
    lost: str
    instead: str
    since: tuple[int, int] = OLDEST
    caller: str = ""
    variables: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The function's name with its owner, as in Python."""
        return f"{self.owner.replace(':', '.')}.{self.attribute}"

    def place(self) -> Any:
        """Return the module or class that has the function."""
        module, _, cls = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, cls) if cls else found

    @property
    def is_needed(self) -> bool:
        """Whether the installed torch is not older than ``since``."""
        return version_of(torch.__version__) >= self.since

    def problem(self) -> str:
        """Return how the installed torch differs from the torch that the replacement needs; "" if it does not."""
        if not self.is_needed:
            return ""
        try:
            function = getattr(self.place(), self.attribute)
        except (ImportError, AttributeError):
            return "is gone"
        named = list(inspect.signature(function).parameters)
        if not any([name for name in named if name in wanted] == list(wanted) for wanted in self.parameters):
            wanted = " or ".join(", ".join(names) for names in self.parameters)
            return f"takes ({', '.join(named)}), and not ({wanted})"
        if self.caller:
            code = getattr(getattr(self.place(), self.caller, None), "__code__", None)
            known = () if code is None else (*code.co_varnames, *code.co_cellvars)
            if missing := [name for name in self.variables if name not in known]:
                return f"is called by {self.caller}, which has no variable {', '.join(missing)}"
        return ""


STANCE = Patch(
    "torch._dynamo.eval_frame",
    "_callback_from_stance",
    (("callback",),),
    "at the first `fully_shard`",
    "Models run uncompiled under a FakeTensorMode. With the stance eager_on_recompile, no rank runs uncompiled while "
    "others run compiled code.",
    "A step of fake tensors is compiled, and its code stays. With eager_on_recompile, ranks may wait for each other "
    "until the timeout.",
    "a way for backends to decide whether a call runs compiled code",
)
BREAKS = Patch(
    "torch._dynamo.symbolic_convert:SpeculationEntry",
    "fail_and_restart_analysis",
    (("self",),),
    "at the first `fully_shard`",
    "Notes the values that lead to a graph break, so that code with the break is guarded on them.",
    "A rank may run code with a graph break in steps that have none, with other collectives than the other ranks.",
    "guards that outlive a restart of the analysis",
)
AFTER_BREAKS = Patch(
    "torch._dynamo.symbolic_convert:SpeculationEntry",
    "failed",
    (("self", "tx"),),
    "at the first `fully_shard`",
    "Adds the noted guards when Dynamo starts the trace again.",
    BREAKS.lost,
    BREAKS.instead,
)
UNUSED_INPUT = Patch(
    "torch.autograd",
    "_engine_run_backward",
    (("t_outputs",), ("args",)),
    "at the first `fully_shard`",
    "The error of torch.autograd.grad that a tensor was not used names the parameter.",
    "The error does not name the parameter.",
    "the unused tensor, as an attribute of the error",
)
RECOMPILE_LIMIT = Patch(
    "torch._dynamo.convert_frame",
    "exceeds_recompile_limit",
    (("cache_size", "compile_id"),),
    "at the first compile for several ranks",
    "One rank that comes to a recompile limit goes on compiling: uncompiled it would call other collectives.",
    "At torch._dynamo.config.recompile_limit one rank alone may run uncompiled, and wait for the others until the "
    "timeout.",
    "a callback at a limit",
    caller="_compile",
    variables=("code", "compiler_fn", "recompile_reason"),
)
KEPT_GRAPHS = Patch(
    "torch._functorch._aot_autograd.runtime_wrappers:AOTDispatchAutograd",
    "post_compile",
    (("spec",), ("compiled_fw_func", "compiled_bw_func")),
    "while torch compiles",
    "backward(retain_graph=True) works with a backward that writes to saved tensors: it gets copies of them.",
    "backward(retain_graph=True) is torch's error about donated buffers.",
    "a compile option: the backward may be run twice",
)
CACHE_LOOKUP = Patch(
    "torch._functorch._aot_autograd.autograd_cache:AOTAutogradCache",
    "try_load",
    (("local", "remote"),),
    "while torch compiles",
    "Asks all ranks whether to take what the cache of compiled code has.",
    "Compiled code is not taken from the cache.",
    "a callback that decides on what was found",
)
CACHED_CODE = Patch(
    "torch._inductor.output_code:CompiledFxGraph",
    "post_compile",
    (("self", "example_inputs", "constants", "graph_kwargs"),),
    "while torch compiles",
    "Finds the code of each graph among what the cache has given.",
    CACHE_LOOKUP.lost,
    CACHE_LOOKUP.instead,
)
SUBGRAPHS = Patch(
    "torch._inductor.graph:SubgraphLowering",
    "__init__",
    (("self", "parent"),),
    "while torch compiles",
    "Functions in a backward graph do not take what they are given for saved tensors, which they could overwrite.",
    "Inductor generates code for each of several equal layers.",
    "inputs of nested graphs that are nobody's saved tensors (pytorch/pytorch#192840)",
)
CAPTURE = Patch(
    "torch._functorch.aot_autograd",
    "aot_stage1_graph_capture",
    (("aot_state", "orig_flat_fn"),),
    "while torch compiles",
    "Puts the traced body of equal layers in the place of each call of it, right after the trace.",
    "Equal layers are traced one by one, so that large models take longer to compile.",
    "a hook that is called with AOTAutograd's graph before torch's own passes",
)
BODY_SCHEMA = Patch(
    "torch._higher_order_ops.invoke_subgraph:InvokeSubgraphHOP",
    "gen_schema",
    (("subgraph", "identifier"),),
    "while torch compiles",
    "Torch traces a body at every call of it, to find the inputs that it writes to. The replacement does so once.",
    CAPTURE.lost,
    "a schema that is kept for each body",
)
PRE_HOOKS = Patch(
    "torch._dynamo.compiled_autograd:AutogradCompilerInstance",
    "reorder_pre_hook_nodes_to_mimic_eager",
    (("self",),),
    "while torch compiles",
    "Compiled autograd places hooks whose first gradient nothing uses, at which torch ends in StopIteration.",
    "Compiled autograd ends in StopIteration where a graph has an output that needs no gradient.",
    "the repaired function",
)

REUSED_REGIONS = Patch(
    "torch._dynamo.variables.invoke_subgraph",
    "is_reusable",
    (("tx", "condition", "fingerprint", "cached_entry"),),
    "at the first compile",
    "Torch reuses a nested region's graph for another call on conditions that it checks while it traces, but does not "
    "guard on. The replacement adds the guards.",
    "A layer in a nested region that is frozen after the compile may still run the code for a trained layer.",
    "guards on these conditions",
    since=(2, 13),
)

PATCHES = (
    STANCE, BREAKS, AFTER_BREAKS, UNUSED_INPUT, RECOMPILE_LIMIT, KEPT_GRAPHS, CACHE_LOOKUP, CACHED_CODE, SUBGRAPHS,
    CAPTURE, BODY_SCHEMA, PRE_HOOKS, REUSED_REGIONS,
)  # fmt: skip
"""All replacements."""


def required_names() -> list[Needed]:
    """Return the private names of torch that this folder imports and the installed torch must have.

    For example, torch 2.11 has no nested regions that are reused, so it needs no name of ``REUSED_REGIONS.owner``.
    """
    not_needed = {patch.owner.partition(":")[0] for patch in PATCHES if not patch.is_needed}
    return [name for name in needed_names(Path(__file__).parent) if name.module not in not_needed]


def install(patch: Patch, replacement: Callable[[Function], Function]) -> None:
    """Replace a function for good, once in a process.

    Args:
        patch: one of ``PATCHES``.
        replacement: takes torch's function, returns the function to call instead.
    """
    if patch in _installed or not patch.is_needed or not fits(patch):
        return
    _installed.add(patch)
    place = patch.place()
    before = getattr(place, patch.attribute)
    setattr(place, patch.attribute, functools.wraps(before)(replacement(before)))


def is_installed(patch: Patch) -> bool:
    """Whether ``install`` has replaced the function."""
    return patch in _installed


_installed: set[Patch] = set()


@contextlib.contextmanager
def installed(patch: Patch, replacement: Callable[[Function], Function]) -> Iterator[None]:
    """Replace a function as ``install`` does, while the context lasts."""
    if not (patch.is_needed and fits(patch)):
        yield
        return
    place = patch.place()
    kept, before = place.__dict__[patch.attribute], getattr(place, patch.attribute)
    mine = functools.wraps(before)(replacement(before))
    setattr(place, patch.attribute, staticmethod(mine) if isinstance(kept, staticmethod) else mine)
    try:
        yield
    finally:
        setattr(place, patch.attribute, kept)


@functools.cache
def fits(patch: Patch) -> bool:
    """Whether the installed torch has the function that the patch needs; if not, warn once."""
    problem = patch.problem()
    if problem:
        warnings.warn(f"compiled_fsdp: in torch {torch.__version__} {patch.name} {problem}. {patch.lost}", stacklevel=2)
    return not problem
