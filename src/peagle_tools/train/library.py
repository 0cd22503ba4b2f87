"""``python -m peagle_tools.train.library`` is ``python -m speculators``, but for three of its rules."""

import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from speculators.cli import app
from speculators.data_generation import vllm_client

answering: Any = import_module("speculators.cli.regenerate_responses")  # its package has a function of that name
offline: Any = import_module("speculators.cli.generate_offline_data")
sample_of = answering._sample_from_response


def sample_from_response(data: dict[str, Any], **options: Any) -> Any:
    """Also of an answer that ended while the target reasoned, of which a parser leaves no content."""
    message = data["choices"][0]["message"]
    if not message.get("content") and message.get("reasoning"):
        message["content"] = " "
    return sample_of(data, **options)


def exit_on_failure(work: Callable[..., Any]) -> Callable[..., Any]:
    """Where a worker fails, as on a full disk, so does the command: whoever feeds the workers would wait for ever."""

    async def worker(*args: Any, **options: Any) -> None:
        try:
            await work(*args, **options)
        except Exception:
            with suppress(OSError):  # the log may be on that disk
                traceback.print_exc()
            os._exit(1)

    return worker


def main() -> None:
    """Wait for a file as long as the disk takes: speculators gives up after 10 s, and asks for more files."""
    vllm_client.wait_for_lock_async.__defaults__ = (3600.0, *vllm_client.wait_for_lock_async.__defaults__[1:])
    answering._sample_from_response = sample_from_response
    for module in answering, offline:
        module._worker = exit_on_failure(module._worker)
    app()


if __name__ == "__main__":
    main()
