"""End tokens, stop strings and length caps, in the middle of a block too: what is kept, why, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dspec_lab.config import DecodeConfig
from dspec_lab.core.types import Generation
from dspec_lab.drafters.autoregressive import AutoregressiveDrafter
from dspec_lab.drafters.prompt_lookup import PromptLookupDrafter
from dspec_lab.models.toy import TableTarget
from dspec_lab.verifier.decode import generate
from dspec_lab.verifier.stopping import Ending, find_ending

VOCAB = 8
GAMMAS = (1, 2, 3, 5, 9)


class Pieces:
    """Spells token t as `pieces[t]`, bytes that need not be whole characters."""

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        return b"".join(self._pieces[token] for token in token_ids).decode(errors="replace")


def chain(steps: dict[int, int] | None = None, eos_ids: Sequence[int] = ()) -> TableTarget:
    """After token t comes t + 1 (mod 8), except where `steps` says otherwise."""
    probs = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for token in range(VOCAB):
        probs[token, (steps or {}).get(token, (token + 1) % VOCAB)] = 1
    return TableTarget(probs, eos_ids=eos_ids)


RIGHT = AutoregressiveDrafter(chain())
OFTEN_WRONG = AutoregressiveDrafter(chain({2: 7, 3: 3, 6: 1}))


def check_counts(result: Generation, config: DecodeConfig) -> None:
    """What must hold of any generation."""
    assert len(result.token_ids) <= config.max_new_tokens
    assert len(result.sources) == len(result.token_ids)
    assert result.num_committed == max(0, len(result.token_ids) - 1)
    assert result.sources.count("draft") == result.num_accepted
    assert all(source == "prefill" for source in result.sources[:1])
    assert "prefill" not in result.sources[1:]
    at = 1
    for record in result.rounds:
        assert 0 <= record.num_accepted <= record.gamma == len(record.draft_ids)
        mine = result.token_ids[at : at + record.num_committed]
        assert tuple(mine[: record.num_accepted]) == record.draft_ids[: record.num_accepted]
        assert record.num_committed - record.num_accepted in (0, 1)
        at += record.num_committed
    assert at >= len(result.token_ids)


def run(
    drafter: object, config: DecodeConfig, *, eos_ids: Sequence[int] = (), pieces: Sequence[str | bytes] | None = None
) -> Generation:
    tokenizer = None if pieces is None else Pieces(pieces)
    result = generate(chain(eos_ids=eos_ids), drafter, [0], config, tokenizer=tokenizer)  # type: ignore[arg-type]
    check_counts(result, config)
    return result


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("drafter", [RIGHT, OFTEN_WRONG], ids=["right", "often wrong"])
def test_an_end_token_in_a_block_is_the_last_token(drafter: object, gamma: int) -> None:
    result = run(drafter, DecodeConfig(gamma=gamma, max_new_tokens=40), eos_ids=(5,))
    assert result.token_ids == [1, 2, 3, 4, 5]
    assert result.finish_reason == "stop"


def test_what_lies_behind_an_accepted_end_token_is_not_counted() -> None:
    result = run(RIGHT, DecodeConfig(gamma=9, max_new_tokens=40), eos_ids=(5,))
    (record,) = result.rounds
    assert (record.gamma, record.num_accepted, record.num_committed) == (4, 4, 4)
    assert record.draft_ids == (2, 3, 4, 5) and record.next_token == 5
    assert result.sources == ["prefill", "draft", "draft", "draft", "draft"]


def test_an_end_token_from_the_target_itself_ends_too() -> None:
    # the draft is wrong just where the end token comes
    wrong_at_4 = AutoregressiveDrafter(chain({4: 0}))
    result = run(wrong_at_4, DecodeConfig(gamma=9, max_new_tokens=40), eos_ids=(5,))
    assert result.token_ids == [1, 2, 3, 4, 5] and result.sources[-1] == "replacement"
    assert result.rounds[0].gamma == 9 and result.rounds[0].num_accepted == 3
    # and as a bonus
    result = run(RIGHT, DecodeConfig(gamma=3, max_new_tokens=40), eos_ids=(5,))
    assert result.sources[-1] == "bonus"


def test_the_prefills_token_may_end_it_all() -> None:
    result = run(RIGHT, DecodeConfig(gamma=4), eos_ids=(1,))
    assert (result.token_ids, result.finish_reason, result.rounds) == ([1], "stop", [])
    result = run(RIGHT, DecodeConfig(gamma=4, max_new_tokens=1))
    assert (result.token_ids, result.finish_reason, result.rounds) == ([1], "length", [])


def test_ignored_end_tokens_do_not_end() -> None:
    result = run(RIGHT, DecodeConfig(gamma=3, max_new_tokens=12, ignore_eos=True), eos_ids=(5,))
    assert len(result.token_ids) == 12 and result.finish_reason == "length"


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("cap", range(1, 12))
def test_the_length_cap_cuts_inside_a_block(gamma: int, cap: int) -> None:
    result = run(RIGHT, DecodeConfig(gamma=gamma, max_new_tokens=cap))
    assert result.token_ids == [(1 + i) % VOCAB for i in range(cap)]
    assert result.finish_reason == "length"
    # no draft is made that could not be kept
    assert result.num_proposed == result.num_accepted <= max(0, cap - 1)


def test_a_stop_comes_before_the_cap_at_the_same_token_and_the_earlier_of_two_wins() -> None:
    for gamma in GAMMAS:
        at_cap = run(RIGHT, DecodeConfig(gamma=gamma, max_new_tokens=5), eos_ids=(5,))
        assert (len(at_cap.token_ids), at_cap.finish_reason) == (5, "stop")
        before = run(RIGHT, DecodeConfig(gamma=gamma, max_new_tokens=4), eos_ids=(5,))
        assert (len(before.token_ids), before.finish_reason) == (4, "length")
        two = run(RIGHT, DecodeConfig(gamma=gamma, max_new_tokens=40), eos_ids=(5, 3))
        assert two.token_ids == [1, 2, 3]


LETTERS = ["a", "b", "c", "d", "e", "f", "g", "h"]


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("drafter", [None, RIGHT, OFTEN_WRONG], ids=["plain", "right", "often wrong"])
@pytest.mark.parametrize(
    ("stop", "text", "ids"),
    [
        (("e",), "bcd", [1, 2, 3]),  # one token
        (("def",), "bc", [1, 2]),  # over three tokens, and over rounds
        (("fg", "efgh"), "bcde", [1, 2, 3, 4]),  # the one completed first, not the one that starts first
        (("ghab",), "bcdef", [1, 2, 3, 4, 5]),  # the chain wraps round
        (("bc",), "", []),  # starts at the very first token
    ],
)
def test_stop_strings_across_tokens_and_blocks(
    stop: tuple[str, ...], text: str, ids: list[int], drafter: object, gamma: int
) -> None:
    result = (
        run(drafter, DecodeConfig(gamma=gamma, max_new_tokens=30, stop_strings=stop), pieces=LETTERS)
        if drafter
        else generate(chain(), None, [0], DecodeConfig(max_new_tokens=30, stop_strings=stop), tokenizer=Pieces(LETTERS))
    )
    assert (result.text, result.token_ids, result.finish_reason) == (text, ids, "stop")


def test_a_stop_string_inside_a_token_keeps_the_token_whose_start_is_text() -> None:
    pieces = ["a", "b", "c", "d.e", "f", "g", "h", "i"]
    result = run(RIGHT, DecodeConfig(gamma=3, max_new_tokens=30, stop_strings=(".",)), pieces=pieces)
    assert result.text == "bcd"
    assert result.token_ids == [1, 2, 3]


def test_half_a_character_is_not_text() -> None:
    # the character is spelled by two tokens; after one of them the text has the same length but is not the same
    first, second = "é".encode()[:1], "é".encode()[1:]
    pieces: list[str | bytes] = ["a", "b", first, second, "!", "f", "g", "h"]
    result = run(RIGHT, DecodeConfig(gamma=4, max_new_tokens=30, stop_strings=("!",)), pieces=pieces)
    assert result.text == "bé"
    assert result.token_ids == [1, 2, 3]


def test_end_token_stop_string_and_cap_by_position() -> None:
    for gamma in GAMMAS:
        config = DecodeConfig(gamma=gamma, max_new_tokens=6, stop_strings=("de",))
        stopped = run(RIGHT, config, eos_ids=(5,), pieces=LETTERS)
        assert (stopped.text, stopped.finish_reason) == ("bc", "stop")
        # the end token comes before the stop string is whole: it is kept, and so is the text
        ended = run(RIGHT, config, eos_ids=(3,), pieces=LETTERS)
        assert (ended.text, ended.token_ids, ended.finish_reason) == ("bcd", [1, 2, 3], "stop")
        capped = run(RIGHT, DecodeConfig(gamma=gamma, max_new_tokens=3, stop_strings=("de",)), pieces=LETTERS)
        assert (capped.text, capped.finish_reason) == ("bcd", "length")
        # whole at the very token of the cap
        both = run(RIGHT, DecodeConfig(gamma=gamma, max_new_tokens=4, stop_strings=("de",)), pieces=LETTERS)
        assert (both.text, both.finish_reason) == ("bc", "stop")


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        generate(chain(), RIGHT, [0], DecodeConfig(stop_strings=("x",)))


def test_find_ending_looks_at_fresh_tokens_only() -> None:
    assert find_ending([1, 5, 2], 1, eos_ids={5}, max_new_tokens=9) is None
    assert find_ending([1, 5, 2], 2, eos_ids={5}, max_new_tokens=9) == Ending(2, "stop")
    assert find_ending([1, 2, 3], 1, eos_ids=set(), max_new_tokens=3) == Ending(3, "length")


@pytest.mark.parametrize("verification", ["token", "block"])
def test_greedy_text_is_the_same_for_every_gamma_and_drafter(verification: str) -> None:
    target = TableTarget.random(7, order=2, seed=4, eos_ids=(6,))
    drafters = [
        AutoregressiveDrafter(TableTarget.random(7, seed=5)),
        AutoregressiveDrafter(target),
        PromptLookupDrafter(),
    ]
    for prompt in ([0], [1, 2, 1, 2], [3, 5]):
        plain = generate(target, None, prompt, DecodeConfig(max_new_tokens=30)).token_ids
        for gamma in GAMMAS:
            config = DecodeConfig(gamma=gamma, max_new_tokens=30, verification=verification)  # type: ignore[arg-type]
            for drafter in drafters:
                result = generate(target, drafter, prompt, config)
                check_counts(result, config)
                assert result.token_ids == plain


@pytest.mark.parametrize("verification", ["token", "block"])
def test_counts_of_sampled_generations_with_every_kind_of_end(verification: str) -> None:
    target = TableTarget.random(6, order=2, seed=1, eos_ids=(5,))
    drafter, tokenizer = AutoregressiveDrafter(TableTarget.random(6, seed=2)), Pieces(["a", "b", "ab", "", "ba", "."])
    reasons = set()
    for seed in range(60):
        config = DecodeConfig(
            gamma=1 + seed % 4, temperature=1.0, max_new_tokens=1 + seed % 13, seed=seed,
            verification=verification, stop_strings=("abab",),  # type: ignore[arg-type]
        )  # fmt: skip
        result = generate(target, drafter, [1, 2], config, tokenizer=tokenizer)
        check_counts(result, config)
        assert "abab" not in (result.text or "")
        reasons.add((result.finish_reason, bool(result.token_ids) and result.token_ids[-1] == 5))
    assert reasons == {("stop", True), ("stop", False), ("length", False)}


def test_a_cut_over_several_rounds_takes_their_counts_along() -> None:
    # gamma 1 gains two tokens a round; the stop string reaches back over three of them
    config = DecodeConfig(gamma=1, max_new_tokens=30, stop_strings=("cdefgh",))
    result = run(RIGHT, config, pieces=LETTERS)
    assert result.text == "b" and result.token_ids == [1]
    assert [record.num_committed for record in result.rounds] == [0] * len(result.rounds)
    assert result.num_accepted == 0 and len(result.rounds) == 3


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_callback_sees_each_token_once_and_in_order(gamma: int) -> None:
    seen: list[int] = []
    sources: list[str] = []
    calls: list[Sequence[int]] = []

    def on_tokens(tokens: Sequence[int], kinds: Sequence[str]) -> None:
        assert len(tokens) == len(kinds) > 0
        calls.append(tokens)
        seen.extend(tokens)
        sources.extend(kinds)

    result = generate(
        chain(eos_ids=(5,)), OFTEN_WRONG, [6], DecodeConfig(gamma=gamma, max_new_tokens=20), on_tokens=on_tokens
    )
    assert seen == result.token_ids == [7, 0, 1, 2, 3, 4, 5]
    assert sources == result.sources
    # what was handed over is the callback's to keep
    assert sum(map(len, calls)) == len(seen)
    assert len(calls) == 1 + len(result.rounds)


def test_the_callback_gets_no_token_behind_a_stop() -> None:
    seen: list[int] = []
    config = DecodeConfig(gamma=5, max_new_tokens=30, stop_strings=("e",))
    result = generate(
        chain(), RIGHT, [0], config, tokenizer=Pieces(LETTERS), on_tokens=lambda tokens, _: seen.extend(tokens)
    )
    assert seen == result.token_ids == [1, 2, 3]
