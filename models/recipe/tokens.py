"""The tokenizer of every tiny model: byte-level BPE, 512 entries, seven of them special.

``<|mask|>`` is spare: no text and no template ever produces it, so a P-EAGLE head may use it as its mask token.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.recipe.corpus import pieces

FOLDER = "tokenizer-files"
VOCAB_SIZE = 512
SPECIAL = [f"<|{name}|>" for name in ("pad", "bos", "end", "system", "user", "assistant", "mask")]
PAD, BOS, END, SYSTEM, USER, ASSISTANT, MASK = SPECIAL
PAD_ID, BOS_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, MASK_ID = range(len(SPECIAL))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(work: str, name: str) -> dict:
    """Train the tokenizer on the training pieces and write it to ``work / FOLDER`` in Hugging Face format."""
    folder = Path(work, FOLDER)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece.prompt + piece.answer for piece in pieces(held_out=False)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, MASK],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder, save_jinja_files=False)
    file = folder / "tokenizer_config.json"
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    config = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2) + "\n")
    return {}
