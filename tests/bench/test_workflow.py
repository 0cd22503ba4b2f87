"""bench.yml's B200 job: its shell steps, one after another, with stand-ins for pip, gh, the server and the client."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from peagle_tools.bench.cells import read_results

ROOT = Path(__file__).resolve().parents[2]
JOB = yaml.safe_load((ROOT / ".github/workflows/bench.yml").read_text())["jobs"]["b200"]
NAME = "trial-vllm-0.33.0"
TOOLS = {
    # python3 -m venv .venv: with a pip that only writes down what it is given, and this checkout's command
    "python3": """mkdir -p .venv/bin
        printf '#!/bin/bash\\necho "$@" >> pip.log\\n' > .venv/bin/pip
        printf '#!/bin/bash\\nexec {python} -m tests.bench.standin.sweep "$@"\\n' > .venv/bin/peagle-vllm
        chmod +x .venv/bin/*""",
    # gh run download ID --name NAME --dir FOLDER; gh release download TAG --pattern FILE --clobber
    "gh": """echo "$@" >> gh.log
        case "$1" in
        run) mkdir -p "$7" && cp -r ../artifacts/"$5"/. "$7" ;;
        release) cp ../releases/"$3"/"$5" . ;;
        esac""",
}


class Runner:
    """What GitHub's runner does with the job: the steps in order, the rest skipped after a failure but ``always()``."""

    def __init__(self, folder: Path, suite: Path):
        self.checkout, self.artifacts, self.log = folder / "checkout", folder / "artifacts", folder / "log"
        shutil.copytree(suite.parent, self.checkout / "benchmarks/suites")
        shutil.copy(ROOT / "benchmarks/baselines.txt", self.checkout / "benchmarks/baselines.txt")
        self.releases = folder / "releases/bench-baselines"
        for made in (self.artifacts, self.releases, folder / "bin", folder / "speed"):
            made.mkdir(parents=True)
        for name, text in TOOLS.items():
            tool = folder / "bin" / name
            tool.write_text(f"#!/bin/bash\nset -eu\n{text.replace('{python}', sys.executable)}\n")
            tool.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "kernels", ROOT))),
            "STANDIN_LOG": str(self.log),
            "SPEED_BENCH_FOLDER": str(folder / "speed"),
            "GITHUB_RUN_ID": "4711",
        }

    def run(self, resume: str = "", standin: str = "", first: str = "install") -> tuple[bool, dict[str, str]]:
        """Whether the job is green from the step ``first`` on, and what each shell step printed; a whole run begins
        without results."""
        if first == "install":
            shutil.rmtree(self.checkout / "results", ignore_errors=True)
        given = {"VLLM": "0.33.0", "SUITE": "trial", "NAME": NAME, "RESUME": resume, "GH_TOKEN": "", "OPTIONS": ""}
        assert set(JOB["env"]) == set(given), "the job's variables; the shell has no others"
        green, printed = True, {}
        names = [step.get("name", "") for step in JOB["steps"]]
        for step in JOB["steps"][names.index(first) :]:
            condition = step.get("if", "")
            assert condition in ("", "always()", "env.RESUME != ''")
            if not (green or condition == "always()") or (condition.startswith("env.") and not resume):
                continue
            if step.get("uses", "").startswith("actions/upload-artifact"):
                assert step["with"]["overwrite"] and step["with"]["path"] == "results/${{ env.NAME }}"
                self._upload()
            elif "run" in step:
                assert "${{" not in step["run"]
                done = subprocess.run(
                    ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", step["run"]],
                    cwd=self.checkout,
                    env=self.environment | given | {"STANDIN_CLIENT": standin},
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                printed[step["name"]] = done.stdout + done.stderr
                green = green and done.returncode == 0
        return green, printed

    def _upload(self) -> None:
        """Hidden files are left out, as the action leaves them out."""
        folder = self.checkout / "results" / NAME
        shutil.rmtree(self.artifacts / NAME, ignore_errors=True)
        shutil.copytree(folder, self.artifacts / NAME, ignore=shutil.ignore_patterns(".*"))

    def pin(self) -> None:
        """The last artifact becomes the baseline, as docs/bench.md says."""
        archive = self.releases / f"{NAME}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(self.artifacts / NAME, ".")
        line = f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n"
        with (self.checkout / "benchmarks/baselines.txt").open("a") as pins:
            pins.write(line)

    def measured(self) -> int:
        return self.log.read_text().count("measured")


@pytest.fixture
def runner(tmp_path: Path, small_suite_file: Path) -> Runner:
    text = small_suite_file.read_text().replace("repeats: 2", "repeats: 1\nserve: {flags: --dtype float32}")
    small_suite_file.write_text(text)
    return Runner(tmp_path, small_suite_file)


def test_the_gate_with_planted_regressions(runner: Runner) -> None:
    """No baseline fails; the run becomes it; the same again passes; what is worse fails, however slow its way."""
    green, printed = runner.run()
    assert not green and "pins no trial-vllm-0.33.0.tar.gz" in printed["the pinned baseline"]
    assert "gate" not in printed
    assert all(r.ok for r in read_results(runner.artifacts / NAME))
    runner.pin()
    green, printed = runner.run()
    assert green and "0 worse, 0 lost, of 4 compared" in printed["gate"], printed
    assert (runner.checkout / "pip.log").read_text().splitlines()[-1].endswith("vllm==0.33.0")
    for standin, texts in {
        "noise:1.03": [],  # within the tolerance of the baseline
        "noise:1.07": ["slower, 0.93 of before"],  # within the tolerance of the run before, not of the baseline
        "wrong": ["AL 2.24 -> 1.62", "TTFT p50 20.0 -> 200.0 ms", "same text as without speculation 100% -> 91.67%"],
    }.items():
        green, printed = runner.run(standin=standin)
        assert green == (not texts) and all(text in printed["gate"] for text in texts), printed["gate"]

    archive = runner.releases / f"{NAME}.tar.gz"  # not the pinned one any more, then absent
    archive.write_bytes(archive.read_bytes() + b"another")
    green, printed = runner.run(first="the pinned baseline")
    assert not green and "FAILED" in printed["the pinned baseline"] and "gate" not in printed
    archive.unlink()
    green, printed = runner.run(first="the pinned baseline")
    assert not green and "gate" not in printed


def test_a_second_attempt_measures_what_the_first_did_not(runner: Runner) -> None:
    green, printed = runner.run(standin="half-eagle")
    assert not green and "2 of 4 cells failed" in printed["run"] and "gate" not in printed
    assert len(read_results(runner.artifacts / NAME)) == 4, "the artifact of a failed run holds its cells"
    before = runner.measured()
    _, printed = runner.run(resume="4711")
    assert "all well" in printed["run"] and runner.measured() == before + 2
    assert "run download 4711" in (runner.checkout / "gh.log").read_text()


def test_a_second_attempt_after_a_first_without_results_begins_anew(runner: Runner) -> None:
    _, printed = runner.run(resume="4711")
    assert "all well" in printed["run"]
    shutil.rmtree(runner.artifacts / NAME)
    green, printed = runner.run(resume="42")
    assert not green and "run" not in printed, "a run that was named has to be there"


def test_every_vllm_that_is_served_is_measured() -> None:
    versions = re.findall(r'"(\d+\.\d+)\.\d+"', JOB["strategy"]["matrix"]["vllm"])
    extra = re.search(r'cuda = \["vllm>=(\d+\.\d+),<(\d+)\.(\d+)"\]', (ROOT / "pyproject.toml").read_text())
    assert extra is not None
    assert (versions[0], versions[-1]) == (extra[1], f"{extra[2]}.{int(extra[3]) - 1}")
