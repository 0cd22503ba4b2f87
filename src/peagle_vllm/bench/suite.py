"""A suite: what a sweep measures. YAML, every key checked, mistakes named with line and key.

Paths in a suite begin with ``./`` or ``../`` and are relative to the suite's folder, which is also the working
directory of server and client; every other model name is one of the model hub.
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from peagle_vllm.bench import BenchError

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
    try:
        text = file.read_text()
        root, data = yaml.compose(text, Loader=_Loader), yaml.load(text, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise BenchError(f"{file}: cannot be read ({reason})") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        no_yaml = "" if isinstance(error, yaml.constructor.ConstructorError) else "no YAML: "
        raise BenchError(f"{file}:{line}: {no_yaml}{error.problem}") from None
    if not isinstance(data, dict):
        raise BenchError(f"{file}:1: a suite is a mapping of keys to values")
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        mistakes = sorted((_line(root, _path(item)), _mistake(item)) for item in error.errors())
        raise BenchError("\n".join(f"{file}:{line}: {text}" for line, text in mistakes)) from None
    for path, text in _missing_files(suite, file.parent):
        raise BenchError(f"{file}:{_line(root, path)}: {'.'.join(path)}: {text}")
    return suite


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice; YAML itself would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value}: said twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _line(node: yaml.Node, path: Sequence[str | int]) -> int:
    """The line of ``path``, or of the nearest key around it: a missing key has no line of its own."""
    line = 0
    for part in path:
        if isinstance(node, yaml.MappingNode):
            here = [(key, value) for key, value in node.value if key.value == str(part)]
        elif isinstance(node, yaml.SequenceNode):
            here = [(node.value[int(part)],) * 2]
        else:
            break
        if not here:
            break
        (key, node), *_ = here
        line = key.start_mark.line
    return line + 1


def _path(item: Any) -> tuple[str | int, ...]:
    return tuple(part for part in item["loc"] if part != "[key]")


def _mistake(item: Any) -> str:
    """One of pydantic's errors as ``KEY: what is wrong``."""
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "unknown key"
    elif item["type"] == "missing":
        message = "is missing"
    elif item["type"] == "string_type" and isinstance(item.get("input"), bool | int | float):
        message = f"is {item['input']!r}; write it in quotes"
    return f"{'.'.join(map(str, _path(item))) or 'suite'}: {message}"


def _missing_files(suite: Suite, folder: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """The key, and what is wrong, of every local file or folder that the suite names and that is not there."""
    named: list[tuple[tuple[str, ...], str | None]] = [(("target",), suite.target)]
    for name, arm in suite.arms.items():
        model = (arm.speculative_config or {}).get("model")
        named.append((("arms", name, "speculative_config", "model"), model if isinstance(model, str) else None))
    for name, dataset in suite.datasets.items():
        named += [(("datasets", name, key), getattr(dataset, key)) for key in ("jsonl", "speed_bench")]
    for path, value in named:
        if value is None:
            continue
        if path[0] == "datasets" and not is_path(value):
            yield path, "begin the path with ./ or ../ (relative to the suite) or /"
        what, mend = ("file" if path[-1] == "jsonl" else "folder"), ""
        if is_path(value) and not ((folder / value).is_file() if what == "file" else (folder / value).is_dir()):
            if path[-1] == "speed_bench":
                mend = "; docs/benchmarking.md says how to make it"
            yield path, f"there is no {what} {value} (looked in {folder}){mend}"
