#!/usr/bin/env bash
# An OpenAI-compatible server: examples/serve.sh [PAIR] [more flags of vllm serve]
# PAIR is a file of examples/pairs (default: tiny). Where the `vllm` command works, this is the same as
# vllm serve --config examples/pairs/PAIR.yaml; vLLM's CPU build needs the module.
set -euo pipefail
cd "$(dirname "$0")/.."
pair=${1:-tiny}
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --config "examples/pairs/$pair.yaml" "${@:2}"
