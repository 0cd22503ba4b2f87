"""speculators' commands, in whose log each error has its kind: a TimeoutError has no text, so its reason was empty."""

import logging
from typing import Any

make_record = logging.getLogRecordFactory()


def with_kinds(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """A record whose exceptions are ``KIND: TEXT``."""
    record = make_record(*args, **kwargs)
    if isinstance(record.args, tuple):
        record.args = tuple(
            f"{type(arg).__name__}: {arg}" if isinstance(arg, Exception) else arg for arg in record.args
        )
    return record


if __name__ == "__main__":
    from speculators.cli import app

    logging.setLogRecordFactory(with_kinds)
    app()
