"""A target small enough to train drafters for in seconds, as a folder on disk, and responses of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 89,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def write_target(folder: Path) -> Path:
    """A Llama of random weights whose likely next token is a fixed shuffle of the current one."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    width, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 16

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.4 / shape[-1] ** 0.5)

    state = {"model.embed_tokens.weight": torch.randn(CONFIG["vocab_size"], width, generator=generator) * 0.5}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        state |= {
            f"{at}self_attn.q_proj.weight": matrix(width, width),
            f"{at}self_attn.k_proj.weight": matrix(kv, width),
            f"{at}self_attn.v_proj.weight": matrix(kv, width),
            f"{at}self_attn.o_proj.weight": matrix(width, width),
            f"{at}mlp.gate_proj.weight": matrix(inner, width),
            f"{at}mlp.up_proj.weight": matrix(inner, width),
            f"{at}mlp.down_proj.weight": matrix(width, inner),
            f"{at}input_layernorm.weight": 1 + 0.1 * torch.randn(width, generator=generator),
            f"{at}post_attention_layernorm.weight": 1 + 0.1 * torch.randn(width, generator=generator),
        }
    state["model.norm.weight"] = 0.9 + 0.05 * torch.randn(width, generator=generator)
    shuffle = torch.randperm(CONFIG["vocab_size"], generator=generator)
    state["lm_head.weight"] = state["model.embed_tokens.weight"][shuffle].clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_target(tiny_folder):
    from dspec_lab.models.decoder import LeanDecoder

    return LeanDecoder.from_folder(tiny_folder, impl="torch")


@pytest.fixture(scope="session")
def tiny_responses(tiny_target):
    """Forty answers of the tiny target, half greedy, two to each prompt."""
    from dspec_lab.training.responses import Response
    from dspec_lab.training.sampler import BatchSampler, Request

    rng = np.random.default_rng(0)
    prompts = [tuple(int(i) for i in rng.integers(3, 80, size=rng.integers(3, 9))) for _ in range(20)]
    requests = [
        Request(request_id=str(i), prompt_ids=prompts[i // 2], temperature=0.0 if i % 2 else 1.0) for i in range(40)
    ]
    sampler = BatchSampler(tiny_target, num_slots=8, max_prompt=16, max_new_tokens=20, seed=3)
    answers = dict(sampler.run(requests))
    return [
        Response(
            ("math", "code")[i // 2 % 2],
            "tiny",
            request.temperature,
            np.array(request.prompt_ids, dtype=np.int32),
            np.array(answers[i], dtype=np.int32),
        )
        for i, request in enumerate(requests)
    ]


@pytest.fixture
def tiny_config():
    """Settings for a run of seconds on the tiny target."""
    from dspec_lab.training.train_config import default_config

    def make(drafter: str, **changes):
        usual = {
            "num_layers": 2 if drafter in ("dspark", "dflash") else 1,
            "block_size": 4,
            "ttt_length": 3,
            "medusa_num_heads": 3,
            "target_layer_ids": None if drafter in ("mtp", "medusa") else (0, 1, 2),
            "draft_vocab_size": 60,
            "vocab_certain": 10,
            "vocab_drawn": 20,
            "first_slots": 2,
            "first_anchors": 6,
            "anchors_per_sequence": 4,
            "steps": 12,
            "validation_share": 0.2,
            "validation_sequences": 6,
            "validation_anchors": 4,
            "validate_every": 6,
            "save_every": 4,
            "features": "stream",
            "learning_rate": 3e-3,
            "max_tokens": 64,
        }
        if drafter == "dspark":
            usual["markov_rank"] = 8
        return default_config(drafter, **{**usual, **changes})

    return make


@pytest.fixture
def tiny_corpus(tiny_target, tiny_responses):
    """A corpus for some settings, features streamed unless the settings say otherwise."""
    from dspec_lab.training.build import tapped_layers
    from dspec_lab.training.corpus import Corpus, feature_reader
    from dspec_lab.training.data import build_sequences

    def make(config, cache=None):
        part = build_sequences(tiny_responses, max_tokens=config.max_tokens, vocab_size=tiny_target.vocab_size)
        reader = feature_reader(config, tiny_target, tapped_layers(config, tiny_target))
        return Corpus([part], reader, config, cache)

    return make
