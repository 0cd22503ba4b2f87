"""New weights for a head that a test's engine serves."""

from pathlib import Path

from peagle_vllm.heads.files import SELECTOR_FOLDER
from tests.support.engines import Engine, Settings, engine, prepare_process

TRANSFER = ("weight_transfer_config", {"backend": "folder"})


def updatable(settings: Settings) -> Engine:
    """An engine whose ``llm`` settings hold ``TRANSFER``."""
    prepare_process()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if "folder" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("folder", "tests.support.folder_engine", "FolderEngine")
    return engine(settings)


def files(head: Path) -> tuple[Path, ...]:
    """The selector's, which comes first, and the head's."""
    both = head / SELECTOR_FOLDER / "model.safetensors", head / "model.safetensors"
    return tuple(file for file in both if file.exists())


def send(live: Engine, *files: Path) -> None:
    """An update without its end."""
    live.llm.start_draft_weight_update()
    live.llm.update_weights({"update_info": {"files": [str(file) for file in files]}})


def update(live: Engine, *files: Path) -> None:
    send(live, *files)
    live.llm.finish_weight_update()
