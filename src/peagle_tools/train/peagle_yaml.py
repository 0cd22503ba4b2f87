"""peagle.yaml: what ``peagle-vllm train`` reads. Importing this takes neither torch nor speculators.

``training.to_options`` turns it into speculators' own options; the rest of those goes under the key ``speculators``.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, HttpUrl, ValidationInfo, field_validator, model_validator

from peagle_tools.shared.checked_yaml import Strict, read_yaml
from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.config import default_aux_layers
from peagle_vllm.heads.target import read_target

Positive = Annotated[int, Field(ge=1)]
STAMP = "hidden_states.json"
TRAINING = {"head", "step", "optimizer", "selector", "speculators"}  # sections that decide what training makes
# Keys of ``step`` and ``speculators`` that change no weight.
SPEED_OR_MEMORY = {"chunk_rows", "num_workers", "prefetch_factor", "log_freq", "logger", "run_name"}
DTYPES = ("bfloat16", "float16", "float32")
Share = Annotated[float, Field(ge=0, le=1, strict=False)]


def _resolved(path: str, info: ValidationInfo) -> str:
    """Relative to peagle.yaml."""
    return str((Path(info.context or ".") / path).resolve())


Model = Annotated[str, AfterValidator(lambda name, info: _resolved(name, info) if name.startswith(".") else name)]

# vLLM ends an answer where 4 to 128 tokens come three times in a row: greedy answers of small models loop until
# max_tokens, and loops teach a drafter to copy.
LOOP = {"min_pattern_size": 4, "max_pattern_size": 128, "min_count": 3}


def ends_in_loop(answer: list[int]) -> bool:
    """Whether the tokens of an answer end as ``LOOP`` says."""
    sizes = range(LOOP["min_pattern_size"], min(LOOP["max_pattern_size"], len(answer) // 3) + 1)
    return any(answer[-size:] == answer[-2 * size : -size] == answer[-3 * size : -2 * size] for size in sizes)


class Data(Strict):
    """Prompts, answers and hidden states."""

    prompts: list[str] = Field(default_factory=list)  # data sets of the hub, or paths from peagle.yaml on
    # So many prompts are written by the target itself, after its chat template's opening of a user turn.
    from_target: Annotated[int, Field(ge=0)] = 0
    # How it writes them. On a CPU {temperature: 1, min_p: 0.01} is quicker: top_p sorts the vocabulary.
    sampling: dict[str, float] = Field(default_factory=lambda: {"temperature": 1.0, "top_p": 0.95}, strict=False)
    # Prompts that are measured with, as ``prompts``: what is near to one of them is dropped.
    apart_from: list[str] = Field(default_factory=list)
    max_tokens: Positive = 1024  # of an answer at most; a conversation that is longer stops
    # Documents, the last ones of the data, that are never trained on: AL and loss are measured on them.
    held_out: Positive = 48
    # Of a vLLM server that writes prompts and answers, with its /v1; null starts one where a step needs it.
    endpoint: Annotated[str, AfterValidator(lambda url: str(HttpUrl(url)).rstrip("/"))] | None = None
    concurrency: Positive = 64  # requests in flight to the server; a large GPU can take more
    # Hidden states: ``files`` has vLLM write them, ``memory`` has transformers compute them when training begins, and
    # keeps them in the GPU's memory.
    states: Literal["files", "memory"] = "files"

    @field_validator("prompts", "apart_from")
    @classmethod
    def _from_the_file(cls, value: list[str], info: ValidationInfo) -> list[str]:
        files = [(Path(info.context or ".") / name).resolve() for name in value]
        return [str(file) if file.is_file() else name for file, name in zip(files, value, strict=True)]


class HeadSettings(Strict):
    layers: Positive = 4
    depths: Annotated[int, Field(ge=2)] = 8  # drafts that it is trained to make at once, K at most when served
    draft_vocab: Positive | None = None  # tokens that it can draft, those the target says most; null is all
    # The layers of the target that it reads, vLLM's ids; null is 2, the middle and the third last.
    aux_layers: Annotated[list[int], Field(min_length=1)] | None = None
    # What it begins as: null, a head, named as the target is, or ``target`` for the target's last layers.
    init: Model | None = None


class Step(Strict):
    tokens: Positive = 8192  # of documents packed in one sequence of each process
    chunk_rows: Positive = 1024  # mask rows computed at once: memory grows with it, fewer are slower
    # Of depth d the share max(r^d, m) of the rows is kept: [r, m]; [1, 1] keeps all.
    cod: Annotated[tuple[Share, Share], Field(strict=False)] = (1.0, 1.0)
    # Of arithmetic, whatever the hidden states were stored in; weights and optimizer are float32.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class Optimizer(Strict):
    name: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0, strict=False)] = 1e-4
    epochs: Positive = 10
    steps: Positive | None = None  # in place of ``epochs``
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class Selector(Strict):
    """A candidate selector, trained with the head."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 64  # of its tables


