"""Sessions of the trained drafters, with random weights: lossless at temperature 0, legal proposals above, state."""

from __future__ import annotations

import pytest
import torch

from dspec_lab.checkpoints.drafters import as_drafter
from dspec_lab.checkpoints.layout import build_model
from dspec_lab.config import DecodeConfig, SamplingConfig
from dspec_lab.core.sampling import law
from dspec_lab.core.streams import DraftDraws, RandomStreams
from dspec_lab.drafters.architecture import BlockArchitecture, ChainArchitecture, MedusaArchitecture
from dspec_lab.drafters.dflash import DFlashDrafter
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.models.family import model_spec
from dspec_lab.models.protocol import Features, Taps
from dspec_lab.models.weights import decoder_weights
from dspec_lab.training.anchors import Anchors
from dspec_lab.training.chain_losses import gathered_rows
from dspec_lab.training.losses import LossWeights, dspark_loss
from dspec_lab.verifier.decode import generate

VOCAB, WIDTH, LAYERS = 53, 24, 4
COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": {**COMMON, "model_type": "llama", "rope_theta": 10000.0},
    "qwen3": {**COMMON, "model_type": "qwen3", "head_dim": 8, "rope_theta": 10000.0},
    "gemma4": {
        **COMMON,
        "model_type": "gemma4_text",
        "head_dim": 6,
        "global_head_dim": 8,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 8.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
}
KINDS = ("dspark-vanilla", "dspark-gated", "dspark-rnn", "dflash", "dflash-mask-first", "eagle3", "mtp", "medusa")


def random_target(family="llama"):
    spec = model_spec({**CONFIGS[family], "num_hidden_layers": LAYERS})
    shape = spec.attention["full_attention"]
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    generator = torch.Generator().manual_seed(11)

    def draw(*size, mean=0.0, std=0.25):
        return torch.randn(*size, generator=generator) * std + mean

    state = {"model.embed_tokens.weight": draw(VOCAB, WIDTH, std=1.0), "lm_head.weight": draw(VOCAB, WIDTH, std=0.6)}
    state["model.norm.weight"] = draw(WIDTH, mean=1.0)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.family.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        matrices = {"q": (q, WIDTH), "k": (kv, WIDTH), "v": (kv, WIDTH), "o": (WIDTH, q)}
        state |= {f"{at}self_attn.{name}_proj.weight": draw(*size) for name, size in matrices.items()}
        state |= {f"{at}mlp.{name}_proj.weight": draw(40, WIDTH) for name in ("gate", "up")}
        state[f"{at}mlp.down_proj.weight"] = draw(WIDTH, 40)
        state |= {f"{at}{name}.weight": draw(WIDTH, mean=1.0) for name in norms}
        state |= {f"{at}self_attn.{name}_norm.weight": draw(shape.head_dim, mean=1.0) for name in "qk"}
        state[f"{at}layer_scalar"] = draw(1, mean=1.0, std=0.1)
    return LeanDecoder(decoder_weights(state, spec, dtype=torch.float32), spec, name=f"tiny-{family}")


def random_drafter(kind, family="llama", *, reduced=True, target=None, **options):
    spec = model_spec({**CONFIGS[family], "num_hidden_layers": 2 if kind.startswith("dspark") else 1})
    shared = {"spec": spec, "num_target_layers": LAYERS, "draft_vocab_size": 21 if reduced else None}
    name, _, variant = kind.partition("-")
    if name in ("dspark", "dflash"):
        head = {"markov_rank": 5, "markov_head_type": variant, "confidence_head": True, "confidence_with_markov": True}
        arch = BlockArchitecture(
            **shared,
            **(head if name == "dspark" else {"sample_from_anchor": variant != "mask-first"}),
            target_hidden_size=WIDTH,
            target_layer_ids=(-1, 0, 2),
            block_size=5,
            mask_token_id=1,
            **options,
        )
    elif name == "medusa":
        arch = MedusaArchitecture(**shared, medusa_num_heads=4)
    else:
        ids = (0, 1, 2) if name == "eagle3" else ()
        arch = ChainArchitecture(kind=name, **shared, target_hidden_size=WIDTH, target_layer_ids=ids, ttt_length=4)
    torch.manual_seed(4)
    model = build_model(arch)
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    if model.d2t is not None:
        model.keep_tokens(torch.randperm(VOCAB)[:21].sort().values)
    if target is not None:
        model.share(embedding=target.embedding, head=target.head)
    return as_drafter(model.eval().requires_grad_(False))


