"""The options of ``torch.compile(model, backend="compiled_fsdp", options={...})``; an error names every bad value."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compiled_fsdp.base.renamed import BUCKETS, OPTIONS, warn_renamed
from compiled_fsdp.base.sizes import parse_size, too_small_a_budget
from compiled_fsdp.passes.cost import PROFILES, Hardware
from compiled_fsdp.passes.pipeline import pass_names

BACKEND = "compiled_fsdp"
"""The backend's name, for ``torch.compile``."""


@dataclass(frozen=True)
class Options:
    """Options of the backend, checked when they are made.

    ``torch.compile``, ``explain`` and ``compiled_autograd`` take an ``Options`` or a dictionary of the same names::

        options = Options(memory_budget="60GB", hardware="h100")
        model.compile(backend="compiled_fsdp", options=options)
        model.compile(backend="compiled_fsdp", options={"memory_budget": "60GB", "hardware": "h100"})

    The first form raises an error for a bad value at once, the second one at the first call of the model.

    Attributes:
        bucket: which parameters share a collective. "auto": the planner chooses; "module": one bucket for each
            ``fully_shard`` unit or repeated block; "parameter": one bucket for each parameter; a number: the megabytes
            of a bucket (10**6 bytes of full parameters); or your own plan, a list of lists of patterns (``fnmatch``) of
            parameter names, for example ``[["embed*"], ["*.0.*", "*.1.*"]]``. The first list that matches a name
            counts. A parameter that matches no list has a bucket of its own.
        overlap: launch collectives ahead of the compute that hides them. With False, each is launched right before its
            wait.
        prefetch: with ``bucket="module"`` or ``"parameter"``, launch the next gather "before" a unit's compute, or
            "after" it, which takes less memory.
        codegen: "inductor", or "aot_eager", which runs the rewritten graphs node by node. The latter compiles quickly,
            for tests.
        verify: "plan" checks each rewritten graph against its plan and budget. "full" also checks the graph after every
            pass, and leaves Inductor's assertions about results of compiled_fsdp's ops in the code. "off" checks no
            graphs. All ranks always check that they compile the same regions.
        disable_passes: names of passes to leave out, from ``compiled_fsdp.passes.pipeline``.
        inductor: Inductor's own options, for example ``{"max_autotune": True}``.
        collectives_at_world_size_1: keep collectives in a group of one rank, for debugging and timing.
        memory_budget: a hard limit on the memory that a compiled step holds at its peak on one rank: a number of bytes,
            a fraction (at most 1.0) of the device's memory (on CPUs of this rank's share, ``1 / LOCAL_WORLD_SIZE``), or
            a text ("80GB", "60GiB", "0.9"), which becomes a number. With None, the limit is the larger of two: the
            least memory that the step needs plus two of its largest units, or the memory of FSDP2's order (one gather
            ahead, or its prefetch lists). If units are very small, it is more.
        offload_activations: whether the memory budget may copy activations to host memory in forward, and back in
            backward. "auto": on GPUs, in at most half of this rank's part of the machine's memory. A number of bytes,
            or a text ("40GB"): in at most so much. False: never. True: as "auto", also if the device is a CPU; then
            "host memory" is memory beside that of torch's allocator, for tests.
        optimizer_bytes_per_element: bytes of optimizer state for each element of a trained parameter, for the memory
            budget.
        reshard_after_forward: "as sharded": as ``fully_shard`` was told. "auto": keep those parameters unsharded from
            forward to backward that save the most time under the budget.
        hardware: the hardware to plan for. "auto": the result of ``measure_hardware()``, or else the profile of the
            device's name. Or the name of a profile, in upper or lower case ("h100"), or a ``Hardware``, for example
            the ``costs`` of a ``profile``; or the path of a file with its ``to_json()``, which ends in ".json".
        recheck_prefetched: across graph breaks, a gather is in flight before its graph is called. True compares the
            shards with the data that was sent before the result is used, and gathers again if a rank has written to
            them in between. False trusts that nobody writes to a parameter while a forward is running.
        kernels: whether compiled_fsdp's Triton kernels copy into buckets and out of them, with one launch for all
            tensors. "auto": if the model computes on a GPU and Triton is installed. False: the copies are left to
            Inductor. True: always; without a GPU the same ops are torch's own operations, for tests.
        transport: what sends the collectives over the ranks that shard. "backend": the process group's backend (NCCL,
            gloo). "symm_mem": the copy engines of the GPUs, over memory that all ranks of a node have mapped, so that
            compute beside a collective is hardly slowed down; needs GPUs, a mesh whose shards are inside a node, and
            ``codegen="inductor"``. Nobody has run it on a GPU yet.
        one_rank_compiles: whether one rank of each machine compiles, and its other ranks take the code from torch's
            cache on disk. Only where ranks run the same code and their caches are in one folder, and not with replicas
            (HSDP): otherwise each rank compiles. False: each rank always compiles.
        trace_equal_layers_once: whether AOTAutograd traces equal layers of a model once. The graphs are the same as if
            it traced each of them, and large models compile faster. Only with torch 2.13. False: it traces all.
        gathers_ahead: whether the first gather of a forward may be launched by the training step before it. For
            ``TrainStep``, which sets it; without one the gather is launched by the forward.
    """

    bucket: Literal["auto", "module", "parameter"] | float | list[list[str]] = "auto"
    overlap: bool = True
    prefetch: Literal["before", "after"] = "before"
    codegen: Literal["inductor", "aot_eager"] = "inductor"
    verify: Literal["plan", "full", "off"] = "plan"
    disable_passes: Sequence[str] = ()
    inductor: Mapping[str, Any] = field(default_factory=dict)
    collectives_at_world_size_1: bool = False
    optimizer_bytes_per_element: float = 8
    memory_budget: float | str | None = None
    offload_activations: Literal["auto"] | bool | float | str = "auto"
    reshard_after_forward: Literal["as sharded", "auto"] = "as sharded"
    hardware: str | Path | Hardware = "auto"
    recheck_prefetched: bool = True
    kernels: Literal["auto"] | bool = "auto"
    transport: Literal["backend", "symm_mem"] = "backend"
    one_rank_compiles: bool = True
    trace_equal_layers_once: bool = True
    gathers_ahead: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bucket", _checked_bucket(self.bucket))
        _check_choice("prefetch", self.prefetch, ("before", "after"))
        if self.prefetch == "after" and self.bucket not in ("module", "parameter"):
            raise ValueError(
                "compiled_fsdp: option 'prefetch': 'after' needs bucket='module' or 'parameter'. With "
                f"bucket={self.bucket!r} the planner decides when to launch."
            )
        _check_choice("codegen", self.codegen, ("inductor", "aot_eager"))
        _check_choice("verify", self.verify, ("plan", "full", "off"))
        _check_choice("kernels", self.kernels, ("auto", True, False))
        _check_choice("transport", self.transport, ("backend", "symm_mem"))
        _check_choice("reshard_after_forward", self.reshard_after_forward, ("as sharded", "auto"))
        object.__setattr__(self, "hardware", _checked_hardware(self.hardware))
        object.__setattr__(self, "memory_budget", _checked_budget(self.memory_budget))
        object.__setattr__(self, "offload_activations", _checked_offload(self.offload_activations))
        for name in (
            "overlap",
            "collectives_at_world_size_1",
            "recheck_prefetched",
            "one_rank_compiles",
            "trace_equal_layers_once",
            "gathers_ahead",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"compiled_fsdp: option {name!r} must be True or False, but got {getattr(self, name)!r}."
                )
        if not (_is_number(self.optimizer_bytes_per_element) and self.optimizer_bytes_per_element >= 0):
            raise ValueError(
                "compiled_fsdp: option 'optimizer_bytes_per_element' must be a number of bytes >= 0, but got "
                f"{self.optimizer_bytes_per_element!r}."
            )
        if isinstance(self.disable_passes, str) or not isinstance(self.disable_passes, Sequence):
            raise ValueError(
                f"compiled_fsdp: option 'disable_passes' must be a sequence of names, but got {self.disable_passes!r}."
            )
        object.__setattr__(self, "disable_passes", tuple(self.disable_passes))
        for name in self.disable_passes:
            _check_choice("disable_passes", name, pass_names())
        if not isinstance(self.inductor, Mapping):
            raise ValueError(
                f"compiled_fsdp: option 'inductor' must be a dict of Inductor's options, but got {self.inductor!r}."
            )

    @classmethod
    def parse(cls, options: Options | Mapping[str, Any] | None) -> Options:
        """Return options from the argument ``options`` of ``torch.compile``.

        Raises:
            ValueError: an unknown option or a bad value; the message says which values the option takes.
        """
        if isinstance(options, cls):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"compiled_fsdp: options must be a dict or compiled_fsdp.Options, but got {options!r}.")
        options = dict(options or {})
        for old, new in OPTIONS.items():
            if old in options:
                warn_renamed(f"option {old!r}", repr(new))
                options.setdefault(new, options.pop(old))
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"compiled_fsdp: unknown option {name!r}.{hint} Known options: {', '.join(known)}; Inductor's own "
                    "go into 'inductor'."
                )
        return cls(**options)


