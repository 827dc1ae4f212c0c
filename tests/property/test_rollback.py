"""Rolling back is exact: after any sequence of extends and truncates a session acts as a fresh one with its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspec_lab.kernels.rows import native_status
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.family import model_spec
from dspec_lab.models.hf import HFTarget
from dspec_lab.models.protocol import Taps, Target, TargetRows, TargetSession
from dspec_lab.models.weights import decoder_weights

WINDOW = 6
COMMON = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
SLIDING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
GEMMA = COMMON | SLIDING | dict(global_head_dim=16, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
MODELS = {
    "llama": ("LlamaConfig", COMMON),
    "qwen3": ("Qwen3Config", COMMON | dict(attention_bias=True)),
    "gemma4": ("Gemma4TextConfig", GEMMA | dict(attention_k_eq_v=True, final_logit_softcapping=20.0)),
    "mistral": ("MistralConfig", COMMON | dict(sliding_window=WINDOW)),
    "gemma3": ("Gemma3TextConfig", COMMON | SLIDING),
    "gpt2": ("GPT2Config", dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=128)),
}
CAPACITY = 100
TAPS = Taps(layers=(-1, 1), last_hidden=True)

# (tokens fed, share of the cache kept afterwards): verify rounds, long prompts, and rollbacks past the whole window
STEPS = st.lists(st.tuples(st.integers(1, 24), st.floats(0, 1)), min_size=1, max_size=7)
SETTINGS = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def random_model(name: str):
    import transformers

    config_name, fields = MODELS[name]
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_name)(**fields))
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:  # sharp enough that every token matters
                tensor.normal_(std=0.3)
    return model


def lean(name: str, dtype: torch.dtype) -> LeanDecoder:
    model = random_model(name)
    spec = model_spec(model.config.to_dict())
    return LeanDecoder(decoder_weights(model.state_dict(), spec, dtype=dtype), spec, name=name, impl="native")


@pytest.fixture(scope="module")
def targets():
    """Tiny random targets by name, made once."""
    made: dict[tuple, Target] = {}

    def target(name: str, dtype: torch.dtype | None = None) -> Target:
        if (name, dtype) not in made:
            made[name, dtype] = HFTarget(random_model(name)) if dtype is None else lean(name, dtype)
        return made[name, dtype]

    return target


def random_walk(target: Target, steps: Sequence[tuple[int, float]], seed: int) -> tuple[list[int], int, TargetRows]:
    """(tokens a session holds after `steps` and one last pass, rows of that pass, its result)."""
    generator = torch.Generator().manual_seed(seed)
    session, tokens = target.session(capacity=CAPACITY, taps=TAPS), []

    def feed(count: int) -> TargetRows:
        fresh = torch.randint(0, target.vocab_size, (count,), generator=generator).tolist()
        tokens.extend(fresh)
        return session.extend(fresh)

    for count, kept in steps:
        if session.length + count > CAPACITY - 8:
            session.truncate(0)
            tokens.clear()
        feed(count)
        length = round(kept * session.length)
        session.truncate(length)
        del tokens[length:]
        assert session.length == length
    return tokens, 8, feed(8)


def fresh_rows(session: TargetSession, tokens: list[int], last: int) -> TargetRows:
    """The last rows of a session that only ever saw `tokens`, fed in two passes within the 64 invariant rows."""
    for at in range(0, len(tokens) - last, 50):
        session.extend(tokens[at : min(at + 50, len(tokens) - last)], logit_rows=0)
    return session.extend(tokens[-last:])


def all_numbers(rows: TargetRows) -> Tensor:
    return torch.cat([rows.logits_JV.float(), rows.features.tapped_NF, rows.features.last_ND], -1)


@pytest.mark.skipif(not native_status()[0], reason=native_status()[1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma4"])
@SETTINGS
@given(steps=STEPS, seed=st.integers(0, 2**20))
def test_the_lean_decoder_forgets_bit_for_bit(targets, name, dtype, steps, seed):
    target = targets(name, dtype)
    tokens, last, rows = random_walk(target, steps, seed)
    fresh = fresh_rows(target.session(capacity=CAPACITY, taps=TAPS), tokens, last)
    assert torch.equal(all_numbers(rows), all_numbers(fresh))
    # capacity is padded memory: a session with just enough room reads the same places
    snug = fresh_rows(target.session(capacity=len(tokens), taps=TAPS), tokens, last)
    assert torch.equal(all_numbers(rows), all_numbers(snug))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma4", "mistral", "gemma3", "gpt2"])
@settings(SETTINGS, max_examples=15)
@given(steps=STEPS, seed=st.integers(0, 2**20))
def test_hugging_face_targets_forget(targets, name, steps, seed):
    """Also when more than the window is rolled back. Other pass sizes sum in another order, so 1e-5 of the largest."""
    target = targets(name)
    tokens, last, rows = random_walk(target, steps, seed)
    fresh = all_numbers(fresh_rows(target.session(capacity=CAPACITY, taps=TAPS), tokens, last))
    torch.testing.assert_close(all_numbers(rows), fresh, rtol=0, atol=1e-5 * float(fresh.abs().max()))
    # and an uncached pass of the model itself
    with torch.no_grad():
        whole_JV = target.model(torch.tensor([tokens]), use_cache=False).logits[0, -last:]
    torch.testing.assert_close(rows.logits_JV, whole_JV, rtol=0, atol=1e-5 * float(whole_JV.abs().max()))


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_bad_lengths_are_refused(targets, name):
    for target in (targets(name), targets(name, torch.float32)) if native_status()[0] else (targets(name),):
        session = target.session(capacity=32)
        session.extend([1, 2, 3])
        for length in (4, -1):
            with pytest.raises(ValueError, match=f"3 tokens back to {length}"):
                session.truncate(length)
        with pytest.raises(ValueError, match=r"3 \+ 30 tokens do not fit"):
            session.extend([1] * 30)
        assert session.length == 3
        with pytest.raises(ValueError, match="rows of logits"):
            session.extend([])
        with pytest.raises(ValueError, match="rows of logits"):
            session.extend([1], logit_rows=2)
        assert session.extend([1, 2], logit_rows=0).logits_JV.shape == (0, target.vocab_size)
        with pytest.raises(ValueError, match="129 tokens do not fit"):
            target.session(capacity=129)
