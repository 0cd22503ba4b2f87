#!/usr/bin/env bash
# An OpenAI-compatible server: examples/serve.sh [PAIR] [more flags of vllm serve]
# PAIR is a file of examples/pairs (default: tiny). Where the `vllm` command works, this is the same as
# vllm serve --config examples/pairs/PAIR.yaml; vLLM's CPU build needs the module. Python is that of .venv (`make env`)
# where there is one, else `python` of the active environment, or PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
pair=${1:-tiny}
[ -x .venv/bin/python ] && found=.venv/bin/python || found=python
exec "${PYTHON:-$found}" -m vllm.entrypoints.openai.api_server --config "examples/pairs/$pair.yaml" "${@:2}"