def committed(target, drafter, tokens):
    """The commit that tells a session of a prompt (all tokens but the newest) and its newest token."""
    rows = target.session(capacity=len(tokens), taps=drafter.taps).extend(tokens[:-1])
    return Commit(tuple(tokens), rows.features)


def proposal_of(drafter, target, commits, *, gamma=None, temperature=0.0):
    session = drafter.start(target, capacity=64)
    for commit in commits:
        session.commit(commit)
    draws = DraftDraws(RandomStreams(0), 0)
    return session.propose(gamma or drafter.max_gamma, SamplingConfig(temperature=temperature), draws)


PROMPT = [7, 3, 40, 12, 5, 5, 31, 2]


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_targets(kind, family):
    target, drafter = random_target(family), random_drafter(kind, family)
    plain = generate(target, None, PROMPT, DecodeConfig(max_new_tokens=10))
    spec = generate(target, drafter, PROMPT, DecodeConfig(gamma=drafter.max_gamma, max_new_tokens=10))
    assert spec.token_ids == plain.token_ids
    assert spec.num_proposed > spec.num_accepted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduced", [True, False])
def test_sampled_proposal_comes_from_the_law_it_hands_over(kind, reduced):
    target = random_target()
    drafter = random_drafter(kind, reduced=reduced)
    session = drafter.start(target, capacity=64)
    session.commit(committed(target, drafter, PROMPT))
    drawn = []

    class Record:
        def categorical(self, purpose, round_index, slot, probs_V):
            assert (purpose, round_index, slot) == ("draft", 3, len(drawn))
            drawn.append(probs_V)
            return int(probs_V.argmin()) if slot % 2 else int(probs_V.argmax())

        def bernoulli(self, purpose, round_index, slot, prob):
            raise AssertionError("a drafter decides nothing else at random")

    sampling = SamplingConfig(temperature=0.8, top_k=15)
    proposal = session.propose(drafter.max_gamma, sampling, DraftDraws(Record(), 3))
    rows = proposal.draft_probs_GV
    assert proposal.kind == "dense" and rows.shape == (drafter.max_gamma, VOCAB) and rows.dtype == torch.float32
    kept = torch.arange(VOCAB) if drafter.model.target_ids_W is None else drafter.model.target_ids_W
    dropped = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, kept, False)
    assert not rows[:, dropped].any() and set(proposal.token_ids) <= set(kept.tolist())
    assert torch.equal(rows[:, kept], torch.stack(drawn))
    assert torch.equal(rows[:, kept], law(proposal.draft_logits_GV, sampling))


