"""vLLM's server on Model Runner V2 without a GPU. Its engine's process imports this file again, before vLLM."""

import runpy

from tools.interpreter import enable

enable()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
