"""A suite: what a sweep measures. YAML, every key checked, mistakes named with line and key.

Paths are relative to the suite's folder, the working directory of server and client. Those of models begin with ``./``
or ``../``; every other model name is one of the model hub.
"""

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from peagle_tools.shared.checked_yaml import Strict

HUB = {"mt-bench": "philschmid/mt-bench", "humaneval": "openai/openai_humaneval", "gsm8k": "openai/gsm8k"}
SET_BY_THE_SWEEP = ("--host", "--port", "--model", "--served-model-name", "-sc")  # and all that begin with --spec
NOT_IN_A_SWEEP = {
    "--disable-log-stats": "turns off the counters that acceptance is read from; leave it out",
    "--config": "could make the arm without speculation speculate; write the file's flags here instead",
    "--hf-token": "would be written into results; export HF_TOKEN instead, servers inherit it",
    **dict.fromkeys(
        ("--api-key", "--ssl-certfile", "--ssl-keyfile", "--uds"),
        "is not for a sweep, whose client speaks plain HTTP without a key; leave it out",
    ),
}
SECRET = re.compile("(^|_)(TOKEN|KEY|SECRET|PASSWORD)$", re.IGNORECASE)


def _model(value: Any, info: ValidationInfo) -> Any:
    name = str(value.get("model", "")) if isinstance(value, dict) else value
    if name.startswith(("./", "../", "/")) and not Path(info.context or ".", name).is_dir():
        raise ValueError(f"there is no folder {name} (looked in {info.context})")
    return value


def _not_the_sweeps(flags: str) -> str:
    for word in shlex.split(flags):
        if (name := re.split("[=.]", word)[0].replace("_", "-")) in SET_BY_THE_SWEEP or name.startswith("--spec"):
            raise ValueError(f"{name} does not belong here: the sweep sets it, from the suite's other keys")
        if name in NOT_IN_A_SWEEP:
            raise ValueError(f"{name} {NOT_IN_A_SWEEP[name]}")
    return flags


def _no_secret(environment: dict[str, str]) -> dict[str, str]:
    if secrets := [name for name in environment if SECRET.search(name)]:
        raise ValueError(f"{secrets[0]} would be written into results; export it instead, servers inherit it")
    return environment


Positive = Annotated[int, Field(ge=1)]
Model = Annotated[str, AfterValidator(_model)]
SpeculativeConfig = Annotated[dict[str, Any], AfterValidator(_model)]  # vLLM's; vLLM checks all but the model's folder
Words = Annotated[str, AfterValidator(_not_the_sweeps)]
Name = Annotated[str, Field(pattern="[A-Za-z0-9]")]  # what ``slug`` leaves of it names files


class Flags(Strict):
    """Flags of ``vllm serve`` as one string, word for word, and environment variables."""

    flags: Words = ""
    environment: Annotated[dict[str, str], AfterValidator(_no_secret)] = Field(default_factory=dict)


class Arm(Flags):
    """One drafter: a speculative config for each K in ``k``; neither of them means no speculation."""

    speculative_config: SpeculativeConfig | None = None
    k: list[Positive] = Field(default_factory=list)

    @model_validator(mode="after")
    def _depths_fit_the_config(self) -> "Arm":
        if bool(self.k) != (self.speculative_config is not None):
            raise ValueError("a speculative_config needs k, the list of depths to measure, and k needs the config")
        if "num_speculative_tokens" in (self.speculative_config or ()):
            raise ValueError("leave num_speculative_tokens out: k sets it")
        return self


class Dataset(Strict):
    """Prompts, exactly one source of them."""

    hub: Literal["mt-bench", "humaneval", "gsm8k"] | None = None  # a data set that vLLM's hub loaders read
    jsonl: str | None = None  # a file of prompts, in any form that ``prompt_files`` reads
    flags: Words | None = None  # of ``vllm bench serve``, word for word, for every other data set that it reads
    prompts: Positive  # requests of one cell; at least ``prompts_per_client`` times the concurrency
    prompts_per_client: Annotated[int, Field(ge=0)] = 0
    output_tokens: Positive  # at most, of one request

    @model_validator(mode="after")
    def _one_source(self) -> "Dataset":
        sources = ("hub", "jsonl", "flags")
        if sum(getattr(self, name) is not None for name in sources) != 1:
            raise ValueError(f"give exactly one of {', '.join(sources)}")
        return self

    def num_prompts(self, concurrency: int) -> int:
        return max(self.prompts, self.prompts_per_client * concurrency)


class Suite(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    target: Model
    serve: Flags = Flags()
    arms: Annotated[dict[Name, Arm], Field(min_length=1)]
    datasets: Annotated[dict[Name, Dataset], Field(min_length=1)]
    concurrency: Annotated[list[Positive], Field(min_length=1)]
    repeats: Positive = 3
    warmups: Annotated[int, Field(ge=0)] = 8  # requests before each cell, not counted
    temperature: Annotated[float, Field(ge=0, strict=False)] = 0.0
    server_start_seconds: Positive = 1200
    cell_seconds: Positive = 3600

    @model_validator(mode="after")
    def _file_names_differ(self) -> "Suite":
        for names in (self.arms, self.datasets):
            if len({*map(slug, names)}) < len(names):
                raise ValueError(f"two of {', '.join(names)} would share file names")
        return self


def slug(name: str) -> str:
    """``name`` as part of a file name."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
