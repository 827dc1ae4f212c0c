"""EAGLE-3 models against the reference vectors: training-time test, prefill, chain drafting over three rounds."""

from __future__ import annotations

import torch

from dspec_lab.checkpoints.layout import load_drafter
from dspec_lab.training.anchors import ttt_mask


def test_training_time_test(eagle3_case, assert_near):
    model, t = load_drafter(eagle3_case.checkpoint).model, eagle3_case.tensors("train")
    counted = t["out.position_mask"].bool()
    with torch.no_grad():
        steps = list(model.train_steps(t["in.target_hidden_states"], t["in.input_ids"]))
        teacher = model.teacher_logits(t["in.target_last_hidden_states"]).argmax(-1)
        assert len(steps) == counted.shape[0] == model.arch.ttt_length
        for s, hidden in enumerate(steps):
            assert_near(hidden[counted[s]], t["out.hidden_states"][s][counted[s]])
            assert_near(model.logits(hidden)[counted[s]], t["out.draft_logits"][s][counted[s]])
            moved = torch.roll(teacher, -(1 + s), dims=1)
            assert torch.equal(moved[counted[s]], t["out.target_argmax"][s][counted[s]])
    lengths = t["in.attention_mask"].sum(1)
    mask = ttt_mask(lengths, counted.shape[2], counted.shape[0] - 1)
    assert torch.equal(mask, t["out.attention_mask_last_step"].bool())


def test_chain_drafting_rounds(eagle3_case, assert_near):
    model = load_drafter(eagle3_case.checkpoint).model
    t, record = eagle3_case.tensors("inference"), eagle3_case.manifest()["inference"]
    cache = model.new_cache(64)
    with torch.inference_mode():
        ids = torch.cat([t["in.prompt_ids"][0, 1:], t["in.first_token"]])
        kept = model.extend(cache, t["in.prompt_features"][0], ids)
        for r, expected in enumerate(record["rounds"]):
            assert cache.length == expected["start"] == expected["cache_length_before_round"]
            assert_near(kept[None], t[f"out.r{r}.first_hidden"])
            hidden, logits = kept, [model.logits(kept)]
            for s in range(model.arch.ttt_length - 1):
                hidden = model.step(cache, s, hidden, int(logits[-1].argmax()))
                logits.append(model.logits(hidden))
            assert_near(torch.cat(logits)[None], t[f"out.r{r}.step_logits"])
            tokens = [int(row.argmax()) for row in logits]
            assert tokens == expected["proposed"] == t[f"out.r{r}.tokens"][0].tolist()
            kept = model.extend(cache, t[f"in.r{r}.committed_features"][0], t[f"in.r{r}.committed_ids"][0])
        assert_near(kept[None], t["out.final_hidden"])
        assert cache.length == record["final_cache_length"]
        keys, values = cache.read(0, 0)
        assert_near(keys, t["out.cache.layer0.keys"])
        assert_near(values, t["out.cache.layer0.values"])
