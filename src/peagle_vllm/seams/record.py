"""Record what the touched parts of a vLLM look like: ``python -m peagle_vllm.seams.record --vllm PATH``.

Run it after looking at each moved touch and mending the seam. The tree's entry in
``fingerprints.json`` is written anew; entries of other trees keep their digests, and lose those of
touches that the ledger no longer names.
"""

import argparse
import json
import sys
from pathlib import Path

from peagle_vllm.seams import all_seams
from peagle_vllm.seams.fingerprint import FINGERPRINTS, Recorded, load_recorded
from peagle_vllm.seams.source import Source
from peagle_vllm.seams.version import NotVllmError, VllmInstall, find_vllm, read

Entries = dict[str, dict[str, dict[str, str | None]]]


def record(install: VllmInstall, recorded: Recorded) -> Entries:
    """``recorded`` with this tree's digests in it, sorted, and without touches that are in no seam."""
    touches = {touch.key: touch for seam in all_seams() for touch in seam.touches}
    entries: Entries = {
        minor: {
            label: {key: digest for key, digest in digests.items() if key in touches}
            for label, digests in trees.items()
        }
        for minor, trees in recorded.items()
    }
    source = Source(install.root)
    entries.setdefault(install.minor, {})[install.label] = {key: source.digest(touch) for key, touch in touches.items()}
    return {
        minor: {label: dict(sorted(digests.items())) for label, digests in sorted(trees.items())}
        for minor, trees in sorted(entries.items(), key=lambda entry: [int(part) for part in entry[0].split(".")])
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m peagle_vllm.seams.record", description=__doc__)
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="PATH",
        help="a wheel or an unpacked one; repeatable (the installed vLLM if not given)",
    )
    paths = parser.parse_args(arguments).vllm
    target = Path(__file__).with_name(FINGERPRINTS)
    recorded: Recorded = load_recorded() if target.is_file() else {}
    try:
        installs = [read(path) for path in paths] or [found for found in [find_vllm()] if found]
    except NotVllmError as error:
        sys.exit(str(error))
    if not installs:
        sys.exit("vLLM is not installed; name a wheel with --vllm PATH")
    for install in installs:
        if not install.minor[:1].isdigit():
            sys.exit(f"{install.root}: a vLLM of unknown version cannot be recorded")
        recorded = record(install, recorded)
        digests = recorded[install.minor][install.label]
        absent = sum(digest is None for digest in digests.values())
        print(f"{install.label}: {len(digests)} touches, {absent} absent")
    target.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
