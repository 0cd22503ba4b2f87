"""Record what the definitions that the patches list look like in a vLLM: ``python -m tools.record --vllm PATH``.

Run it once each patch fits the definitions that changed, and for every build in ``fingerprints.json`` once a patch
lists another definition. The entry of this build is replaced, the others are kept.
"""

import argparse
import json
import sys
from pathlib import Path

from peagle_vllm.patches import all_patches
from peagle_vllm.patches.fingerprint import FINGERPRINTS, Recorded, load_recorded
from peagle_vllm.patches.source import Source
from peagle_vllm.patches.version import VllmInstall, read

FILE = Path(__file__).parents[1] / "src/peagle_vllm/patches" / FINGERPRINTS


def record(install: VllmInstall, recorded: Recorded) -> Recorded:
    """``recorded`` with this build in it, sorted."""
    source, entries = Source(install.root), {minor: dict(builds) for minor, builds in recorded.items()}
    digests = {item.key: source.digest(item) for patch in all_patches() for item in patch.definitions}
    entries.setdefault(install.minor, {})[install.label] = {key: sha for key, sha in sorted(digests.items()) if sha}
    by_number = sorted(entries.items(), key=lambda entry: [int(part) for part in entry[0].split(".")])
    return {minor: dict(sorted(builds.items())) for minor, builds in by_number}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.record", description=__doc__)
    parser.add_argument("--vllm", metavar="PATH", required=True, help="a wheel, or the folder that it is installed in")
    try:
        install = read(parser.parse_args().vllm)
    except ValueError as error:
        sys.exit(str(error))
    if not install.minor[:1].isdigit():
        sys.exit(f"{install.root}: a vLLM of unknown version cannot be recorded")
    recorded = record(install, load_recorded())
    there = recorded[install.minor][install.label]
    absent = [item.key for patch in all_patches() for item in patch.definitions if item.key not in there]
    print(f"{install.label}: {len(there)} definitions; not there, so each patch has to do without: {absent or 'none'}")
    FILE.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
