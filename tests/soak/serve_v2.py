"""vLLM's server on Model Runner V2 without a GPU. Its engine's process imports this file again, before vLLM."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.interpreter import enable

enable()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
