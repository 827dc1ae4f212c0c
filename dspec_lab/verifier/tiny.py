"""A random decoder of a few tokens' vocabulary, and random drafters of every neural kind for it.

Small enough to enumerate: the audit compares the law of drafting and verifying with the law of plain decoding, both
through the real decoder with its real key/value cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dspec_lab.drafters.architecture import BlockArchitecture, ChainArchitecture, MedusaArchitecture
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.backbone import BlockDraftModel
from dspec_lab.drafters.dflash import DFlashDrafter
from dspec_lab.drafters.dspark import DSparkDrafter
from dspec_lab.drafters.eagle3 import Eagle3Drafter
from dspec_lab.drafters.eagle3_model import Eagle3DraftModel
from dspec_lab.drafters.medusa import MedusaDrafter
from dspec_lab.drafters.medusa_model import MedusaDraftModel
from dspec_lab.drafters.mtp import MtpDrafter
from dspec_lab.drafters.mtp_model import MtpDraftModel
from dspec_lab.drafters.protocol import Drafter
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.family import ModelSpec, model_spec
from dspec_lab.models.weights import decoder_weights

WIDTH, INNER, HEAD = 16, 24, 8


def tiny_config(vocab: int, num_layers: int) -> dict[str, Any]:
    """config.json of a small Llama."""
    return {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def tiny_decoder(vocab: int = 3, *, num_layers: int = 3, seed: int = 0) -> LeanDecoder:
    """A random fp32 target whose next-token law depends on the whole context."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.6) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    state = {"model.embed_tokens.weight": normal(vocab, WIDTH, scale=1.0), "model.norm.weight": torch.ones(WIDTH)}
    state["lm_head.weight"] = normal(vocab, WIDTH, scale=0.3)
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", 2 * HEAD), ("k", HEAD), ("v", HEAD)):
            state[f"{at}self_attn.{name}_proj.weight"] = normal(rows, WIDTH)
        state[f"{at}self_attn.o_proj.weight"] = normal(WIDTH, 2 * HEAD)
        for name in ("gate", "up"):
            state[f"{at}mlp.{name}_proj.weight"] = normal(INNER, WIDTH)
        state[f"{at}mlp.down_proj.weight"] = normal(WIDTH, INNER)
        for norm in ("input", "post_attention"):
            state[f"{at}{norm}_layernorm.weight"] = torch.ones(WIDTH)
    spec = model_spec(tiny_config(vocab, num_layers))
    return LeanDecoder(decoder_weights(state, spec, dtype=torch.float32), spec, name=f"random decoder {seed}")


def _randomised(model: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _draft_spec(target: LeanDecoder) -> ModelSpec:
    return model_spec(tiny_config(target.vocab_size, 1))


def _block(target: LeanDecoder, **options: Any) -> BlockDraftModel:
    arch = BlockArchitecture(
        spec=_draft_spec(target), target_hidden_size=WIDTH, num_target_layers=target.num_layers,
        target_layer_ids=(0, 1), block_size=3, mask_token_id=0, **options,
    )  # fmt: skip
    return _randomised(BlockDraftModel(arch), 21)


def _chain(target: LeanDecoder, kind: Any, layer_ids: tuple[int, ...]) -> ChainArchitecture:
    return ChainArchitecture(
        kind=kind, spec=_draft_spec(target), target_hidden_size=WIDTH, num_target_layers=target.num_layers,
        target_layer_ids=layer_ids, ttt_length=3,
    )  # fmt: skip


def _medusa(target: LeanDecoder) -> MedusaDrafter:
    arch = MedusaArchitecture(spec=_draft_spec(target), num_target_layers=target.num_layers, medusa_num_heads=3)
    return MedusaDrafter(_randomised(MedusaDraftModel(arch), 22))


NEURAL_DRAFTERS: Mapping[str, Callable[[LeanDecoder], Drafter]] = {
    "truncated": lambda t: AutoregressiveDrafter(t.keep_layers((0,), name="first layer"), name="truncated"),
    "medusa": _medusa,
    "mtp": lambda t: MtpDrafter(_randomised(MtpDraftModel(_chain(t, "mtp", ())), 23)),
    "eagle3": lambda t: Eagle3Drafter(_randomised(Eagle3DraftModel(_chain(t, "eagle3", (0, 1))), 24)),
    "dflash": lambda t: DFlashDrafter(_block(t)),
    # q has no mass on the last token
    "dspark": lambda t: DSparkDrafter(
        _block(t, markov_rank=4, markov_head_type="rnn", confidence_head=True, draft_vocab_size=t.vocab_size - 1)
    ),
}
