#!/usr/bin/env bash
# An OpenAI-compatible server: examples/serve.sh [PAIR] [more flags of vllm serve]
# PAIR is a file of examples/pairs (default: TARGET, or real, which `make real-target` prepares). Where the `vllm`
# command works, this is the same as vllm serve --config examples/pairs/PAIR.yaml; vLLM's CPU build needs the module.
# Python is that of .venv (`make env`) where there is one, else `python` of the active environment, or PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in ""|-*) set -- "${TARGET:-real}" "$@" ;; esac
pair=$1
[ -f "examples/pairs/$pair.yaml" ] || { echo "$0: no pair $pair; there are:" $(basename -s .yaml examples/pairs/*) >&2; exit 2; }
if [ "$pair" = real ] && [ ! -d .cache/real-target ]; then
  echo "examples/serve.sh: .cache/real-target is not there: run \`make real-target\`, or serve the tiny pair: $0 tiny" >&2
  exit 2
fi
# An x86 CPU without this instruction set multiplies bfloat16 many times slower than float32.
if [ "$pair" = real ] && [ "$(uname -m)" = x86_64 ] && ! grep -qs avx512_bf16 /proc/cpuinfo; then
  set -- "$pair" --dtype float32 "${@:2}"
fi
# vLLM's advice for a CPU, worth a twentieth of a round: Intel's OpenMP, which comes with its build, and tcmalloc.
for library in "$PWD/.venv/lib/libiomp5.so" "$(ldconfig -p 2>/dev/null | awk '/libtcmalloc/ {print $NF; exit}')"; do
  if [ -e "$library" ]; then export LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}$library"; fi
done
[ -x .venv/bin/python ] && python=.venv/bin/python || python=python
exec "${PYTHON:-$python}" -m vllm.entrypoints.openai.api_server --config "examples/pairs/$pair.yaml" "${@:2}"