@pytest.mark.parametrize("kind", KINDS)
def test_committing_in_pieces_is_the_same_context(kind):
    """Also the k = 0 step: a commit without a proposal before it still extends the context."""
    target, drafter = random_target("qwen3"), random_drafter(kind, "qwen3")
    whole = proposal_of(drafter, target, [committed(target, drafter, PROMPT)], temperature=1.0)
    rows = target.session(capacity=32, taps=drafter.taps).extend(PROMPT[:-1]).features

    def part(start, end):
        cut = [None if t is None else t[start:end] for t in (rows.tapped_NF, rows.last_ND)]
        return Features(*cut)

    pieces = [
        Commit(tuple(PROMPT[:4]), part(0, 3)),
        Commit(tuple(PROMPT[4:5]), part(3, 4)),
        Commit(tuple(PROMPT[5:]), part(4, 7)),
    ]
    again = proposal_of(drafter, target, pieces, temperature=1.0)
    assert again.token_ids == whole.token_ids
    torch.testing.assert_close(again.draft_logits_GV, whole.draft_logits_GV, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_proposing_leaves_no_trace_and_gamma_only_cuts(kind):
    target, drafter = random_target(), random_drafter(kind)
    commit = committed(target, drafter, PROMPT)
    session = drafter.start(target, capacity=64)
    session.commit(commit)
    sampling = SamplingConfig(temperature=0.9)
    first = session.propose(drafter.max_gamma, sampling, DraftDraws(RandomStreams(1), 0))
    session.propose(2, sampling, DraftDraws(RandomStreams(9), 5))
    again = session.propose(drafter.max_gamma, sampling, DraftDraws(RandomStreams(1), 0))
    short = session.propose(2, sampling, DraftDraws(RandomStreams(1), 0))
    fresh = proposal_of(drafter, target, [commit], temperature=0.9, gamma=2)
    assert again.token_ids == first.token_ids and short.token_ids == first.token_ids[:2]
    assert torch.equal(again.draft_probs_GV, first.draft_probs_GV)
    # another request on the same drafter starts from nothing
    seeded = session.propose(2, sampling, DraftDraws(RandomStreams(0), 0))
    assert fresh.token_ids == seeded.token_ids and torch.equal(fresh.draft_probs_GV, seeded.draft_probs_GV)


@pytest.mark.parametrize("kind", KINDS)
def test_misuse_is_refused(kind):
    target, drafter = random_target(), random_drafter(kind)
    session = drafter.start(target, capacity=16)
    sampling, draws = SamplingConfig(), DraftDraws(RandomStreams(0), 0)
    with pytest.raises(ValueError, match="before the prompt was committed"):
        session.propose(1, sampling, draws)
    with pytest.raises(ValueError, match="needs the target's features"):
        session.commit(Commit(tuple(PROMPT)))
    features = committed(target, drafter, PROMPT).features
    with pytest.raises(ValueError, match="9 committed tokens need 8 feature rows, got 7"):
        session.commit(Commit((*PROMPT, 4), features))
    session.commit(Commit(tuple(PROMPT), features))
    with pytest.raises(ValueError, match=f"was trained to draft {drafter.max_gamma} tokens, cannot draft gamma ="):
        session.propose(drafter.max_gamma + 1, sampling, draws)
    assert session.propose(0, sampling, draws).gamma == 0
    deeper = random_target()
    deeper.num_layers += 1
    with pytest.raises(ValueError, match="trained for a target of 4 layers; tiny-llama has 5"):
        drafter.start(deeper, capacity=16)


@pytest.mark.parametrize("kind", ["dspark-vanilla", "eagle3", "mtp"])
def test_draft_cache_is_bounded_and_holds_committed_tokens_only(kind):
    target, drafter = random_target(), random_drafter(kind)
    session = drafter.start(target, capacity=16)
    size = session.cache_bytes
    session.commit(committed(target, drafter, PROMPT))
    session.propose(drafter.max_gamma, SamplingConfig(), DraftDraws(RandomStreams(0), 0))
    assert session.context_length == len(PROMPT) - 1 and session.cache_bytes == size
    features = committed(target, drafter, PROMPT + PROMPT[:3]).features
    rows = [None if t is None else t.repeat(2, 1) for t in (features.tapped_NF, features.last_ND)]
    with pytest.raises(ValueError, match="exceed the draft cache's capacity 16"):
        session.commit(Commit(tuple(range(len(rows[0] if rows[0] is not None else rows[1]))), Features(*rows)))


def test_a_round_that_ends_on_an_accepted_end_token_is_taken():
    """Such a round brings the end token's own row too; the next commit brings it again if the request goes on."""
    target, drafter = random_target(), random_drafter("dspark-gated")
    rows = target.session(capacity=32, taps=drafter.taps).extend(PROMPT).features.tapped_NF
    pieces = [
        Commit(tuple(PROMPT[:4]), Features(rows[:3])),
        Commit(tuple(PROMPT[4:6]), Features(rows[3:6])),  # rows of the anchor and of both kept drafts
        Commit(tuple(PROMPT[6:]), Features(rows[5:7])),
    ]
    whole = proposal_of(drafter, target, [Commit(tuple(PROMPT), Features(rows[:7]))])
    assert proposal_of(drafter, target, pieces).token_ids == whole.token_ids


def test_window_hides_what_lies_before_it():
    target = random_target()
    windowed, full = (random_drafter("dspark-vanilla", context_window=w) for w in (4, None))
    tokens = PROMPT * 3
    commit = committed(target, windowed, tokens)
    near = commit.features.tapped_NF
    changed = near.clone()
    changed[: len(tokens) - 5] += 1.0

    def logits(drafter, rows):
        return proposal_of(drafter, target, [Commit(tuple(tokens), Features(rows))]).draft_logits_GV

    assert torch.equal(logits(windowed, near), logits(windowed, changed))
    assert not torch.allclose(logits(full, near), logits(full, changed), atol=1e-3)
    # the same window in training
    anchors = torch.tensor([[len(tokens) - 1]])
    hidden = windowed.model.train_hidden(near[None], torch.tensor([[tokens[-1]]]), anchors)
    expected = logits(windowed, near)[0]
    row = windowed.model.head_logits(hidden[0, 0, :1])
    row = row + windowed.model.markov_head.bias(windowed.model.markov_head.embed(torch.tensor([tokens[-1]])))
    torch.testing.assert_close(row[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_chain_steps_in_training_equal_drafting(kind, family):
    """Training-time test at position n - 1, all true tokens fed, equals prefill and steps with the same tokens."""
    target = random_target(family)
    drafter = random_drafter(kind, family, target=target)
    model = drafter.model
    tokens = PROMPT + [9, 14, 33]
    rows = committed(target, drafter, PROMPT).features
    features = rows.tapped_NF if drafter.taps.layers else rows.last_ND
    length = len(PROMPT) - 1
    padded = torch.nn.functional.pad(features, (0, 0, 0, len(tokens) - length))
    steps = list(model.train_steps(padded[None], torch.tensor([tokens]), 4))
    cache = model.new_cache(32)
    hidden = model.extend(cache, features, torch.tensor(tokens[1 : length + 1]))
    for s in range(4):
        torch.testing.assert_close(hidden[0], steps[s][0, length - 1], rtol=0, atol=2e-5)
        if s < 3:
            hidden = model.step(cache, s, hidden, tokens[length + 1 + s])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_chain_steps_of_chosen_rows_equal_those_of_all(kind, family):
    """Rows left out of the later steps change neither the others nor, with a loss on those, any gradient."""
    model = random_drafter(kind, family, target=random_target(family)).model.train()
    model.requires_grad_(True)
    mask = torch.zeros(3, 11, dtype=torch.bool)
    mask[0, 4:9], mask[1, 2], mask[1, 7:] = True, True, True  # the third sequence has no such row
    rows, place = gathered_rows(mask)
    assert rows.shape == (3, 5) and rows[0].tolist() == [4, 5, 6, 7, 8] and rows[1].tolist() == [2, 7, 8, 9, 10]
    generator = torch.Generator().manual_seed(2)
    width = model.arch.spec.hidden_size * max(len(model.arch.target_layer_ids), 1)
    features = torch.randn(3, 11, width, generator=generator)
    tokens = torch.randint(0, VOCAB, (3, 11), generator=generator)
    batch_N, at_N = mask.nonzero(as_tuple=True)
    gradients = []
    for later in (None, rows):
        model.zero_grad()
        steps = list(model.train_steps(features, tokens, 4, later))
        chosen = [x[batch_N, at_N if later is None or s == 0 else place[batch_N, at_N]] for s, x in enumerate(steps)]
        assert [x.shape[1] for x in steps] == ([11] * 4 if later is None else [11, 5, 5, 5])
        sum((x.square() * (s + 1)).sum() for s, x in enumerate(chosen)).backward()
        gradients.append((chosen, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (all_steps, all_grads), (few_steps, few_grads) = gradients
    torch.testing.assert_close(few_steps, all_steps, rtol=0, atol=2e-5)
    assert all_grads.keys() == few_grads.keys() and all_grads
    for name, grad in all_grads.items():
        torch.testing.assert_close(few_grads[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()), msg=name)


def test_chain_ends_with_a_drafted_end_token():
    target, drafter = random_target(), random_drafter("eagle3")
    whole = proposal_of(drafter, target, [committed(target, drafter, PROMPT)])
    assert whole.gamma == 4
    target.eos_ids = frozenset([whole.token_ids[1]])
    cut = proposal_of(drafter, target, [committed(target, drafter, PROMPT)])
    first = whole.token_ids.index(whole.token_ids[1])
    assert cut.token_ids == whole.token_ids[: first + 1]


def test_medusa_heads_start_as_the_targets_head():
    target = random_target()
    arch = MedusaArchitecture(spec=model_spec({**CONFIGS["llama"], "num_hidden_layers": 1}), num_target_layers=LAYERS)
    drafter = as_drafter(build_model(arch).eval())
    commit = committed(target, drafter, PROMPT)
    proposal = proposal_of(drafter, target, [commit])
    # every untrained head repeats what the target chose after the newest row, the anchor itself
    expected = target.logits(commit.features.last_ND[-1:])
    torch.testing.assert_close(proposal.draft_logits_GV, expected.expand(4, -1))


def test_dflash_refuses_a_sequential_head():
    with pytest.raises(ValueError, match="this model has one of rank 5"):
        DFlashDrafter(random_drafter("dspark-rnn").model)


def test_bf16_matrices_draft_alike():
    target = random_target()
    exact = random_drafter("dspark-rnn", target=target)
    rounded = random_drafter("dspark-rnn", target=target)
    rounded.model.cast_matrices(torch.bfloat16)
    assert rounded.model.fc.weight.dtype == torch.bfloat16 and rounded.model.norm.weight.dtype == torch.float32
    assert rounded.model.confidence_head.proj.weight.dtype == torch.float32
    commit = committed(target, exact, PROMPT)
    got, want = (proposal_of(d, target, [commit], gamma=1) for d in (rounded, exact))
    assert got.draft_logits_GV.dtype == torch.float32
    # 8 bits of mantissa through three layers of width 24
    assert (got.draft_logits_GV - want.draft_logits_GV).abs().max() < 0.05 * want.draft_logits_GV.abs().max()
    assert got.confidence_G[0] == pytest.approx(want.confidence_G[0], abs=0.05)


def test_mask_first_layout_proposes_from_the_next_slot():
    """`sample_from_anchor` false: slot k proposes the token k places after the anchor, so slot 0 proposes nothing."""
    target = random_target()
    anchor_first, mask_first = (random_drafter(kind, target=target) for kind in ("dflash", "dflash-mask-first"))
    assert (anchor_first.max_gamma, mask_first.max_gamma) == (5, 4)
    commit = committed(target, anchor_first, PROMPT)
    slots = proposal_of(anchor_first, target, [commit]).draft_logits_GV
    assert torch.equal(proposal_of(mask_first, target, [commit]).draft_logits_GV, slots[1:])
    # the same labels for it in training: the first proposing slot is compared with the token after the anchor
    rows = target.session(capacity=16, taps=Taps(layers=(-1, 0, 2), last_hidden=True)).extend(PROMPT).features
    mask = torch.ones(1, len(PROMPT), dtype=torch.bool)
    batch = (rows.tapped_NF[None], torch.tensor([PROMPT]), mask, rows.last_ND[None])
    anchors = Anchors(positions_BA=torch.tensor([[2]]), keep_BA=torch.tensor([[True]]))
    with torch.no_grad():
        report = dspark_loss(mask_first.model, *batch, anchors, LossWeights(l1=1.0, ce=0.0, confidence=0.0))
        hidden = mask_first.model.train_hidden(batch[0], torch.tensor([[PROMPT[2]]]), anchors.positions_BA)[0, 0, 1:]
        draft = mask_first.model.spread(mask_first.model.head_logits(hidden).softmax(-1))
        teacher = target.logits(rows.last_ND[2:6]).softmax(-1)
    accept = 1 - 0.5 * (draft - teacher).abs().sum(-1)
    got = [report.metrics[f"accept_rate@{k}"].value for k in range(4)]
    assert got == pytest.approx(accept.tolist(), abs=1e-5)


def test_a_request_that_skips_drafting_takes_in_its_rows_later_and_drafts_the_same():
    target, drafter = random_target(), random_drafter("dspark-vanilla")
    rows = target.session(capacity=32, taps=drafter.taps).extend(PROMPT).features.tapped_NF
    prompt, rest = PROMPT[:4], PROMPT[4:]
    pieces = [Commit((token,), Features(rows[3 + i : 4 + i])) for i, token in enumerate(rest)]
    proposals = []
    for always in (True, False):
        session, sampling = drafter.start(target, capacity=16), SamplingConfig()
        session.commit(Commit(tuple(prompt), Features(rows[:3])))
        for round_index, piece in enumerate(pieces):
            session.propose(2 if always else 0, sampling, DraftDraws(RandomStreams(0), round_index))
            session.commit(piece)
            assert session.context_length == 4 + round_index
        proposals.append(session.propose(drafter.max_gamma, sampling, DraftDraws(RandomStreams(0), 9)))
    assert proposals[0].token_ids == proposals[1].token_ids
    torch.testing.assert_close(proposals[0].draft_logits_GV, proposals[1].draft_logits_GV)
