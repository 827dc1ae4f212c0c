"""Sequences with loss masks, the hold-out by prompt, and the order in which training visits them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspec_lab.training.responses import Response

# sequences of one step have similar lengths: a step is cut from a run of this many steps' sequences, sorted by length
STEPS_SORTED = 16


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """Prompt and response of one conversation. The response's tokens are the trainable ones."""

    ids_T: np.ndarray  # int32
    num_prompt: int
    domain: str
    temperature: float
    row: int  # rank in its file of responses

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @property
    def num_response(self) -> int:
        return len(self.ids_T) - self.num_prompt


@dataclass(frozen=True, slots=True)
class SequenceSet:
    """The usable sequences of one file of responses."""

    sequences: tuple[TrainSequence, ...]
    num_short: int  # left out: fewer than two response tokens, so nothing could be drafted
    num_cut: int  # longer than max_tokens, cut


def generation_prompt(tokenizer: object) -> tuple[int, ...]:
    """The ids that the chat template puts before an assistant's answer."""
    turn = [{"role": "user", "content": "x"}]
    with_prompt = _template_ids(tokenizer, turn, True)
    without = _template_ids(tokenizer, turn, False)
    if with_prompt[: len(without)] != without or len(with_prompt) == len(without):
        raise ValueError("the chat template adds no generation prompt, so responses cannot be told from prompts")
    return tuple(with_prompt[len(without) :])


def conversation(tokenizer: object, turns: Sequence[str], replies: Sequence[str]) -> tuple[list[int], list[bool]]:
    """(ids, loss mask) of a conversation whose replies are known: true for the tokens of each reply and its end token.

    The mask comes from the chat template: a reply is what follows the template's generation prompt. A template that
    rewrites earlier turns raises `ValueError`, for then no mask would be right.
    """
    if len(replies) != len(turns) or not turns:
        raise ValueError(f"{len(turns)} turns need as many replies, got {len(replies)}")
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    mask: list[bool] = []
    for turn, reply in zip(turns, replies, strict=True):
        messages.append({"role": "user", "content": turn})
        head = _template_ids(tokenizer, messages, True)
        messages.append({"role": "assistant", "content": reply})
        whole = _template_ids(tokenizer, messages, False)
        if head[: len(ids)] != ids or whole[: len(head)] != head:
            raise ValueError("the chat template changes earlier text when a turn is added; no loss mask can be made")
        end = len(whole)
        # what the template writes after the end token (a line break) is not the model's
        eos = getattr(tokenizer, "eos_token_id", None)
        if eos in whole[len(head) :]:
            end = len(head) + whole[len(head) :].index(eos) + 1
        mask += [False] * (len(head) - len(ids)) + [True] * (end - len(head)) + [False] * (len(whole) - end)
        ids = whole
    check_mask(np.array(mask), "the conversation")
    return ids, mask


def check_mask(mask_T: np.ndarray, what: str) -> None:
    """Raise `ValueError` for a loss mask without trainable tokens, or with nothing but them."""
    if not mask_T.any():
        raise ValueError(f"the loss mask of {what} is empty: no token would be trained on")
    if mask_T.all():
        raise ValueError(f"the loss mask of {what} is full: prompt tokens would be trained on")


