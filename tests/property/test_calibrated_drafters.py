"""Calibrated and cut drafters keep the target's law, exactly; a confidence that has seen its own token does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspec_lab.calibration.calibration import Calibration, fit_calibration
from dspec_lab.calibration.drafters import (
    CalibratedDrafter,
    ThresholdDrafter,
    dress_drafter,
    kept_length,
    refuse_other_drafter,
)
from dspec_lab.calibration.maps import EntropyMap, TemperatureMap
from dspec_lab.calibration.records import rounds_of_rows
from dspec_lab.calibration.sts import fit_temperatures
from dspec_lab.calibration.synthetic import synthetic_rounds
from dspec_lab.config import DecodeConfig
from dspec_lab.core.types import Proposal
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.enumerate import max_deviation, output_law
from dspec_lab.verifier.known_law import known_law
from dspec_lab.verifier.ragged import BatchRequest, generate_batch
from dspec_lab.verifier.tiny import NEURAL_DRAFTERS, tiny_decoder
from dspec_lab.verifier.trace import trace_rows

TARGET = TableTarget.random(2, order=2, sharpness=1.5, seed=4)
DRAFT = TableTarget.random(2, sharpness=1.5, seed=5)
# c_k by the token before k
AFTER = (0.9, 0.6)


class ConfidentDrafter(AutoregressiveDrafter):
    """States a confidence that depends on the token before, or, where it anticipates, on the token itself."""

    def __init__(self, model, *, anticipates=False, name="toy"):
        super().__init__(model, name=name)
        self.anticipates = anticipates

    def start(self, target, *, capacity):
        session = super().start(target, capacity=capacity)
        honest = session.propose

        def propose(gamma, sampling, draws):
            proposal = honest(gamma, sampling, draws)
            before = [session._tokens[-1], *proposal.token_ids]
            seen = proposal.token_ids if self.anticipates else before[: proposal.gamma]
            return replace(proposal, confidence_G=tuple(AFTER[token] for token in seen))

        session.propose = propose
        return session


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    rounds = synthetic_rounds(600, (2.0, 1.5, 1.2), seed=1, drafter="toy")
    return fit_calibration(rounds, resamples=100)


def gap(drafter, *, gamma=3, length=4, rule="token"):
    config = DecodeConfig(gamma=gamma, max_new_tokens=length, temperature=1.0, verification=rule)
    widths = set()

    def run(chooser):
        result = generate(TARGET, drafter, [0], config, chooser=chooser)
        widths.update(record.gamma for record in result.rounds)
        return tuple(result.token_ids)

    found = output_law(run)
    return max_deviation(found, known_law(TARGET, [0], length, config.sampling))[0], widths


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("threshold", [0.5, 0.7])
def test_a_threshold_keeps_the_law(threshold, rule):
    deviation, widths = gap(ThresholdDrafter(ConfidentDrafter(DRAFT), threshold), rule=rule)
    # some blocks are cut and others not, some to nothing
    assert deviation < 1e-12 and len(widths) >= 3


def test_a_threshold_that_cuts_everything_keeps_the_law():
    deviation, widths = gap(ThresholdDrafter(ConfidentDrafter(DRAFT), 0.95), length=3)
    assert deviation < 1e-12 and widths == {0}


def test_a_calibrated_cut_drafter_keeps_the_law(calibration):
    deviation, widths = gap(dress_drafter(ConfidentDrafter(DRAFT), calibration=calibration, threshold=0.3))
    assert deviation < 1e-12 and len(widths) >= 3


def test_cutting_by_a_confidence_that_saw_the_token_changes_the_law():
    deviation, _ = gap(ThresholdDrafter(ConfidentDrafter(DRAFT, anticipates=True), 0.7))
    assert deviation > 0.01


def test_a_neural_drafter_cut_by_its_own_confidences_keeps_the_law():
    target = tiny_decoder(3, seed=1)
    drafter = NEURAL_DRAFTERS["dspark"](target)
    seen = []
    config = DecodeConfig(gamma=2, max_new_tokens=3, temperature=1.0)
    probe = generate(target, drafter, [1, 2], DecodeConfig(gamma=2, max_new_tokens=12, temperature=1.0))
    first = sorted(record.confidence[0] for record in probe.rounds if record.gamma == 2)
    threshold = first[len(first) // 2]  # about half of the blocks are cut to nothing

    def run(chooser):
        result = generate(target, ThresholdDrafter(drafter, threshold), [1, 2], config, chooser=chooser)
        seen.extend(record.gamma for record in result.rounds)
        return tuple(result.token_ids)

    found = output_law(run)
    plain = output_law(lambda chooser: tuple(generate(target, None, [1, 2], config, chooser=chooser).token_ids))
    assert max_deviation(found, plain)[0] < 1e-5  # fp32 decoder: passes of other widths round differently
    assert {0, 1} & set(seen) and max(seen) >= 1


def test_the_threshold_is_on_survival_and_stops_at_the_first_low_one():
    assert [kept_length((0.9, 0.8, 0.9), t) for t in (0.0, 0.64, 0.7, 0.8, 0.95)] == [3, 3, 2, 1, 0]
    assert kept_length((0.4, 1.0), 0.5) == 0
    assert kept_length((), 0.5) == 0


def test_confidences_are_calibrated_and_tokens_untouched(calibration):
    config = DecodeConfig(gamma=3, max_new_tokens=12, temperature=1.0)
    plain = generate(TARGET, ConfidentDrafter(DRAFT), [0], config)
    drafter = CalibratedDrafter(ConfidentDrafter(DRAFT), calibration)
    seen = generate(TARGET, drafter, [0], config)
    assert seen.token_ids == plain.token_ids and drafter.name == "toy+sts"
    for raw, new in zip(plain.rounds, seen.rounds, strict=True):
        for k, (c, d) in enumerate(zip(raw.confidence, new.confidence, strict=True)):
            t = calibration.maps[k].temperature
            assert d == pytest.approx(c ** (1 / t) / (c ** (1 / t) + (1 - c) ** (1 / t)))


def test_a_batch_uses_the_same_view(calibration):
    target = tiny_decoder(5, seed=2)
    dspark = NEURAL_DRAFTERS["dspark"](target)
    mine = replace(calibration, provenance=replace(calibration.provenance, drafter="dspark"))
    drafter = dress_drafter(dspark, calibration=mine, threshold=0.3)
    config = DecodeConfig(gamma=3, max_new_tokens=8, temperature=1.0)
    wanted = [BatchRequest(request_id=str(i), prompt_ids=(i, 1), config=config, drafter=drafter) for i in range(3)]
    together = generate_batch(target, wanted)
    for i in range(3):
        alone = generate(target, drafter, [i, 1], config, request_id=str(i))
        assert together[str(i)].token_ids == alone.token_ids
        assert [r.confidence for r in together[str(i)].rounds] == [r.confidence for r in alone.rounds]


def test_a_cut_by_confidence_and_entropy_keeps_the_law(calibration):
    """The entropy is that of the law before the draw, so it may decide; the view gives what the maps give."""
    target = tiny_decoder(3, seed=1)
    dspark = NEURAL_DRAFTERS["dspark"](target)
    joint = replace(
        calibration,
        method="entropy",
        maps=(EntropyMap(1.0, 0.7, 0.5), EntropyMap(0.5, 0.2, 0.1)),
        provenance=replace(calibration.provenance, drafter="dspark"),
    )
    config = DecodeConfig(gamma=2, max_new_tokens=12, temperature=1.0)
    raw = generate(target, dspark, [1, 2], config, trace=True)
    seen = generate(target, CalibratedDrafter(dspark, joint), [1, 2], config, trace=True)
    for before, after in zip(raw.rounds, seen.rounds, strict=True):
        wanted = [
            joint.maps[k](np.array([c]), np.array([h])).item()
            for k, (c, h) in enumerate(zip(before.confidence, before.draft_entropy_bits, strict=True))
        ]
        assert after.confidence == pytest.approx(wanted, abs=1e-5) and after.draft_ids == before.draft_ids
    first = sorted(record.confidence[0] for record in seen.rounds if record.gamma == 2)
    widths = set()

    def run(chooser):
        drafter = dress_drafter(dspark, calibration=joint, threshold=first[len(first) // 2])
        result = generate(target, drafter, [1, 2], replace(config, max_new_tokens=3), chooser=chooser)
        widths.update(record.gamma for record in result.rounds)
        return tuple(result.token_ids)

    found = output_law(run)
    short = replace(config, max_new_tokens=3)
    plain = output_law(lambda chooser: tuple(generate(target, None, [1, 2], short, chooser=chooser).token_ids))
    assert max_deviation(found, plain)[0] < 1e-5 and len(widths) >= 2
    with pytest.raises(ValueError, match="the drafter gives no logits"):
        view = CalibratedDrafter(ConfidentDrafter(DRAFT), replace(joint, provenance=calibration.provenance))
        view._calibrated(Proposal((1,), confidence_G=(0.5,)))


def test_a_second_application_is_refused(calibration):
    once = CalibratedDrafter(ConfidentDrafter(DRAFT), calibration)
    for drafter in (once, ThresholdDrafter(once, 0.5), ThresholdDrafter(ConfidentDrafter(DRAFT), 0.5)):
        with pytest.raises(ValueError, match="calibrated or cut already"):
            CalibratedDrafter(drafter, calibration)
    # and so is a fit on traces of a calibrated drafter
    run = generate(TARGET, once, [0], DecodeConfig(gamma=3, max_new_tokens=40, temperature=1.0))
    rows = trace_rows(run, request_id="r", prompt_id="p", domain="d", drafter=once.name, temperature=1.0)
    with pytest.raises(ValueError, match="calibrated already"):
        fit_temperatures(rounds_of_rows(rows))


def test_another_drafter_or_other_weights_are_refused(calibration):
    with pytest.raises(ValueError, match="fitted for the drafter 'toy', not for 'other'"):
        CalibratedDrafter(ConfidentDrafter(DRAFT, name="other"), calibration)
    hashed = replace(calibration, provenance=replace(calibration.provenance, drafter_hash="a" * 64))
    with pytest.raises(ValueError, match=r"other weights than those of 'toy' \(sha256 aaaaaaaaaaaa, here bbbbbbbbbbbb"):
        CalibratedDrafter(ConfidentDrafter(DRAFT), hashed, drafter_hash="b" * 64)
    refuse_other_drafter(hashed, "any name", "a" * 64)


def test_what_cannot_work_is_told(calibration):
    with pytest.raises(ValueError, match="in 0..1, got 1.5"):
        ThresholdDrafter(ConfidentDrafter(DRAFT), 1.5)
    config = DecodeConfig(gamma=2, max_new_tokens=4, temperature=1.0)
    with pytest.raises(ValueError, match="no confidence head"):
        generate(TARGET, ThresholdDrafter(AutoregressiveDrafter(DRAFT), 0.5), [0], config)
    drafter = CalibratedDrafter(ConfidentDrafter(DRAFT), calibration)
    with pytest.raises(ValueError, match=r"toy\+sts drafts at most 3 tokens"):
        generate(TARGET, drafter, [0], DecodeConfig(gamma=4, max_new_tokens=9, temperature=1.0))
    short = replace(calibration, maps=(TemperatureMap(1.0),))
    assert CalibratedDrafter(ConfidentDrafter(DRAFT), short).max_gamma == 1
