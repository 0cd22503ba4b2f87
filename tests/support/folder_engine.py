"""A weight transfer engine of vLLM for tests. An update names files; each tensor is loaded alone, as NCCL's are."""

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
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