def build_sequences(
    responses: Sequence[Response], *, max_tokens: int, vocab_size: int, ends_prompt: Sequence[int] = (), name: str = ""
) -> SequenceSet:
    """Sequences of at most `max_tokens` tokens. `ends_prompt` are the ids that every prompt must end in.

    An empty or full loss mask, an id outside the vocabulary, or a prompt that does not end where the assistant begins
    raises `ValueError` that names the row.
    """
    kept, num_short, num_cut = [], 0, 0
    ending = np.array(ends_prompt, dtype=np.int32)
    for row, response in enumerate(responses):
        what = f"row {row} of {name or 'the responses'}"
        ids_T = np.concatenate([response.prompt_ids, response.response_ids]).astype(np.int32)
        num_prompt = len(response.prompt_ids)
        check_mask(np.arange(len(ids_T)) >= num_prompt, what)
        if len(ending) and not np.array_equal(ids_T[max(num_prompt - len(ending), 0) : num_prompt], ending):
            raise ValueError(f"the prompt of {what} does not end in the chat template's generation prompt")
        if ids_T.min() < 0 or ids_T.max() >= vocab_size:
            raise ValueError(f"{what} holds the token id {ids_T.max()}, the vocabulary has {vocab_size}")
        num_cut += len(ids_T) > max_tokens
        ids_T = ids_T[:max_tokens]
        if len(ids_T) - num_prompt < 2:
            num_short += 1
            continue
        kept.append(TrainSequence(ids_T, num_prompt, response.domain, response.temperature, row))
    if not kept:
        raise ValueError(f"{name or 'the responses'}: no response has two tokens within {max_tokens}")
    return SequenceSet(tuple(kept), num_short, num_cut)


def held_out(sequence: TrainSequence, share: float) -> bool:
    """Whether the sequence's prompt belongs to the validation share. All answers to a prompt fall on the same side."""
    digest = hashlib.blake2b(sequence.ids_T[: sequence.num_prompt].tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def token_counts(sequences: Sequence[TrainSequence], vocab_size: int, *, prompts: bool = False) -> np.ndarray:
    """How often each token id occurs in responses (with `prompts`: in whole sequences)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sequence in sequences:
        counts += np.bincount(sequence.ids_T[0 if prompts else sequence.num_prompt :], minlength=vocab_size)
    return counts


class StepOrder:
    """Which sequences each optimiser step sees: a function of the seed and the step, so a resumed run goes on alike.

    Every epoch visits the sequences in a new order. Those of one step have similar lengths; a remainder smaller than
    a step is left for the next epoch. `first` steps of the order are left out, as passed in an earlier run.
    """

    def __init__(self, lengths: Sequence[int], per_step: int, seed: int, first: int = 0) -> None:
        if len(lengths) < per_step:
            raise ValueError(f"{len(lengths)} training sequences are too few for steps of {per_step}")
        self._lengths, self._per_step, self._seed, self._first = np.asarray(lengths), per_step, seed, first
        self.steps_per_epoch = len(lengths) // per_step
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])

    def step(self, index: int) -> list[int]:
        """Sequence numbers of optimiser step `index`, from 0."""
        epoch, within = divmod(self._first + index, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, list(self._steps_of(epoch)))
        return self._epoch[1][within].tolist()

    def _steps_of(self, epoch: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._lengths))[: self.steps_per_epoch * self._per_step]
        window = STEPS_SORTED * self._per_step
        steps = []
        for start in range(0, len(order), window):
            part = order[start : start + window]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            steps += [part[i : i + self._per_step] for i in range(0, len(part), self._per_step)]
        return (steps[i] for i in rng.permutation(len(steps)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one micro-batch, padded to the longest, with what the target made of them."""

    input_ids_BT: Tensor
    loss_mask_BT: Tensor
    lengths_B: Tensor
    tapped_BTF: Tensor | None
    last_BTD: Tensor
    lse_BT: Tensor  # log-sum-exp of the target's logits; 0 in prompts and padding
    top_BTX: Tensor  # ids of the target's most likely next tokens; -1 in prompts and padding

    def to(self, device: torch.device) -> Batch:
        """The same on `device`."""
        moved = {name: getattr(self, name) for name in Batch.__dataclass_fields__}
        return Batch(**{name: None if tensor is None else tensor.to(device) for name, tensor in moved.items()})


def _template_ids(tokenizer: object, messages: list[dict[str, str]], add_prompt: bool) -> list[int]:
    encoded = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        messages, add_generation_prompt=add_prompt, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])
