"""Hugging Face models as targets: what is refused and how, and a GPT-2 through the whole decoding loop."""

from __future__ import annotations

import pytest
import torch
import transformers

from dspec_lab.config import DecodeConfig
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.models.hf import HFTarget, context_limit, exact_cache
from dspec_lab.models.protocol import Taps
from dspec_lab.verifier.decode import generate

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def build(name: str, **fields):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields))
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.normal_(std=0.3)
    return model


def gpt2(seed_shift: float = 0.0, **fields) -> HFTarget:
    shape = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=96, bos_token_id=0, eos_token_id=5)
    model = build("GPT2Config", **shape | fields)
    if seed_shift:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(seed_shift * torch.randn_like(tensor))
    return HFTarget(model, name="tiny gpt2")


# refusals


@pytest.mark.parametrize(
    ("name", "fields", "what"),
    [
        ("MambaConfig", dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4), "LinearAttentionLayer"),
        (
            "JambaConfig",
            SMALL | dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4, mamba_dt_rank=4)
            | dict(use_mamba_kernels=False),
            "LinearAttentionLayer in layers 0, 2",
        ),
        (
            "Qwen3NextConfig",
            SMALL
            | dict(num_experts=2, num_experts_per_tok=1, linear_num_value_heads=4, linear_num_key_heads=2)
            | dict(linear_key_head_dim=8, linear_value_head_dim=8, head_dim=8, num_hidden_layers=4),
            "LinearAttentionLayer in layers 0, 1, 2",
        ),
        ("RwkvConfig", dict(vocab_size=61, hidden_size=32, num_hidden_layers=2), "recurrent state"),
        ("XLNetConfig", dict(vocab_size=61, d_model=32, n_layer=2, n_head=4, d_inner=40), "no key/value cache"),
        (
            "BertConfig",
            dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40),
            "also see later ones",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("Config") else "",
)  # fmt: skip
def test_models_that_cannot_be_rolled_back_are_refused_by_name(name, fields, what):
    model = build(name, **fields)
    with pytest.raises(ValueError) as caught:
        HFTarget(model)
    message = str(caught.value)
    assert message.startswith(f"{type(model).__name__} cannot be a target: ") and what in message
    assert "\n" not in message


def test_static_and_quantised_caches_are_refused_by_name():
    config = transformers.LlamaConfig(**SMALL)
    with pytest.raises(ValueError, match="StaticLayer in layers 0, 1, 2"):
        exact_cache(config, transformers.StaticCache(config, max_cache_len=16))
    with pytest.raises(ValueError, match="has no layers"):
        exact_cache(config, object())


def test_sliding_layers_become_full_ones():
    config = transformers.MistralConfig(**SMALL, sliding_window=4)
    before = transformers.DynamicCache(config=config)
    assert {type(layer).__name__ for layer in before.layers} == {"DynamicSlidingWindowLayer"}
    assert {type(layer).__name__ for layer in exact_cache(config).layers} == {"DynamicLayer"}


def test_a_model_that_keeps_no_cache_is_noticed():
    target = gpt2()
    target.model.forward = _without_cache(target.model.forward)
    with pytest.raises(ValueError, match="holds no positions after 3 tokens"):
        target.session(capacity=8).extend([1, 2, 3])


def _without_cache(forward):
    def without(**options):
        return forward(**options | {"cache": None, "use_cache": False})

    return without


def test_the_last_layer_and_the_wrong_order_are_refused():
    target = gpt2()
    with pytest.raises(ValueError, match="layer id 1 is out of range"):
        target.session(capacity=8, taps=Taps(layers=(1,)))
    with pytest.raises(ValueError, match="rise strictly"):
        target.session(capacity=8, taps=Taps(layers=(0, -1)))


# what a target says of itself


def test_sizes_and_tensors():
    target = gpt2()
    assert (target.vocab_size, target.hidden_size, target.num_layers, target.max_context) == (61, 32, 2, 96)
    assert target.name == "tiny gpt2" and target.dtype == torch.float32 and target.device.type == "cpu"
    assert target.embedding() is target.model.transformer.wte.weight
    assert target.head().data_ptr() == target.embedding().data_ptr()  # tied in GPT-2
    assert not target.model.training and not target.head().requires_grad


def test_end_tokens_come_from_the_generation_config_first():
    model = build("LlamaConfig", **SMALL, eos_token_id=7)
    assert HFTarget(model).eos_ids == {7}
    model.generation_config.eos_token_id = [8, 9]
    assert HFTarget(model).eos_ids == {8, 9}
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert HFTarget(model).eos_ids == frozenset()


def test_a_head_with_a_bias_is_not_handed_out():
    target = HFTarget(build("GPTJConfig", vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=8))
    with pytest.raises(ValueError, match="not one matrix without bias"):
        target.head()


