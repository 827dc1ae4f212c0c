"""The default model's GGUF file turned into a plain Hugging Face folder: bf16 weights and a fast tokenizer."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspec_lab.core.files import read_json, write_json
from dspec_lab.models.model_folder import weight_dtypes

NUM_TENSORS = 272
VOCAB_SIZE = 49152
EOS_ID, EOS_TOKEN = 2, "<|im_end|>"
# the model's own order: every digit stands alone, then byte-level BPE words. A GGUF file names this scheme
# ("smollm") without spelling it out, and transformers leaves the digit step out.
PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Fill `folder` with config, bf16 weights and tokenizer made from `gguf_file`, then check the result.

    Takes about 40 s. Every quantised weight w = d * q + m is computed in fp32 and rounded once to bf16.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # newer transformers keep the blocks packed unless told to unpack them; older ones always unpack
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16, **options
        )
        model.save_pretrained(folder, max_shard_size="10GB")
        tokenizer.save_pretrained(folder)
    config = read_json(folder / "config.json")
    config.pop("_model_name_or_path", None)  # the quantiser's working title, not a name anyone can load
    write_json(folder / "config.json", config)
    spelled_out = read_json(folder / "tokenizer.json")
    spelled_out["pre_tokenizer"] = PRE_TOKENIZER
    write_json(folder / "tokenizer.json", spelled_out)
    for path in folder.iterdir():
        os.chmod(path, 0o644)
    check_converted(folder)


def check_converted(folder: Path) -> None:
    """Raise ValueError unless `folder` holds the default model: weights, ids, chat template, and one known answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtypes = weight_dtypes(folder / "model.safetensors")
    kinds = sorted(set(dtypes.values()))
    if len(dtypes) != NUM_TENSORS or kinds != ["BF16"]:
        raise ValueError(f"{folder}: {len(dtypes)} tensors of {kinds}, not {NUM_TENSORS} of BF16")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) != VOCAB_SIZE or tokenizer.eos_token_id != EOS_ID or tokenizer.eos_token != EOS_TOKEN:
        found = (len(tokenizer), tokenizer.eos_token_id, tokenizer.eos_token)
        raise ValueError(f"{folder}: vocabulary size, end id and end token are {found}")
    turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], tokenize=False, add_generation_prompt=True
    )
    expected = "".join(f"<|im_start|>{role}\n{content}{EOS_TOKEN}\n" for role, content in turns)
    if text != expected + "<|im_start|>assistant\n":
        raise ValueError(f"{folder}: the chat template gives {json.dumps(text)}")
    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids_BT = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = tokenizer.decode(model(ids_BT).logits[0, -1].argmax())
    if answer != " Paris":  # any slip in unpacking or in the order of rotary rows spoils this
        raise ValueError(f"{folder}: after 'The capital of France is' the model says {answer!r}, not ' Paris'")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hides transformers' progress bars and warnings inside the block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the unpacking bar does not ask whether bars are wanted
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
