"""New weights for a head that a test's engine serves. Files hold them; each tensor is loaded alone, as NCCL's are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from peagle_vllm.heads.files import SELECTOR_FOLDER
from tests.support.engines import Engine, Settings, engine, prepare_process

TRANSFER = ("weight_transfer_config", {"backend": "folder"})


def updatable(settings: Settings) -> Engine:
    """An engine whose ``llm`` settings hold ``TRANSFER``."""
    prepare_process()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Files(WeightTransferUpdateInfo):
        files: list[str]

    class FolderEngine(WeightTransferEngine):
        update_info_cls = Files

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def shutdown(self) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Files) -> None:
            for file in update_info.files:
                for named in load_file(file).items():
                    self.model.load_weights([named])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

    WeightTransferEngineFactory._registry["folder"] = lambda: FolderEngine
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