def test_rotary_embeddings_that_change_with_length_limit_the_context():
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    assert context_limit(transformers.LlamaConfig(**SMALL, rope_parameters=rope)) == 64
    factors = dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4, original_max_position_embeddings=16)
    rope = dict(rope_type="longrope", rope_theta=1e4, factor=4.0, **factors)
    assert context_limit(transformers.LlamaConfig(**SMALL, rope_parameters=rope)) == 16
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
    assert context_limit(transformers.LlamaConfig(**SMALL, rope_parameters=rope)) == 64


def test_features_are_rows_of_the_hidden_states():
    target = gpt2()
    ids = [3, 1, 4, 1, 5, 9]
    session = target.session(capacity=8, taps=Taps(layers=(-1, 0), last_hidden=True))
    rows = session.extend(ids, logit_rows=2)
    with torch.no_grad():
        out = target.model(torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(rows.features.tapped_NF, torch.cat(out.hidden_states[:2], -1)[0])
    torch.testing.assert_close(rows.features.last_ND, out.hidden_states[-1][0])
    torch.testing.assert_close(rows.logits_JV, out.logits[0, -2:])
    torch.testing.assert_close(rows.features.last_ND[-2:] @ target.head().T, rows.logits_JV)
    assert target.session(capacity=8).extend(ids).features is None


def test_layers_that_share_keys_still_give_every_row():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    fields = SMALL | dict(num_hidden_layers=4, head_dim=8, global_head_dim=16, sliding_window=4, layer_types=kinds)
    fields |= dict(num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=61)
    target = HFTarget(build("Gemma4TextConfig", **fields))
    ids = list(range(3, 20))
    rows = target.session(capacity=20, taps=Taps(layers=(0, 2), last_hidden=True)).extend(ids, logit_rows=1)
    with torch.no_grad():
        out = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(rows.features.tapped_NF, torch.cat([out.hidden_states[1], out.hidden_states[3]], -1)[0])
    torch.testing.assert_close(rows.features.last_ND, out.hidden_states[-1][0])
    session = target.session(capacity=40)
    session.extend(ids)
    session.extend([1] * 9)
    session.truncate(8)
    torch.testing.assert_close(session.extend(ids[8:], logit_rows=1).logits_JV, out.logits[0, -1:])


# the whole loop

PROMPT = [7, 11, 7, 11, 23, 7, 11]


def test_gpt2_speculative_text_is_its_own_greedy_text():
    """A drafter that is often wrong, one that copies, and transformers' own greedy loop: one text."""
    target = gpt2()
    config = DecodeConfig(gamma=4, max_new_tokens=40, ignore_eos=True)
    plain = generate(target, None, PROMPT, config)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        theirs = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=60,
            pad_token_id=0,
        )
    assert 60 not in plain.token_ids
    assert plain.token_ids == theirs[0, len(PROMPT) :].tolist()
    rejected = accepted = 0
    for drafter in (AutoregressiveDrafter(gpt2(0.05)), PromptLookupDrafter()):
        result = generate(target, drafter, PROMPT, config)
        assert result.token_ids == plain.token_ids
        accepted += result.num_accepted
        rejected += result.num_proposed - result.num_accepted
    assert accepted > 5 and rejected > 5


def test_gpt2_ends_at_its_end_token():
    target = gpt2()
    free = generate(target, None, PROMPT, DecodeConfig(max_new_tokens=40, ignore_eos=True)).token_ids
    target.eos_ids = frozenset([free[9]])
    cut = free.index(free[9]) + 1
    result = generate(target, AutoregressiveDrafter(gpt2(0.02)), PROMPT, DecodeConfig(gamma=5, max_new_tokens=40))
    assert result.token_ids == free[:cut] and result.finish_reason == "stop"


def test_a_sampled_request_is_the_same_on_lean_and_hugging_face_targets():
    """The same weights through both implementations, at temperature 1: same draws, same tokens."""
    from dspec_lab.models.decoder import LeanDecoder
    from dspec_lab.models.family import model_spec
    from dspec_lab.models.weights import decoder_weights

    model = build("Qwen3Config", **SMALL, head_dim=8)
    spec = model_spec(model.config.to_dict())
    lean = LeanDecoder(decoder_weights(model.state_dict(), spec, dtype=torch.float32), spec, name="lean")
    config = DecodeConfig(gamma=3, temperature=1.0, max_new_tokens=30, seed=4, ignore_eos=True)
    drafter = PromptLookupDrafter()
    texts = [generate(target, drafter, PROMPT, config).token_ids for target in (lean, HFTarget(model))]
    assert texts[0] == texts[1]
