"""Record what the seams use of a vLLM, and what that looks like: ``python -m tools.seams.record --vllm PATH``.

Run it after looking at each definition that moved and mending the seam, and whenever a seam uses something else of
vLLM; then for every build in ``fingerprints.json``. The build's entry is written anew, the others are kept.
"""

import argparse
import json
import sys

from peagle_vllm.patches import all_seams
from peagle_vllm.patches.fingerprint import FINGERPRINTS, Build, Recorded, load_recorded
from peagle_vllm.patches.source import Source
from peagle_vllm.patches.version import NotVllmError, VllmInstall, find_vllm, read
from tools.seams.code import OURS
from tools.seams.uses import uses


def fingerprints(install: VllmInstall) -> Build:
    """{seam: {definition: digest}} of everything that the seams use of this vLLM."""
    source = Source(install.root)
    digests = {seam.name: {each.key: source.digest(each) for each in uses(seam, source)} for seam in all_seams()}
    return {name: {key: digest for key, digest in own.items() if digest} for name, own in digests.items()}


def record(install: VllmInstall, recorded: Recorded) -> Recorded:
    """``recorded`` with this build in it, sorted."""
    entries = {minor: dict(builds) for minor, builds in recorded.items()}
    entries.setdefault(install.minor, {})[install.label] = fingerprints(install)
    by_number = sorted(entries.items(), key=lambda entry: [int(part) for part in entry[0].split(".")])
    return {minor: dict(sorted(builds.items())) for minor, builds in by_number}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.seams.record", description=__doc__)
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="PATH",
        help="a wheel or an unpacked one; repeatable (the installed vLLM if not given)",
    )
    paths = parser.parse_args(arguments).vllm
    recorded = load_recorded()
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
        print(f"{install.label}: {sum(map(len, recorded[install.minor][install.label].values()))} definitions")
    target = OURS.root / "peagle_vllm/seams" / FINGERPRINTS
    target.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
