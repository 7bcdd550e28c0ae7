"""The base class of the exceptions that only compiled_fsdp raises; ``compiled_fsdp.errors`` exports all of them."""

from __future__ import annotations


class CompiledFsdpError(Exception):
    """The base class of all exceptions that only compiled_fsdp raises.

    Each of them is also a builtin exception. For example, ``OverBudget`` is a ``RuntimeError``. A bad argument or
    option raises a plain ``ValueError`` or ``TypeError``, and an unsupported feature a plain ``NotImplementedError``.
    """
