"""Write docs/first-hour.md: a user's first hour, typed into a shell by ``python -m tools.first_hour`` (twenty minutes).

The shell starts in an empty folder beside a clone, with an empty environment and a wheel built from the clone. A test
holds the page to STEPS and to today's command line.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/first-hour.md"
WHEEL = "../dist/peagle_vllm-*.whl"
PAIR = "tiny-llama tiny-llama-peagle --prompts heldout.jsonl"
# What the tiny pair needs on a CPU beside the pair itself.
SERVE = (
    "--serve '--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 8 --kv-cache-memory-bytes 268435456'"
)
WIDTH, HEAD_LINES, TAIL_LINES = "110", 14, 26


# What each step is for, in Markdown, and its commands.
STEPS = (
    (
        'Install. On a GPU it is `pip install "peagle-vllm[cuda,bench]"`, without the second line; '
        "[the CPU build](cpu.md) may need an index of its own.",
        (f'pip install -qq "$(ls {WHEEL})[cpu,bench]"', "pip uninstall -qq -y torchvision torchaudio torchcodec"),
    ),
    ("Would P-EAGLE be served here?", ("peagle-vllm doctor",)),
    (
        "A target, its head, and prompts: here the tiny ones of a clone.",
        (
            "cp -r ../peagle-vllm/models/tiny-llama ../peagle-vllm/models/tiny-llama-peagle .",
            "cp ../peagle-vllm/models/prompts/heldout.jsonl .",
            "peagle-vllm inspect tiny-llama-peagle --target tiny-llama",
        ),
    ),
    (
        "A suite of this pair. The flags are those that the tiny pair needs on a CPU.",
        (f"peagle-vllm bench init {PAIR} {SERVE} --max-tokens 64 --k 3 --k 5", "cat tiny-llama-peagle.yaml"),
    ),
    ("Measure it.", ("peagle-vllm bench run tiny-llama-peagle.yaml",)),
    ("What came out.", ("peagle-vllm bench report",)),
    (
        "The gate: the same results pass, a copy in which K=5 is slow and its first answer is another does not.",
        (
            "cp -r bench-results/tiny-llama-peagle doctored",
            'sed -i -E \'s/("output_throughput": )[0-9.]+/\\1100.0/; s/("texts_sha256": \\[")..../\\10000/\' '
            "doctored/cells/p-eagle-k5-*",
            "peagle-vllm bench compare bench-results/tiny-llama-peagle bench-results/tiny-llama-peagle",
            "peagle-vllm bench compare bench-results/tiny-llama-peagle doctored || echo exit status $?",
        ),
    ),
    ("Which K, at which concurrency?", ("peagle-vllm plan bench-results/tiny-llama-peagle",)),
    (
        "All of it in one command: a short sweep on your prompts, and the config.",
        (f"peagle-vllm tune {PAIR} {SERVE} --max-tokens 64",),
    ),
)

INTRODUCTION = """\
# The first hour

From an empty environment to a config. `python -m tools.first_hour` typed every command into a shell, in an empty folder
beside a clone of this repository, with a new Python 3.11 environment active and a wheel built from the clone. Long
outputs are cut (`...`). `OMP_NUM_THREADS=1` was set, which is fastest on models this small. The figures are those of a
tiny model on a busy CPU: they show that the commands work, and say nothing about a GPU.
"""


class Shell:
    """Commands in ``folder``/work, in an environment of its own; ``folder``/dist holds the wheel."""

    def __init__(self, folder: Path, python: str):
        self.folder, self.work, venv = folder.resolve(), folder.resolve() / "work", folder.resolve() / "venv"
        self.work.mkdir()
        (self.folder / "peagle-vllm").symlink_to(ROOT)
        build = [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", str(self.folder / "dist")]
        subprocess.run([*build, str(ROOT)], check=True)
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.env = kept | {"PATH": f"{venv / 'bin'}:{kept['PATH']}", "COLUMNS": WIDTH, "OMP_NUM_THREADS": "1"}
        self.env |= {"NO_COLOR": "1", "TERM": "dumb"}

    def type(self, command: str) -> tuple[int, list[str]]:
        """Exit status and lines of stdout and stderr; no path of this machine is in them."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.work,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        text = done.stdout.replace(f"{self.folder}/", "../").replace("../work/", "")
        return done.returncode, [line.rstrip() for line in text.splitlines()]


def played(shell: Shell, text: str, commands: tuple[str, ...]) -> str:
    """A step as Markdown, the middle of long outputs left out; the script ends where a command fails."""
    session, began = [], time.monotonic()
    for command in commands:
        print(f"$ {command}", flush=True)
        status, lines = shell.type(command)
        print(*lines, sep="\n", flush=True)
        if status:
            raise SystemExit(f"exit status {status}: {command}")
        if len(lines) > HEAD_LINES + TAIL_LINES + 1:
            lines[HEAD_LINES:-TAIL_LINES] = ["..."]
        session += [f"$ {command}", *lines]
    seconds = time.monotonic() - began
    took = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"{text} ({took})\n\n```\n" + "\n".join(session) + "\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.11", help="makes the empty environment")
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder), parser.parse_args().python)
        PAGE.write_text("\n".join([INTRODUCTION, *(played(shell, *step) for step in STEPS)]))


if __name__ == "__main__":
    main()
