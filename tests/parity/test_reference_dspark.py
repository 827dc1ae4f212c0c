"""DSpark and DFlash models against the reference vectors: training forward, three drafting rounds, masks."""

from __future__ import annotations

import torch

from dspec_lab.checkpoints.layout import load_drafter
from dspec_lab.training.anchors import (
    Anchors,
    anchor_candidates,
    block_labels,
    packed_block_mask,
    packed_positions,
    sample_anchors,
)


def load(case):
    model = load_drafter(case.checkpoint).model
    tensors = case.tensors("train")
    anchors = Anchors(positions_BA=tensors["in.anchor_positions"], keep_BA=tensors["in.block_keep_mask"].bool())
    return model, tensors, anchors


def test_anchors_labels_and_masks(dspark_case):
    model, t, anchors = load(dspark_case)
    ids, mask, size = t["in.input_ids"], t["in.loss_mask"], model.arch.block_size
    keep = anchors.keep_BA
    assert torch.equal(anchor_candidates(mask), t["out.anchor_candidate_mask"].bool())
    labels = block_labels(ids, mask, anchors, size)
    assert torch.equal(labels.label_ids_BAG[keep], t["out.target_ids"][keep])
    assert torch.equal(labels.supervised_BAG, t["out.eval_mask"].bool())
    assert torch.equal(packed_positions(anchors, ids.shape[1], size), t["out.position_ids"])
    assert torch.equal(packed_block_mask(anchors, ids.shape[1], size), t["out.attention_mask"].bool())
    drawn = sample_anchors(mask, keep.shape[1], torch.Generator().manual_seed(3))
    assert torch.equal(drawn.keep_BA.sum(1), keep.sum(1))
    assert bool(t["out.anchor_candidate_mask"].bool().gather(1, drawn.positions_BA)[drawn.keep_BA].all())


def test_training_forward(dspark_case, assert_near):
    model, t, anchors = load(dspark_case)
    keep = anchors.keep_BA
    ids = t["in.input_ids"]
    anchor_ids = ids.gather(1, anchors.positions_BA)
    with torch.no_grad():
        hidden = model.train_hidden(t["in.target_hidden_states"], anchor_ids, anchors.positions_BA)
        labels = block_labels(ids, t["in.loss_mask"], anchors, model.arch.block_size)
        logits, e = model.head_logits(hidden), None
        if model.markov_head is not None:
            flat = labels.previous_ids_BAG.flatten(0, 1)
            logits = logits + model.markov_head.bias(model.markov_head.features(flat, hidden.flatten(0, 1))).view_as(
                logits
            )
            e = model.markov_head.embed(labels.previous_ids_BAG)
        batch = torch.arange(ids.shape[0])[:, None, None]
        aligned = model.teacher_logits(t["in.target_last_hidden_states"][batch, labels.teacher_index_BAG])
    assert_near(hidden[keep], t["out.block_hidden"][keep])
    if "out.draft_logits" in t:
        assert_near(logits[keep], t["out.draft_logits"][keep])
        assert_near(aligned[keep], t["out.aligned_target_logits"][keep])
    assert (model.confidence_head is not None) == ("out.confidence_logits" in t)
    if model.confidence_head is not None:
        confidence = model.confidence_head(hidden, e if model.confidence_head.uses_previous else None)
        assert_near(confidence[keep], t["out.confidence_logits"][keep])


def test_gathered_window_equals_mask(dspark_case, assert_near):
    """A context window longer than any anchor changes nothing; a short one is the same gathered or masked."""
    from dspec_lab.drafters import packed

    model, t, anchors = load(dspark_case)
    torch.manual_seed(0)
    shape = model.layers[0].self_attn.shape
    batch, count, size = *anchors.positions_BA.shape, model.arch.block_size
    length = t["in.input_ids"].shape[1]

    def draw(rows, heads):
        return torch.randn(batch, rows, heads, shape.head_dim)

    q = draw(count * size, shape.num_heads)
    ck, cv = draw(length, shape.num_kv_heads), draw(length, shape.num_kv_heads)
    bk, bv = draw(count * size, shape.num_kv_heads), draw(count * size, shape.num_kv_heads)

    def attend(window):
        return packed.packed_attend(q, ck, cv, bk, bv, anchors.positions_BA, scale=0.3, window=window)

    assert_near(attend(length - 1), attend(None))
    # written out densely, from the mask the reference gives
    mask = packed_block_mask(Anchors(anchors.positions_BA, torch.ones_like(anchors.keep_BA)), length, size)
    near = torch.arange(length) >= anchors.positions_BA.repeat_interleave(size, 1)[..., None] - 3
    mask[..., :length] &= near
    group = shape.num_heads // shape.num_kv_heads
    keys, values = (torch.cat(pair, 1).repeat_interleave(group, 2) for pair in ((ck, bk), (cv, bv)))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, keys) * 0.3
    weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    assert_near(attend(3), torch.einsum("bhqk,bkhe->bqhe", weights, values).flatten(2))


def test_three_drafting_rounds(dspark_case, assert_near):
    model = load_drafter(dspark_case.checkpoint).model
    t, rounds = dspark_case.tensors("inference"), dspark_case.manifest()["inference"]["rounds"]
    cache = model.new_cache(64)
    with torch.inference_mode():
        for r, record in enumerate(rounds):
            model.append_context(cache, t[f"in.r{r}.context"][0])
            assert cache.length == record["block_positions"][0]
            anchor = int(t[f"in.r{r}.anchor"])
            hidden = model.block_hidden(cache, anchor)
            base = model.head_logits(hidden)
            assert_near(hidden, t[f"out.r{r}.block_hidden"][0])
            assert_near(base, t[f"out.r{r}.base_logits"][0])
            drafted = model.draft(hidden, base, anchor, lambda k, logits: int(logits.argmax()))
            assert list(drafted.token_ids) == record["proposed_tokens"] == t[f"out.r{r}.tokens"][0].tolist()
            if model.markov_head is not None:
                assert_near(drafted.logits_GW, t[f"out.r{r}.corrected_logits"][0])
            if model.confidence_head is None:
                assert drafted.confidence_logits_G is None
                continue
            confidence = drafted.confidence_logits_G
            assert_near(confidence, t[f"out.r{r}.confidence_logits"][0])
            for threshold, length in record["verified_prefix_length_by_threshold"].items():
                low = (torch.sigmoid(confidence) < float(threshold)).nonzero()
                assert (int(low[0]) if len(low) else len(confidence)) == length
        keys, values = cache.read(0, 0)
        assert_near(keys, t["out.cache.layer0.keys"])
        assert_near(values, t["out.cache.layer0.values"])
