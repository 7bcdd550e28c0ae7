"""What is logged while something runs."""

import contextlib
import logging
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The messages that come to the logger `name`, its children's too, in a list that grows."""
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
    """The warning about `set_requires_gradient_sync(False)` after a forward, which a process gives once, anew."""
    from compiled_fsdp.base import logs
    from compiled_fsdp.runtime import reducer

    with mock.patch.object(logs, "_logged", set()), logged(reducer.log.name) as messages:
        yield messages
