"""The lean decoder against transformers on tiny random models: logits and every tapped hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dspec_lab.kernels.rows import native_status
from dspec_lab.models.decoder import PREFILL_ROWS, LeanDecoder
from dspec_lab.models.family import model_spec
from dspec_lab.models.protocol import Taps
from dspec_lab.models.weights import decoder_weights

COMMON = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=88,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=512,
    eos_token_id=2,
)
GEMMA = COMMON | dict(
    sliding_window=8,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    global_head_dim=32,
    num_global_key_value_heads=1,
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
    final_logit_softcapping=30.0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "llama, one kv head each": ("LlamaConfig", COMMON | dict(num_key_value_heads=4, head_dim=16)),
    "llama, biases, tied": ("LlamaConfig", COMMON | dict(attention_bias=True, tie_word_embeddings=True)),
    "llama, llama3 rope": ("LlamaConfig", COMMON | dict(rope_parameters=LLAMA3)),
    "llama, linear rope": (
        "LlamaConfig",
        COMMON | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    ),
    "qwen3": ("Qwen3Config", COMMON),
    "qwen3, biases, tied": ("Qwen3Config", COMMON | dict(attention_bias=True, tie_word_embeddings=True)),
    "qwen3, sliding": (
        "Qwen3Config",
        COMMON | dict(use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "gemma4, keys as values": ("Gemma4TextConfig", GEMMA | dict(attention_k_eq_v=True, tie_word_embeddings=True)),
    "gemma4, own values, untied": (
        "Gemma4TextConfig",
        GEMMA | dict(attention_k_eq_v=False, tie_word_embeddings=False, final_logit_softcapping=None),
    ),
    "gemma4, biases": ("Gemma4TextConfig", GEMMA | dict(attention_bias=True, attention_k_eq_v=True)),
}
IMPLS = [
    pytest.param("native", marks=pytest.mark.skipif(not native_status()[0], reason=native_status()[1])),
    "torch",
]


@dataclass(frozen=True)
class Pair:
    """A transformers model in fp32, and what makes its lean twin."""

    model: Any
    state: dict[str, Tensor]
    config: dict[str, Any]

    def lean(self, impl: str, dtype: torch.dtype = torch.float32) -> LeanDecoder:
        spec = model_spec(self.config)
        return LeanDecoder(decoder_weights(self.state, spec, dtype=dtype), spec, name="tiny", impl=impl)

    @torch.no_grad()
    def expected(self, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, outputs of the embedding and all layers but the last, last hidden) of one pass without a cache."""
        out = self.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        states = torch.cat([state[0] for state in out.hidden_states[:-1]], -1)
        return out.logits[0].float(), states.float(), out.hidden_states[-1][0].float()


def make_pair(case: str, *, rounded: bool = False) -> Pair:
    import transformers

    name, fields = CASES[case]
    config = getattr(transformers, name)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        # no norm weight is 1, no bias 0, no layer scalar 1
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("layer_scalar"))]:
            spread, centre = (0.12, 0.0) if tensor.ndim > 1 else (0.2, 1.0)
            tensor.copy_(centre + spread * torch.randn(tensor.shape, generator=generator))
            if rounded:
                tensor.copy_(tensor.bfloat16().float())
    return Pair(model, model.state_dict(), config.to_dict())


@pytest.fixture(scope="module")
def pairs():
    made: dict[tuple[str, bool], Pair] = {}

    def pair(case: str, *, rounded: bool = False) -> Pair:
        key = (case, rounded)
        if key not in made:
            made[key] = make_pair(case, rounded=rounded)
        return made[key]

    return pair


def token_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def near(got: Tensor, expected: Tensor, share: float = 1e-5) -> None:
    """Within `share` of the largest entry: sums of a few hundred fp32 products, in another order."""
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=share * float(expected.abs().max()))


