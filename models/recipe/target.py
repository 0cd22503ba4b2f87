"""Train a tiny target (Llama or Qwen3) on the standard library, three quarters of it in the chat template."""

import random
import shutil
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models.recipe.corpus import SEED, pieces
from models.recipe.tokens import ASSISTANT_ID, BOS_ID, END_ID, FOLDER, PAD_ID, USER_ID, VOCAB_SIZE

CHAT_SHARE = 0.75
ROWS = ((0.6, 16, 256), (0.3, 8, 512), (0.1, 4, 1024))  # (share of the steps, rows, tokens a row): 4,096 tokens a step
SHARED = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 8,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": END_ID,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
}
SHAPES = {
    "llama": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1},
}


def token_stream(tokenizer, seed: int) -> torch.Tensor:
    """[tokens] one epoch: every training piece once, as a chat exchange or as plain text, in random order."""
    rng = random.Random(seed)
    ids: list[int] = []
    for piece in pieces(held_out=False, seed=seed):
        prompt, answer = tokenizer([piece.prompt, piece.answer], add_special_tokens=False)["input_ids"]
        if rng.random() < CHAT_SHARE:
            ids += [BOS_ID, USER_ID, *prompt, END_ID, ASSISTANT_ID, *answer, END_ID]
        else:
            ids += [BOS_ID, *prompt, *answer, END_ID]
    return torch.tensor(ids)


def batches(tokenizer, steps: int):
    """Yield [rows, tokens + 1] batches, ``steps`` of them; a new epoch is shuffled and divided anew."""
    epoch, stream, at = 0, torch.empty(0, dtype=torch.long), 0
    for share, rows, length in ROWS:
        for _ in range(round(steps * share)):
            need = rows * length + 1
            if at + need > len(stream):
                stream, at, epoch = token_stream(tokenizer, SEED + epoch), 0, epoch + 1
            window = stream[at : at + need]
            at += need - 1
            yield torch.stack([window[r * length : (r + 1) * length + 1] for r in range(rows)])


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, output matrix and norms."""
    matrices, others = [], []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            inner = weight.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
            (matrices if inner else others).append(weight)
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=4e-3, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def train_target(work: str, name: str, kind: str, steps: int) -> dict:
    """Train a ``kind`` target for ``steps`` steps of 4,096 tokens and save it in bf16; returns figures of the run."""
    folder, tokenizer_folder = Path(work, name), Path(work, FOLDER)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHARED, **SHAPES[kind]))
    optimizers = make_optimizers(model)

    def rate(step: int) -> float:
        """Linear warm-up over 3% of the steps, then linear decay to 2% of the peak."""
        return min((step + 1) / (0.03 * steps + 1), max(0.02, 1 - step / steps))

    schedule = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    began, losses = time.time(), []
    for batch in tqdm(batches(tokenizer, steps), f"target {kind}", steps, unit="step", mininterval=5):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for each in (*optimizers, *schedule):
            each.step()
        model.zero_grad()
        losses.append(loss.item())
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=END_ID, pad_token_id=PAD_ID)
    model.to(torch.bfloat16).save_pretrained(folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tokens": steps * 4096,
        "loss": round(sum(losses[-50:]) / len(losses[-50:]), 4),
        "seconds": round(time.time() - began),
    }
