"""Loss masks, hold-out, order of steps, and files of responses."""

from __future__ import annotations

import numpy as np
import pytest

from dspec_lab.training.data import (
    StepOrder,
    build_sequences,
    conversation,
    generation_prompt,
    held_out,
    token_counts,
)
from dspec_lab.training.responses import Response, count_tokens, read_responses, write_responses

USER, ASSISTANT, END, BREAK = 1, 3, 2, 4


class Template:
    """A chat template over letters: [1 text 2 4] for the user, [3 text 2 4] for the assistant."""

    eos_token_id = END

    def __init__(self, *, forgets: bool = False, prompts: bool = True):
        self.forgets, self.prompts = forgets, prompts

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict):
        ids = []
        for place, message in enumerate(messages):
            if self.forgets and message["role"] == "assistant" and place < len(messages) - 1:
                continue
            head = USER if message["role"] == "user" else ASSISTANT
            ids += [head, *(ord(letter) for letter in message["content"]), END, BREAK]
        return {"input_ids": ids + ([ASSISTANT] if add_generation_prompt and self.prompts else [])}


def response(prompt, answer, domain="math", temperature=0.0):
    return Response(domain, "test", temperature, np.array(prompt, dtype=np.int32), np.array(answer, dtype=np.int32))


def test_the_mask_covers_replies_and_their_end_tokens_only():
    ids, mask = conversation(Template(), ["ab", "c"], ["de", "f"])
    marked = [token for token, on in zip(ids, mask, strict=True) if on]
    assert marked == [ord("d"), ord("e"), END, ord("f"), END]
    assert ids[mask.index(True) - 1] == ASSISTANT, "the mask must begin right behind the generation prompt"


def test_a_template_that_rewrites_the_past_is_refused():
    with pytest.raises(ValueError, match="changes earlier text"):
        conversation(Template(forgets=True), ["ab", "c"], ["de", "f"])
    with pytest.raises(ValueError, match="no generation prompt"):
        generation_prompt(Template(prompts=False))
    with pytest.raises(ValueError, match="2 turns"):
        conversation(Template(), ["a", "b"], ["c"])


def test_prompts_must_end_where_the_assistant_begins():
    ending = generation_prompt(Template())
    assert ending == (ASSISTANT,)
    good = response([USER, 9, END, BREAK, ASSISTANT], [7, 8, END])
    part = build_sequences([good], max_tokens=20, vocab_size=10, ends_prompt=ending)
    assert part.sequences[0].num_prompt == 5
    shifted = response([USER, 9, END, BREAK, ASSISTANT, 7], [8, END])
    with pytest.raises(ValueError, match="row 1 of answers.*generation prompt"):
        build_sequences([good, shifted], max_tokens=20, vocab_size=10, ends_prompt=ending, name="answers")


@pytest.mark.parametrize(("prompt", "answer", "what"), [([5, 6], [], "empty"), ([], [5, 6], "full")])
def test_an_empty_or_full_mask_stops_the_run(prompt, answer, what):
    with pytest.raises(ValueError, match=f"row 0.*{what}"):
        build_sequences([response(prompt, answer)], max_tokens=20, vocab_size=10)


def test_long_sequences_are_cut_and_short_answers_left_out():
    rows = [response([5, 6, 7], [8] * 9), response([5, 6], [8]), response([5] * 9, [8, 8, 8])]
    part = build_sequences(rows, max_tokens=8, vocab_size=10)
    assert [sequence.num_tokens for sequence in part.sequences] == [8]
    assert part.num_short == 2 and part.num_cut == 2
    with pytest.raises(ValueError, match="no response has two tokens"):
        build_sequences(rows[1:2], max_tokens=8, vocab_size=10)
    with pytest.raises(ValueError, match="token id 12"):
        build_sequences([response([5], [12, 3])], max_tokens=8, vocab_size=10)


def test_hold_out_is_by_prompt_and_about_the_share():
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50, size=(600, 6))
    sides = {}
    for row in range(600):
        for answer in ([1, 2, 3], [4, 5, 6]):
            part = build_sequences([response(prompts[row], answer)], max_tokens=20, vocab_size=50)
            sides.setdefault(row, set()).add(held_out(part.sequences[0], 0.25))
    assert all(len(side) == 1 for side in sides.values())
    assert 0.18 < np.mean([True in side for side in sides.values()]) < 0.32
    assert not held_out(part.sequences[0], 0.0)


def test_each_epoch_visits_every_sequence_once_in_a_new_order():
    order = StepOrder(list(range(10, 50)), 4, seed=7)
    assert order.steps_per_epoch == 10
    first = [order.step(i) for i in range(10)]
    second = [order.step(i) for i in range(10, 20)]
    assert sorted(sum(first, [])) == list(range(40)) == sorted(sum(second, []))
    assert first != second
    again = StepOrder(list(range(10, 50)), 4, seed=7)
    assert again.step(13) == second[3], "the order must not depend on what was asked before"
    assert StepOrder(list(range(10, 50)), 4, seed=8).step(0) != first[0]
    later = StepOrder(list(range(10, 50)), 4, seed=7, first=7)
    assert [later.step(i) for i in range(5)] == first[7:] + second[:2], "a later stage goes on in the same order"
    with pytest.raises(ValueError, match="3 training sequences"):
        StepOrder([5, 5, 5], 4, seed=0)


def test_sequences_of_a_step_have_similar_lengths():
    lengths = np.random.default_rng(1).integers(10, 500, size=640)
    order = StepOrder(lengths.tolist(), 4, seed=0)
    spread = [np.ptp(lengths[order.step(i)]) for i in range(order.steps_per_epoch)]
    assert np.mean(spread) < 60 < np.ptp(lengths)


def test_responses_survive_the_file(tmp_path):
    rows = [response([5, 6, 7], [8, 9], "code", 0.7), response([1], [2])]
    path = write_responses(tmp_path / "r.parquet", rows, vocab_size=70000)
    back = read_responses(path)
    assert [(r.domain, round(r.temperature, 4), r.prompt_ids.tolist(), r.response_ids.tolist()) for r in back] == [
        ("code", 0.7, [5, 6, 7], [8, 9]),
        ("math", 0.0, [1], [2]),
    ]
    assert count_tokens(back) == {"code": 2, "math": 1}
    assert token_counts(build_sequences(back, max_tokens=9, vocab_size=20).sequences, 20)[8] == 1
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ValueError, match="bad.parquet is not a Parquet file"):
        read_responses(tmp_path / "bad.parquet")
    with pytest.raises(FileNotFoundError, match="nothing.parquet"):
        read_responses(tmp_path / "nothing.parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"domain": ["x"]}), tmp_path / "few.parquet")
    with pytest.raises(ValueError, match="no column source, temperature"):
        read_responses(tmp_path / "few.parquet")