def all_taps(decoder: LeanDecoder) -> Taps:
    return Taps(layers=tuple(range(-1, decoder.num_layers - 1)), last_hidden=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_hidden_states(pairs, case, impl):
    pair, ids = pairs(case), token_ids(41)
    decoder = pair.lean(impl)
    assert decoder.ops.name == impl
    logits_JV, tapped_NF, last_ND = pair.expected(ids)
    rows = decoder.session(capacity=41, taps=all_taps(decoder)).extend(ids)
    near(rows.logits_JV, logits_JV)
    for layer, (got, expected) in enumerate(
        zip(rows.features.tapped_NF.split(64, -1), tapped_NF.split(64, -1), strict=True), -1
    ):
        assert got.shape == expected.shape, layer
        near(got, expected)
    near(rows.features.last_ND, last_ND)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", ["llama", "qwen3, biases, tied", "gemma4, keys as values"])
def test_pieces_give_what_the_whole_gives(pairs, case, impl):
    """A prompt longer than a prefill piece, then verify-sized and single passes, against one uncached pass."""
    ids = token_ids(PREFILL_ROWS + 60)
    pair = pairs(case)
    decoder = pair.lean(impl)
    logits_JV, tapped_NF, last_ND = pair.expected(ids)
    session = decoder.session(capacity=len(ids), taps=all_taps(decoder))
    parts, at = [], 0
    for size in (PREFILL_ROWS + 37, 1, 8, 1, 13):
        parts.append(session.extend(ids[at : at + size]))
        at += size
    assert at == session.length == len(ids)
    near(torch.cat([part.logits_JV for part in parts]), logits_JV)
    near(torch.cat([part.features.tapped_NF for part in parts]), tapped_NF)
    near(torch.cat([part.features.last_ND for part in parts]), last_ND)
    whole = decoder.session(capacity=len(ids)).extend(ids, logit_rows=5)
    near(whole.logits_JV, logits_JV[-5:])


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma4, keys as values", "gemma4, own values, untied"])
def test_bf16_weights(pairs, case):
    """The compiled ops keep activations in fp32: bf16 weights give what the same numbers give in fp32.

    Where the CPU multiplies pairs of bf16 they round the input of each product, as plain torch does.
    """
    if not native_status()[0]:
        pytest.skip(native_status()[1])
    pair, ids = pairs(case, rounded=True), token_ids(41)
    decoder = pair.lean("native", torch.bfloat16)
    assert decoder.weights.layers[0].qkv.dtype == torch.bfloat16
    logits_JV, tapped_NF, last_ND = pair.expected(ids)
    rows = decoder.session(capacity=41, taps=all_taps(decoder)).extend(ids)
    far = {"share": 4e-2} if decoder.ops.rounds else {}
    near(rows.logits_JV, logits_JV, **far)
    near(rows.features.tapped_NF, tapped_NF, **far)
    near(rows.features.last_ND, last_ND, **far)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma4, keys as values"])
def test_bf16_weights_in_plain_torch(pairs, case):
    """Plain torch rounds the input of each product to bf16, 8 bits: a few parts in a hundred after three layers."""
    pair, ids = pairs(case, rounded=True), token_ids(41)
    decoder = pair.lean("torch", torch.bfloat16)
    near(decoder.session(capacity=41).extend(ids).logits_JV, pair.expected(ids)[0], 4e-2)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_embedding_scale_is_rounded_as_transformers_rounds_it(impl):
    import transformers

    config = transformers.Gemma4TextConfig(**GEMMA | dict(hidden_size=40, attention_k_eq_v=True))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():  # powers of two, so that only the scale's own rounding shows
        model.get_input_embeddings().weight.copy_(2.0 ** torch.randint(-3, 3, (97, 40)))
        expected = model.get_input_embeddings()(torch.tensor([5, 9]))
    spec = model_spec(config.to_dict())
    decoder = LeanDecoder(decoder_weights(model.state_dict(), spec, dtype=torch.bfloat16), spec, name="t", impl=impl)
    got = decoder.session(capacity=2, taps=Taps(layers=(-1,))).extend([5, 9]).features.tapped_NF
    assert torch.equal(got, expected.float())


def test_layers_that_are_left_out(pairs):
    """`keep_layers` is the model with the other layers taken out, on the same tensors."""
    pair = pairs("gemma4, keys as values")
    decoder = pair.lean("auto")
    shallow = decoder.keep_layers([0, 2], name="shallow")
    assert shallow.embedding().data_ptr() == decoder.embedding().data_ptr()
    assert shallow.weights.layers[1] is decoder.weights.layers[2]
    smaller = make_pair("gemma4, keys as values")
    smaller.model.model.layers = torch.nn.ModuleList([smaller.model.model.layers[i] for i in (0, 2)])
    smaller.model.config.num_hidden_layers = 2
    smaller.model.config.layer_types = ["sliding_attention", "full_attention"]
    near(shallow.session(capacity=30).extend(token_ids(30)).logits_JV, smaller.expected(token_ids(30))[0])


def test_a_folder_of_weights(pairs, tmp_path):
    """What `save_pretrained` wrote is read back: weights, end tokens, and a sentence about what is missing."""
    pair = pairs("qwen3, biases, tied")
    pair.model.save_pretrained(tmp_path)
    decoder = LeanDecoder.from_folder(tmp_path, impl="torch")
    assert decoder.eos_ids == {2} and decoder.max_context == 512 and decoder.head() is decoder.embedding()
    near(decoder.session(capacity=30).extend(token_ids(30)).logits_JV, pair.expected(token_ids(30))[0])
    with pytest.raises(ValueError, match=r"no tensor 'model.layers.1.mlp.up_proj.weight'"):
        spec = model_spec(pair.config)
        state = {n: t for n, t in pair.state.items() if n != "model.layers.1.mlp.up_proj.weight"}
        decoder_weights(state, spec, dtype=torch.float32)
