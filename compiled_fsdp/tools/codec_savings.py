"""The savings of codecs: bytes on the wire, and how much longer a step would take without encoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from compiled_fsdp.buckets.spec import Kind
from compiled_fsdp.tools.steps import Step
from compiled_fsdp.tools.what_if import without_codecs
from compiled_fsdp.tools.words import megabytes, milliseconds


@dataclass(frozen=True)
class CodecSavings:
    """The savings in a step because codecs encode the tensors of one kind of collective.

    Attributes:
        kind: "gather" or "reduce".
        codecs: the names of the codecs: "int8/256".
        bytes: the encoded bytes that are sent for the full tensors.
        exact_bytes: the bytes that would be sent without codecs.
        saved_seconds: how much longer the step would take if it were planned without codecs. Encoding and decoding
            count. None if no plan without codecs fits into memory.
        graphs: the numbers of the step's graphs in ``Explanation.graphs``.
    """

    kind: Kind
    codecs: tuple[str, ...]
    bytes: int
    exact_bytes: int
    saved_seconds: float | None
    graphs: tuple[int, ...]

    def __str__(self) -> str:
        saves = "which fits into memory only so"
        if self.saved_seconds is not None:
            took = "saves" if self.saved_seconds >= 0 else "costs"
            saves = f"which {took} {milliseconds(abs(self.saved_seconds))}"
        graphs = ("graph " if len(self.graphs) == 1 else "graphs ") + ", ".join(map(str, self.graphs))
        return (
            f"{self.kind.plural} of {graphs} send {megabytes(self.bytes)} as {', '.join(self.codecs)} in place of "
            f"{megabytes(self.exact_bytes)}, {saves}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the same figures as plain data, for ``json.dumps``."""
        return asdict(self) | {"codecs": list(self.codecs), "graphs": list(self.graphs)}


def codec_savings(steps: Sequence[Step]) -> Iterator[CodecSavings]:
    """Yield the savings of each step and kind of collective that has codecs."""
    for step in steps:
        for kind in Kind:
            tasks = [task for graph in step.graphs for task in graph.tasks.collectives(kind)]
            encoded = [task for task in tasks if task.size.decoded]
            if not encoded:
                continue
            indices = {task.read for task in encoded}
            reads = [read for read in step.reads if read.index in indices]
            codecs = {read.codec if kind is Kind.GATHER else read.reduce_spec.codec for read in reads}
            exact = step.replanned(partial(without_codecs, kind=kind))
            saved = None if exact is None else sum(found.seconds for found in exact) - step.seconds
            sent, full = (sum(sizes) for sizes in zip(*((t.size.sent, t.size.full) for t in encoded), strict=True))
            yield CodecSavings(kind, tuple(sorted(codecs)), sent, full, saved, step.numbers)