def _checked_bucket(bucket: Any) -> Any:
    """Return the option ``bucket``, with tuples for its lists."""
    if _is_number(bucket):
        if not 0 < bucket < float("inf"):
            raise ValueError(f"compiled_fsdp: option 'bucket' must be a size above 0 MB, but got {bucket!r}.")
        return bucket
    if isinstance(bucket, Sequence) and not isinstance(bucket, str):
        lists = [isinstance(names, Sequence) and not isinstance(names, str) for names in bucket]
        if not bucket or not all(lists) or not all(isinstance(name, str) for names in bucket for name in names):
            raise ValueError(
                "compiled_fsdp: option 'bucket' as your own plan must be a list of lists of parameter-name patterns, "
                f'e.g. [["layers.0.*"], ["layers.1.*", "norm.*"]], but got {bucket!r}.'
            )
        return tuple(map(tuple, bucket))
    if isinstance(bucket, str) and bucket in BUCKETS:
        warn_renamed(f"option 'bucket': {bucket!r}", repr(BUCKETS[bucket]))
        return BUCKETS[bucket]
    if bucket not in ("auto", "module", "parameter"):
        raise ValueError(
            "compiled_fsdp: option 'bucket' takes 'auto', 'module', 'parameter', a number of MB, or a list of lists of "
            f"parameter-name patterns, but got {bucket!r}."
        )
    return bucket


