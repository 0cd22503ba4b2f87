"""The prompts of requests that have finished, kept in a folder for ``peagle-vllm sharpen --from-records``. Opt-in.

Token ids of prompts, and nothing else: they are the users' text. The target answers them again when it is sharpened, so
its answers are not kept.
"""

import json
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from peagle_vllm.patches.ledger import Patch
from peagle_vllm.patches.patching import wrap
from peagle_vllm.serving import RefusedError, is_peagle, logger

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

RECORD = "PEAGLE_VLLM_RECORD"  # environment variable of the process that makes the configuration
FILE_BYTES = 32 << 20  # of each of an engine's two files; the older one is dropped

PATCH = Patch(
    name="record",
    runner="both",
    why="vLLM has no hook that sees the token ids of a finished request where requests are scheduled.",
    delete_when="vLLM's scheduler tells a plugin of finished requests",
    depends_on={"vllm.v1.core.sched.scheduler": ("Scheduler.__init__(...)", "Scheduler._free_request(...)")},
)


def read_folder(spec: "SpeculativeConfig") -> None:
    """Make the folder that ``RECORD`` names, if any. vLLM's processes inherit the environment.

    Raises:
        RefusedError: no file can be written there.
    """
    if not (value := os.environ.get(RECORD)):
        return
    folder = Path(value).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        line = f"{RECORD}={value} cannot be written ({error.strerror}); name another folder, or unset it"
        raise RefusedError(f"P-EAGLE refused: {line}") from None


def install(module: ModuleType) -> None:
    @wrap(module.Scheduler, "__init__")
    def __init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config = self.vllm_config
        if not is_peagle(config):
            return
        if folder := os.environ.get(RECORD):
            records, free = Records(Path(folder), config.parallel_config.data_parallel_index), self._free_request

            def _free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
                records.add(request)
                return free(request, *args, **kwargs)

            self._free_request = _free_request  # of this one; any other scheduler has vLLM's own


class Records:
    """One engine's file, a line a request. A failure ends recording, and disturbs no request."""

    def __init__(self, folder: Path, rank: int):
        """``rank``: of data parallelism; no two engines write into one file."""
        self._file: Path | None = folder / f"{rank}.jsonl"
        self._older = folder / f"{rank}.older.jsonl"
        try:
            if self._file.exists():
                self._file.chmod(0o600)
                # What a killed server left of a line, or the next one would follow it.
                os.truncate(self._file, self._file.read_bytes().rfind(b"\n") + 1)
        except OSError as error:
            self._stop(error)
            return
        line = "P-EAGLE records prompts as token ids, which are your users' text, in %s, up to %d MiB; unset %s to stop"
        logger.warning(line, self._file, 2 * FILE_BYTES >> 20, RECORD)

    def add(self, request: Any) -> None:
        """The prompt of a finished ``Request``, if it was answered and all of it is the target's own tokens."""
        if self._file is None:
            return
        try:
            is_text = not (request.mm_features or request.prompt_embeds is not None or request.lora_request)
            if is_text and request.num_output_tokens:
                line = json.dumps({"prompt": request.prompt_token_ids}, separators=(",", ":")) + "\n"
                self._write(self._file, line.encode())
        except Exception as error:
            self._stop(error)

    def _write(self, file: Path, line: bytes) -> None:
        if file.exists() and file.stat().st_size + len(line) > FILE_BYTES:
            file.replace(self._older)
        to = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(to, line) < len(line):  # one call, so that a killed server leaves half a line at most
                raise OSError("the disk is full")
        finally:
            os.close(to)

    def _stop(self, error: Exception) -> None:
        logger.warning("P-EAGLE records no more prompts in %s: %s: %s", self._file, type(error).__name__, error)
        self._file = None
