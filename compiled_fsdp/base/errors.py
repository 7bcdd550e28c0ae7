"""The base of the exceptions that only this package raises; ``compiled_fsdp.errors`` has them all."""

from __future__ import annotations


class CompiledFsdpError(Exception):
    """The base of all exceptions that are this package's own.

    Each of them is a builtin exception, too: ``OverBudget`` is a ``RuntimeError``, for example. A bad argument or
    option is a plain ``ValueError``, and what cannot be done is a plain ``NotImplementedError``.
    """
