"""A suite: what a sweep measures. YAML, every key checked, mistakes named with line and key.

Paths in a suite begin with ``./`` or ``../`` and are relative to the suite's folder, which is also the working
directory of server and client; every other model name is one of the model hub.
"""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from peagle_vllm.bench.errors import BenchError
from peagle_vllm.bench.yaml_lines import Lines, line_of, load

Positive = Annotated[int, Field(ge=1)]
Environment = dict[str, str]

HUB = {"mt-bench": "philschmid/mt-bench", "humaneval": "openai/openai_humaneval", "gsm8k": "openai/gsm8k"}
OURS = {
    "--host": "the sweep serves on 127.0.0.1",
    "--port": "say `port:`",
    "--model": "say `target:`",
    "--speculative-config": "say `speculative_config:` in the arm",
    "--served-model-name": "the sweep names the model",
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Flags(Strict):
    """Flags of ``vllm serve`` as one string, word for word, and environment variables."""

    flags: str = ""
    environment: Environment = Field(default_factory=dict)

    @field_validator("flags")
    @classmethod
    def _split(cls, flags: str) -> str:
        for word in shlex.split(flags):
            name = word.split("=")[0]
            if name in OURS:
                raise ValueError(f"{name} does not belong here: {OURS[name]}")
        return flags

    @property
    def words(self) -> list[str]:
        return shlex.split(self.flags)


class Arm(Flags):
    """One drafter: a speculative config for each K in ``k``; neither of them means no speculation."""

    speculative_config: dict[str, Any] | None = None
    k: list[Positive] = Field(default_factory=list)
    overrides: dict[int, dict[str, Any]] = Field(default_factory=dict)  # K -> more entries for the config at that K

    @model_validator(mode="after")
    def _fits(self) -> "Arm":
        if self.speculative_config is None:
            if self.k:
                raise ValueError("k needs a speculative_config")
        elif not self.k:
            raise ValueError("a speculative_config needs k, the list of depths to measure")
        elif "num_speculative_tokens" in self.speculative_config:
            raise ValueError("leave num_speculative_tokens out: k says it")
        if len(set(self.k)) != len(self.k):
            raise ValueError("k lists a depth twice")
        if unknown := set(self.overrides) - set(self.k):
            raise ValueError(f"overrides names a depth that k does not list: {min(unknown)}")
        return self

    @property
    def depths(self) -> list[int]:
        """The depths to serve; 0 stands for no speculation."""
        return self.k or [0]

    @property
    def kind(self) -> Literal["none", "EAGLE-3", "P-EAGLE", "other"]:
        """Which column of the published tables this arm belongs to."""
        if self.speculative_config is None:
            return "none"
        if self.speculative_config.get("method") == "eagle3":
            return "P-EAGLE" if self.speculative_config.get("parallel_drafting") else "EAGLE-3"
        return "other"

    def config_at(self, k: int) -> dict[str, Any] | None:
        """vLLM's ``--speculative-config`` for this arm at depth ``k``."""
        if self.speculative_config is None:
            return None
        return self.speculative_config | {"num_speculative_tokens": k} | self.overrides.get(k, {})


class Dataset(Strict):
    """Prompts, exactly one source of them.

    Attributes:
        hub: a data set that vLLM's hub loaders read.
        jsonl: file with a ``prompt`` in each line.
        speed_bench: folder made by SPEED-Bench's own script; its licence forbids shipping it.
        random_input_tokens: random token ids, for dummy weights.
        prompts: requests of one cell; at least ``prompts_per_client`` times the concurrency.
        output_tokens: at most, of one request; exactly, with ``ignore_eos``.
        chat: put each prompt into the target's chat template; false sends it raw.
    """

    hub: Literal["mt-bench", "humaneval", "gsm8k"] | None = None
    jsonl: str | None = None
    speed_bench: str | None = None
    speed_bench_subset: str = "qualitative"
    speed_bench_category: str | None = None
    random_input_tokens: Positive | None = None
    prompts: Positive
    prompts_per_client: Annotated[int, Field(ge=0)] = 0
    output_tokens: Positive
    ignore_eos: bool = False
    chat: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> "Dataset":
        sources = ("hub", "jsonl", "speed_bench", "random_input_tokens")
        if sum(getattr(self, name) is not None for name in sources) != 1:
            raise ValueError(f"say exactly one of {', '.join(sources)}")
        return self

    def num_prompts(self, concurrency: int) -> int:
        return max(self.prompts, self.prompts_per_client * concurrency)


class Suite(Strict):
    """A whole sweep."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    target: str
    serve: Flags = Flags()
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    datasets: Annotated[dict[str, Dataset], Field(min_length=1)]
    concurrency: Annotated[list[Positive], Field(min_length=1)]
    repeats: Positive = 3
    warmups: Annotated[int, Field(ge=0)] = 8  # requests before each cell, not counted
    temperature: Annotated[float, Field(ge=0, strict=False)] = 0.0
    seed: int = 0
    port: Annotated[int, Field(ge=1, le=65535)] | None = None  # without it: any free one
    server_start_seconds: Positive = 1200
    cell_seconds: Positive = 3600
    notes: str = ""

    @field_validator("concurrency")
    @classmethod
    def _once(cls, values: list[int]) -> list[int]:
        if len(set(values)) != len(values):
            raise ValueError("lists a value twice")
        return values

    @model_validator(mode="after")
    def _file_names_differ(self) -> "Suite":
        for names in (self.arms, self.datasets):
            seen: dict[str, str] = {}
            for name in names:
                if not slug(name):
                    raise ValueError(f"{name!r} holds no letter or digit to name files with")
                if slug(name) in seen:
                    raise ValueError(f"{seen[slug(name)]!r} and {name!r} would share file names")
                seen[slug(name)] = name
        return self

    def fingerprint(self) -> str:
        """Changes when anything that is measured changes. More repeats or notes leave it."""
        facts = self.model_dump(mode="json", exclude={"repeats", "notes", "port", "server_start_seconds"})
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def slug(name: str) -> str:
    """``name`` as part of a file name."""
    return "-".join("".join(c if c.isalnum() and c.isascii() else " " for c in name).split()).lower()


def is_path(name: str) -> bool:
    return name.startswith(("./", "../", "/"))


def read_suite(file: Path) -> Suite:
    """Read and check a suite.

    Raises:
        BenchError: one line for each mistake, ``FILE:LINE: KEY: what is wrong``.
    """
    data, lines = load(file)
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        raise BenchError("\n".join(_mistakes(error, file, lines))) from None
    _check_paths(suite, file, lines)
    return suite


def _mistakes(error: ValidationError, file: Path, lines: Lines) -> list[str]:
    found = []
    for item in error.errors():
        path = tuple(part for part in item["loc"] if part != "[key]")
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key"
        elif item["type"] == "missing":
            message = "is missing"
        elif item["type"] == "string_type" and isinstance(item.get("input"), bool | int | float):
            message = f"is {item['input']!r}; write it in quotes"
        key = ".".join(map(str, path)) or "suite"
        found.append((line_of(path, lines), f"{key}: {message}"))
    return [f"{file}:{line}: {text}" for line, text in sorted(found)]


def _check_paths(suite: Suite, file: Path, lines: Lines) -> None:
    """Everything local that the suite names has to be there."""
    named: list[tuple[tuple[str | int, ...], str, Literal["folder", "file"]]] = [(("target",), suite.target, "folder")]
    for arm_name, arm in suite.arms.items():
        model = (arm.speculative_config or {}).get("model")
        if isinstance(model, str):
            named.append((("arms", arm_name, "speculative_config", "model"), model, "folder"))
    for name, dataset in suite.datasets.items():
        if dataset.jsonl is not None:
            named.append((("datasets", name, "jsonl"), dataset.jsonl, "file"))
        if dataset.speed_bench is not None:
            named.append((("datasets", name, "speed_bench"), dataset.speed_bench, "folder"))
    for path, value, what in named:
        where = f"{file}:{line_of(path, lines)}: {'.'.join(map(str, path))}"
        if path[0] == "datasets" and not is_path(value):
            raise BenchError(f"{where}: begin the path with ./ or ../ (relative to the suite) or /")
        if not is_path(value):
            continue
        found = file.parent / value
        if not (found.is_dir() if what == "folder" else found.is_file()):
            mend = ""
            if path[-1] == "speed_bench":
                mend = "; docs/benchmarking.md says how to make it"
            raise BenchError(f"{where}: there is no {what} {value} (looked in {file.parent}){mend}")
