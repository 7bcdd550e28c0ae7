"""The option `trace_equal_layers_once` for the short layers of tests."""

from compiled_fsdp.compiler import equal_layers


def trace_short_layers_once() -> None:
    """From now on, layers of 3 calls count, which are too short to gain anything."""
    equal_layers.LEAST_CALLS = 3
