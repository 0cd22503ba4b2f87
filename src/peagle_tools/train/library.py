"""``python -m peagle_tools.train.library`` is ``python -m speculators``, but for two of its rules."""

from importlib import import_module
from typing import Any

from speculators.cli import app
from speculators.data_generation import vllm_client

answering: Any = import_module("speculators.cli.regenerate_responses")  # its package has a function of that name
sample_of = answering._sample_from_response


def sample_from_response(data: dict[str, Any], **options: Any) -> Any:
    """Also of an answer that ended while the target reasoned, of which a parser leaves no content."""
    message = data["choices"][0]["message"]
    if not message.get("content") and message.get("reasoning"):
        message["content"] = " "
    return sample_of(data, **options)


def main() -> None:
    """Wait for a file as long as the disk takes: speculators gives up after 10 s, and asks for more files."""
    vllm_client.wait_for_lock_async.__defaults__ = (3600.0, *vllm_client.wait_for_lock_async.__defaults__[1:])
    answering._sample_from_response = sample_from_response
    app()


if __name__ == "__main__":
    main()
