"""Losses, metrics and gradients against the reference vectors."""

from __future__ import annotations

import pytest
import torch

from dspec_lab.checkpoints.layout import load_drafter, split_projections
from dspec_lab.training.anchors import Anchors, block_labels
from dspec_lab.training.chain_losses import ttt_loss, ttt_position_masks
from dspec_lab.training.losses import LossWeights, dspark_loss
from dspec_lab.training.terms import row_terms

FROZEN = ("embed_tokens.", "lm_head.")


def trainable(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def gradients(model):
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return split_projections(grads, model)


def check_gradients(case, model, tensors, norms, assert_near):
    got = gradients(model)
    assert set(got) == set(norms)
    for name, norm in norms.items():
        assert abs(float(got[name].norm()) - norm) <= 1e-4 * max(1.0, norm), name
    checked = [name for name in tensors if name.startswith("grad.")]
    assert checked
    for name in checked:
        assert_near(got[name.removeprefix("grad.")], tensors[name], 1e-4)


def near(got, expected):
    return abs(got - expected) <= 1e-5 * max(1.0, abs(expected))


@pytest.mark.parametrize("rows_per_chunk", [5, 512])
def test_dspark_losses_metrics_gradients(dspark_case, assert_near, rows_per_chunk):
    model = trainable(load_drafter(dspark_case.checkpoint).model)
    t, manifest = dspark_case.tensors("train"), dspark_case.manifest()["train"]
    anchors = Anchors(positions_BA=t["in.anchor_positions"], keep_BA=t["in.block_keep_mask"].bool())
    inputs = (t["in.target_hidden_states"], t["in.input_ids"], t["in.loss_mask"], t["in.target_last_hidden_states"])
    for setting in manifest["losses"]:
        weights = LossWeights(**setting["weights"], slot_decay_gamma=setting["loss_decay_gamma"])
        if model.confidence_head is None and weights.confidence > 0:
            # DeepSpec drops the term without a word; here it is an error
            with pytest.raises(ValueError, match="no confidence head"):
                dspark_loss(model, *inputs, anchors, weights)
            continue
        report = dspark_loss(model, *inputs, anchors, weights, rows_per_chunk=rows_per_chunk)
        assert near(report.total.item(), setting["total"]), setting["name"]
        compared = 0
        for name, expected in setting["metrics"].items():
            if name == "loss":
                continue
            got = report.metrics[name]
            assert near(got.num, expected["num"]) and near(got.den, expected["den"]), (setting["name"], name)
            compared += 1
        assert compared >= model.arch.block_size + 2
        for term in ("ce_loss", "l1_loss", "confidence_loss"):
            if setting["terms"][f"{term}_den"]:
                assert near(report.metrics[term].num, setting["terms"][f"{term}_num"])
        if setting["name"] == "main":
            report.total.backward()
            check_gradients(dspark_case, model, t, manifest["grad_norms_for_main_loss"], assert_near)
            model.zero_grad()


def test_accept_rate_of_every_slot(dspark_case, assert_near):
    model, t = load_drafter(dspark_case.checkpoint).model, dspark_case.tensors("train")
    if "out.aligned_target_logits" not in t:
        pytest.skip("the small set leaves the target's logits out")
    keep = t["in.block_keep_mask"].bool()
    draft, teacher = (t[f"out.{name}"][keep].flatten(0, 1) for name in ("draft_logits", "aligned_target_logits"))
    anchors = Anchors(positions_BA=t["in.anchor_positions"], keep_BA=keep)
    labels = block_labels(t["in.input_ids"], t["in.loss_mask"], anchors, model.arch.block_size)
    terms = row_terms(draft, teacher, labels.label_ids_BAG[keep].flatten())
    assert_near(terms.accept_rate_N, t["out.accept_rate"][keep].flatten())
    assert_near(terms.cross_entropy_N, -draft.log_softmax(-1).gather(-1, labels.label_ids_BAG[keep].view(-1, 1))[:, 0])


def test_two_processes_share_denominators(dspark_case):
    """Numerators local, denominators summed, total times the number of processes: their mean is the joint loss."""
    model, t = load_drafter(dspark_case.checkpoint).model, dspark_case.tensors("train")
    keep, at = t["in.block_keep_mask"].bool(), t["in.anchor_positions"]
    inputs = (t["in.target_hidden_states"], t["in.input_ids"], t["in.loss_mask"], t["in.target_last_hidden_states"])
    weights = LossWeights(confidence=0.0)
    with torch.no_grad():
        joint = dspark_loss(model, *inputs, Anchors(at, keep), weights)
        den = joint.metrics["ce_loss"].den
        totals = [
            float(
                dspark_loss(
                    model,
                    *(x[row : row + 1] for x in inputs),
                    Anchors(at[row : row + 1], keep[row : row + 1]),
                    weights,
                    sum_over_processes=lambda _: torch.tensor(den),
                    num_processes=2,
                ).total
            )
            for row in range(2)
        ]
    assert near(sum(totals) / 2, float(joint.total))


def test_eagle3_losses_metrics_gradients(eagle3_case, assert_near):
    model = trainable(load_drafter(eagle3_case.checkpoint).model)
    t, manifest = eagle3_case.tensors("train"), eagle3_case.manifest()["train"]
    lengths = t["in.attention_mask"].sum(1)
    masks = ttt_position_masks(t["in.loss_mask"], lengths, model.arch.ttt_length)
    assert torch.equal(masks, t["out.position_mask"].bool())
    report = ttt_loss(
        model,
        t["in.target_hidden_states"],
        t["in.input_ids"],
        t["in.loss_mask"],
        t["in.target_last_hidden_states"],
        lengths,
        rows_per_chunk=7,
    )
    assert near(report.total.item(), manifest["total_loss"])
    for name, expected in manifest["metrics"].items():
        if name.startswith("ploss_"):
            assert near(report.metrics[f"loss@{name.removeprefix('ploss_')}"].value, expected["value"]), name
        elif name.startswith("valid_tokens@"):
            assert report.metrics[f"accuracy@{name.removeprefix('valid_tokens@')}"].den == expected["value"]
        elif name != "loss":
            got = report.metrics[name]
            assert near(got.num, expected["num"]) and near(got.den, expected["den"]), name
    report.total.backward()
    check_gradients(eagle3_case, model, t, manifest["grad_norms"], assert_near)
