"""How a finished folder takes the place of an older one."""

import shutil
from pathlib import Path


def publish(folder: Path, place: Path) -> None:
    """Put ``folder`` at ``place``; what was there is replaced by two renames, or removed if there is no ``folder``."""
    if not folder.is_dir():  # a selector that is no better: the old one is of another head
        shutil.rmtree(place, ignore_errors=True)
        return
    fresh, old = place.with_name(f".{place.name}.new"), place.with_name(f".{place.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(folder, fresh)
    for file in fresh.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors files come readable by their owner only
    if place.exists():
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)
