"""The gain of block verification: worked by hand, and equal to what the verifier itself does on every path."""

from __future__ import annotations

import pytest
import torch

from dspec_lab.config import SamplingConfig
from dspec_lab.core.rejection import verify
from dspec_lab.core.sampling import law
from dspec_lab.core.streams import Chooser, DraftDraws
from dspec_lab.core.types import Proposal
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.enumerate import output_law
from dspec_lab.verifier.rule_gain import rule_gain

PLAIN = SamplingConfig(temperature=1.0)


def committed(
    chooser: Chooser, target: TableTarget, draft: TableTarget, gamma: int, sampling: SamplingConfig, rule: str
) -> int:
    """Tokens of one round of the real verifier."""
    draws, ids, rows = DraftDraws(chooser, 0), [0], []
    for k in range(gamma):
        rows.append(law(draft.logits_after(ids)[None], sampling)[0])
        ids.append(draws.categorical(k, rows[-1]))
    target_JV = law(torch.stack([target.logits_after(ids[: j + 1]) for j in range(gamma + 1)]), sampling)
    proposal = Proposal(tuple(ids[1:]), torch.stack(rows))
    return verify(target_JV, proposal, chooser, 0, rule).num_accepted + 1


def test_two_positions_worked_by_hand() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3): 10/9, 11/9 and at most 12/9 drafts are kept."""
    target = TableTarget(torch.tensor([[1, 2], [1, 2]], dtype=torch.float64) / 3)
    draft = TableTarget(torch.tensor([[2, 1], [2, 1]], dtype=torch.float64) / 3)
    gain = rule_gain(target, draft, [0], 2, PLAIN)
    assert (gain.token, gain.block, gain.bound) == pytest.approx((19 / 9, 20 / 9, 21 / 9), abs=1e-14)
    assert gain.share == pytest.approx(1 / 19, abs=1e-14)
    # with one draft there is nothing to share between positions
    alone = rule_gain(target, draft, [0], 1, PLAIN)
    assert alone.token == alone.block == alone.bound


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sampling", [PLAIN, SamplingConfig(temperature=0.7, top_k=2)], ids=["T=1", "T=0.7 top-k 2"])
def test_the_sums_are_what_the_verifier_does(seed: int, sampling: SamplingConfig) -> None:
    target = TableTarget.random(3, order=2, sharpness=1.5, seed=seed)
    draft = TableTarget.random(3, order=1, sharpness=1.5, seed=seed + 100)
    gain = rule_gain(target, draft, [0], 2, sampling)
    for rule, wanted in (("token", gain.token), ("block", gain.block)):
        found = output_law(lambda chooser, r=rule: committed(chooser, target, draft, 2, sampling, r))
        assert sum(count * chance for count, chance in found.items()) == pytest.approx(wanted, abs=1e-12)
    assert gain.token <= gain.block + 1e-12 and gain.block <= gain.bound + 1e-12


def test_block_verification_gains_more_the_longer_the_block() -> None:
    target, draft = TableTarget.random(3, order=2, seed=1), TableTarget.random(3, seed=2)
    shares = [rule_gain(target, draft, [0], gamma, PLAIN).share for gamma in (1, 2, 4, 6)]
    assert shares[0] == pytest.approx(0, abs=1e-15)
    assert shares == sorted(shares) and shares[-1] > 0.01


def test_equal_laws_gain_nothing_and_keep_everything() -> None:
    same = TableTarget.random(3, seed=5)
    gain = rule_gain(same, same, [0], 3, PLAIN)
    assert (gain.token, gain.block, gain.bound) == pytest.approx((4, 4, 4), abs=1e-12)


def test_bad_input_is_named() -> None:
    table, other = TableTarget.random(3), TableTarget.random(4)
    with pytest.raises(ValueError, match="gamma must be at least 1, got 0"):
        rule_gain(table, table, [0], 0, PLAIN)
    with pytest.raises(ValueError, match=r"temperature 0\.0"):
        rule_gain(table, table, [0], 2, SamplingConfig(temperature=0.0))
    with pytest.raises(ValueError, match="3 and 4 tokens"):
        rule_gain(table, other, [0], 2, PLAIN)