class Every(Strict):
    """After how many steps."""

    checkpoint: Positive = 500  # weights and optimizer are saved
    replay: Positive = 500  # loss and AL of the held-out documents are measured, and weights and optimizer are saved


class Config(Strict):
    """All of peagle.yaml."""

    # The served model: a folder, relative to peagle.yaml if it begins with a dot, or its name on the hub.
    target: Model
    # Everything that is written goes there: prompts.jsonl, answers.jsonl, data/, checkpoints/, log.jsonl, al.jsonl.
    # Relative to peagle.yaml.
    folder: Annotated[str, Field(validate_default=True), AfterValidator(_resolved)] = "run"
    data: Data = Data()
    head: HeadSettings = HeadSettings()
    step: Step = Step()
    optimizer: Optimizer = Optimizer()
    selector: Selector | None = None
    every: Every = Every()
    # More arguments for vLLM where it is started here, such as tensor_parallel_size. ``dtype``, else bfloat16, is what
    # the target runs in: that of answers and stored hidden states.
    engine: dict[str, Any] = Field(default_factory=dict)
    speculators: dict[str, Any] = Field(default_factory=dict)  # more options of its TrainConfig, by their names

    @field_validator("engine")
    @classmethod
    def _dtype_is_known(cls, value: dict[str, Any]) -> dict[str, Any]:
        if (dtype := value.get("dtype", "bfloat16")) not in DTYPES:
            which = "which does not say how hidden states are stored"
            raise ValueError(f"dtype is {dtype!r}, {which}: {', '.join(DTYPES)}")
        return value

    @model_validator(mode="after")
    def _prompts_are_not_overwritten(self) -> Self:
        from peagle_tools.train.pipeline import STEPS  # which imports this

        for written in (name for _, names in STEPS.values() for name in names):
            if any(Path(name).is_relative_to(self.run / written) for name in self.data.prompts + self.data.apart_from):
                raise ValueError(f"folder: its {written} is written and removed by steps; name another folder")
        return self

    @property
    def run(self) -> Path:
        return Path(self.folder)

    @property
    def data_folder(self) -> Path:
        """speculators' Arrow data, ``token_freq.pt``, ``hidden_states/`` and their ``stamp``."""
        return self.run / "data"

    @cached_property
    def aux_layers(self) -> list[int]:
        """The layers of the target that the head reads, vLLM's ids: 2 is what enters layer 2.

        HeadError where the target cannot be read, ToolError where it has no such layer.
        """
        num_layers = read_target(self.target).num_layers
        layers = self.head.aux_layers or [*default_aux_layers(num_layers)]
        most = num_layers - (self.data.states == "files")  # then vLLM stores the last layer's besides
        if layers != sorted({*layers}.intersection(range(most + 1))):  # the order in which vLLM hands them over
            raise ToolError(f"head.aux_layers: is {layers}; name some of 0 to {most}, ascending, each once")
        return layers

    @property
    def target_dtype(self) -> str:
        """What vLLM runs the target in, and so what its hidden states are of."""
        return self.engine.get("dtype", "bfloat16")

    @property
    def stamp(self) -> dict[str, Any]:
        """What hidden states are of. Who makes them writes it to ``data_folder / STAMP``; ``train run`` compares."""
        return {"target": Path(self.target).name, "aux_layers": self.aux_layers, "dtype": self.target_dtype}

    @property
    def training(self) -> dict[str, Any]:
        """What decides the weights of a run: ``TRAINING`` without what costs speed or memory alone."""
        return decisive(self.model_dump(mode="json", include=TRAINING))

    @property
    def ks(self) -> list[int]:
        """The K that vLLM is asked for; the largest one's AL says which head is the best."""
        return [k for k in (3, 5, 7) if k <= self.head.depths] or [self.head.depths]


def decisive(parts: dict[str, Any]) -> dict[str, Any]:
    """Sections of peagle.yaml, and whatever stands beside them, without the keys in ``SPEED_OR_MEMORY``."""
    return {
        name: {k: v for k, v in part.items() if k not in SPEED_OR_MEMORY} if isinstance(part, dict) else part
        for name, part in parts.items()
    }


def read_config(file: Path) -> Config:
    """Read and check a peagle.yaml. Raises ToolError, as ``read_yaml``."""
    return read_yaml(file, Config, "peagle.yaml")