def _checked_hardware(hardware: Any) -> str | Hardware:
    """Return the option ``hardware`` as a name or as a value; a file is read."""
    if isinstance(hardware, str) and hardware.lower() in ("auto", *PROFILES):
        return hardware.lower()
    if isinstance(hardware, (str, Path)) and Path(hardware).suffix == ".json":
        try:
            return Hardware.from_json(Path(hardware).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"compiled_fsdp: option 'hardware': the file {str(hardware)!r}: {error}.") from error
    if not isinstance(hardware, Hardware):
        _check_choice("hardware", hardware, ("auto", *PROFILES))
    return hardware


def _checked_budget(budget: Any) -> float | None:
    """Return the option ``memory_budget`` in bytes or as a fraction; a text becomes a number."""
    size = budget
    if isinstance(budget, str):
        try:
            size = parse_size(budget)
        except ValueError as error:
            raise ValueError(f"compiled_fsdp: option 'memory_budget': {error}; but got {budget!r}.") from None
    if size is None:
        return None
    if not (_is_number(size) and size > 0 and (size <= 1 or 100 < size < float("inf") or size % 1 == 0)):
        raise ValueError(
            "compiled_fsdp: option 'memory_budget' must be a number of bytes, or a fraction of the device's memory "
            f"above 0 and at most 1.0, or a size such as '80GB', but got {budget!r}."
        )
    if why := too_small_a_budget(size):
        raise ValueError(f"compiled_fsdp: option 'memory_budget' is {budget!r}, which is {why}.")
    return size if size <= 1 or isinstance(budget, int) else float(round(size))  # 0.8 * total_memory has a fraction


def _checked_offload(choice: Any) -> bool | float | str:
    """Return the option ``offload_activations``: "auto", True, False, or bytes."""
    if choice == "auto" or isinstance(choice, bool):
        return choice  # type: ignore[no-any-return]
    size = choice
    if isinstance(choice, str):
        try:
            size = parse_size(choice)
        except ValueError as error:
            raise ValueError(f"compiled_fsdp: option 'offload_activations': {error}; but got {choice!r}.") from None
    if not (_is_number(size) and size > 1):
        raise ValueError(
            "compiled_fsdp: option 'offload_activations' takes 'auto', True, False, or the most bytes of host memory "
            f"such as '40GB', but got {choice!r}."
        )
    return float(size)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    # 1 does not count as True
    if any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices):
        return
    taken = ", ".join(map(repr, choices))
    raise ValueError(f"compiled_fsdp: option {name!r} takes {taken}, but got {value!r}.")
