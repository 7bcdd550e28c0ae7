"""Record log messages while code runs."""

import contextlib
import logging
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Yield a list that grows with each message to the logger `name` or to its children."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def warnings_about_sync() -> Iterator[list[str]]:
    """Yield a list of the warnings about `set_requires_gradient_sync(False)` after a forward.

    A process gives this warning only once; inside this context it can come again.
    """
    from compiled_fsdp.base import logs
    from compiled_fsdp.runtime import reducer

    with mock.patch.object(logs, "_logged", set()), logged(reducer.log.name) as messages:
        yield messages
