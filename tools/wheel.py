"""Fetch a vLLM wheel once and print where it lies: ``python tools/wheel.py 0.33.0``.

Read as source only (the seams are checked against it), so the platform's own choice of wheel does not matter.
"""

import argparse
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "wheels"
PLATFORM = ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "--only-binary=:all:")


def find(version: str) -> Path | None:
    return next(iter(sorted(CACHE.glob(f"vllm-{version}-*.whl"))), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    version = parser.parse_args().version
    if find(version) is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), *PLATFORM]
        subprocess.run([*command, f"vllm=={version}"], check=True, stdout=sys.stderr)
    print(find(version))


if __name__ == "__main__":
    main()
