"""vLLM's server with asynchronous scheduling, its default on a GPU; on V2 under Triton's interpreter.

The engine's process imports this file again.
"""

import os
import runpy

if os.environ.get("TRITON_INTERPRET"):
    from tools.interpreter import enable

    enable()  # before vLLM is imported

if __name__ == "__main__":
    from tests.support.engines import asynchronous

    with asynchronous():
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
