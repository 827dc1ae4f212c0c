"""Answers of the target to many prompts at once: a batch whose free places are filled as answers end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspec_lab.core.streams import RandomStreams
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.batch_rows import BatchDecoder
from dspec_lab.training.target_reader import NUM_TOP, SequenceFeatures, TargetReader

# prompts that enter the batch together are padded to the longest of them
MOST_PADDING = 1.5
MOST_TOGETHER = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to be answered. `request_id` names its random numbers, which do not depend on the batch."""

    request_id: str
    prompt_ids: tuple[int, ...]
    temperature: float  # 0 is greedy

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.request_id} has an empty prompt")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature} for request {self.request_id}")


class BatchSampler:
    """Samples answers in a batch of `num_slots` sequences.

    With a `reader`, the target's features of each finished sequence are collected on the way: they cost nothing but
    memory, since the target sees every token anyway. Hidden states are then rounded to bf16 before the output head,
    so that the laws that were sampled are those that the features give back.
    """

    def __init__(
        self,
        target: LeanDecoder,
        *,
        num_slots: int = 64,
        max_prompt: int = 512,
        max_new_tokens: int = 256,
        seed: int = 0,
        reader: TargetReader | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self.max_prompt, self.max_new_tokens, self._seed = max_prompt, max_new_tokens, seed
        self._end_ids = target.eos_ids
        self._batch = BatchDecoder(
            target, num_slots, max_prompt + max_new_tokens, None if reader is None else reader.taps
        )
        self._device = target.device
        self._records = reader is not None
        self._features: dict[int, SequenceFeatures] = {}

    def run(
        self, requests: Sequence[Request], on_tokens: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, list[int]]]:
        """(number of the request, its answer) as answers end. `on_tokens` hears how many tokens each pass gave.

        An answer ends with an end token, or after `max_new_tokens`. Prompts that are too long raise `ValueError`.
        """
        for request in requests:
            if len(request.prompt_ids) > self.max_prompt:
                raise ValueError(
                    f"the prompt of request {request.request_id} has {len(request.prompt_ids)} tokens, at most "
                    f"{self.max_prompt} fit"
                )
        # prompts of similar length enter together
        waiting = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids), reverse=True)
        active: list[_Answer] = []
        slots = self._batch.num_slots
        # free places are filled in groups: a prefill of few prompts is slow
        group = max(slots // 8, 1)
        report = on_tokens or (lambda _count: None)
        while waiting or active:
            if waiting and (slots - len(active) >= group or not active):
                entering = [waiting.pop() for _ in range(min(slots - len(active), len(waiting)))]
                active += self._enter(requests, entering, first_slot=len(active))
                report(len(entering))
            yield from self._retire(active)
            if not active:
                continue
            slots_X = torch.arange(len(active), device=self._device)
            ids_X = torch.tensor([answer.token_ids[-1] for answer in active], device=self._device)
            place_X = torch.tensor([answer.length for answer in active], device=self._device)
            hidden_XD, tapped_XF = self._batch.step(slots_X, ids_X, place_X)
            report(self._extend(active, hidden_XD, tapped_XF))
            yield from self._retire(active)

    def take_features(self, number: int) -> SequenceFeatures:
        """Features of the sequence that `run` has just yielded; they are given once."""
        return self._features.pop(number)

    def _enter(self, requests: Sequence[Request], numbers: list[int], first_slot: int) -> list[_Answer]:
        answers: list[_Answer] = []
        while numbers:
            shortest = len(requests[numbers[0]].prompt_ids)
            fits = [n for n in numbers[:MOST_TOGETHER] if len(requests[n].prompt_ids) <= MOST_PADDING * shortest + 8]
            numbers = [n for n in numbers if n not in fits]
            fresh = [_Answer(n, requests[n], self._seed) for n in fits]
            lengths = [len(answer.request.prompt_ids) for answer in fresh]
            ids_XT = torch.zeros(len(fits), max(lengths), dtype=torch.int64)
            for row, answer in enumerate(fresh):
                ids_XT[row, : lengths[row]] = torch.tensor(answer.request.prompt_ids)
            start = first_slot + len(answers)
            slots_X = torch.arange(start, start + len(fits), device=self._device)
            hidden_XTD, tapped_XTF = self._batch.prefill(slots_X, ids_XT.to(self._device))
            last_X = torch.tensor(lengths, device=self._device) - 1
            rows_X = torch.arange(len(fits), device=self._device)
            if self._records:
                for row, answer in enumerate(fresh):
                    kept = slice(0, lengths[row] - 1)
                    answer.keep(hidden_XTD[row, kept], None if tapped_XTF is None else tapped_XTF[row, kept])
            tapped_XF = None if tapped_XTF is None else tapped_XTF[rows_X, last_X]
            self._extend(fresh, hidden_XTD[rows_X, last_X], tapped_XF, new=True)
            answers += fresh
        return answers

    def _extend(
        self, answers: Sequence[_Answer], hidden_XD: Tensor, tapped_XF: Tensor | None, *, new: bool = False
    ) -> int:
        """Give each answer that goes on its next token; the number of tokens given."""
        if self._records:
            hidden_XD = hidden_XD.to(torch.bfloat16).float()
        logits_XV = self._batch.logits(hidden_XD)
        if self._records:
            lse_X, top_XX = logits_XV.logsumexp(-1), logits_XV.topk(NUM_TOP, dim=-1).indices.int()
            low_XD = hidden_XD.to(torch.bfloat16)
            low_XF = None if tapped_XF is None else tapped_XF.to(torch.bfloat16)
            for row, answer in enumerate(answers):
                part = slice(row, row + 1)
                answer.keep(low_XD[part], None if low_XF is None else low_XF[part], lse_X[part], top_XX[part])
        given = 0
        for answer, token in zip(answers, draw(logits_XV, answers), strict=True):
            if not new:
                answer.length += 1
            if answer.closing:
                answer.complete = True
            else:
                answer.token_ids.append(token)
                given += 1
        return given

    def _retire(self, active: list[_Answer]) -> Iterator[tuple[int, list[int]]]:
        at = 0
        while at < len(active):
            answer = active[at]
            ended = answer.token_ids[-1] in self._end_ids or len(answer.token_ids) >= self.max_new_tokens
            if ended and self._records and not answer.complete:
                # one more pass: the last token's own features
                answer.closing, ended = True, False
            if not ended:
                at += 1
                continue
            if self._records:
                self._features[answer.number] = answer.features()
            last = active.pop()
            if last is not answer:
                # active answers keep to the first slots
                self._batch.cache.move(len(active), at)
                active[at] = last
            yield answer.number, answer.token_ids


class _Answer:
    """An answer in the making: its tokens, how many tokens its cache slot holds, and features as they come."""

    def __init__(self, number: int, request: Request, seed: int) -> None:
        self.number, self.request = number, request
        self.token_ids: list[int] = []
        self.length = len(request.prompt_ids)
        self.streams = RandomStreams(seed, request.request_id)
        self.closing = False  # all tokens are there; only the last one's features are still missing
        self.complete = False  # these are there too
        self._kept: list[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]] = []

    def keep(
        self, hidden_TD: Tensor, tapped_TF: Tensor | None, lse_T: Tensor | None = None, top_TX: Tensor | None = None
    ) -> None:
        """Add features of the next tokens; without a law for those of the prompt but the last."""
        low = None if tapped_TF is None else tapped_TF.to(torch.bfloat16)
        self._kept.append((hidden_TD.to(torch.bfloat16), low, lse_T, top_TX))

    def features(self) -> SequenceFeatures:
        """Features of the whole sequence; laws begin with the response's first token, as `TargetReader` has them."""
        hidden, tapped, lse, top = zip(*self._kept, strict=True)
        first = len(self.request.prompt_ids)
        last_TD = torch.cat(hidden).cpu()
        lse_T = torch.zeros(last_TD.shape[0])
        top_TX = torch.full((last_TD.shape[0], NUM_TOP), -1, dtype=torch.int32)
        # the first law kept is that after the prompt's last token
        lse_T[first:] = torch.cat([part for part in lse if part is not None])[1:].cpu()
        top_TX[first:] = torch.cat([part for part in top if part is not None])[1:].cpu()
        tapped_TF = None if tapped[0] is None else torch.cat(tapped).cpu()
        return SequenceFeatures(tapped_TF, last_TD, lse_T, top_TX)


@torch.inference_mode()
def draw(logits_XV: Tensor, answers: Sequence[_Answer]) -> list[int]:
    """The next token of each answer: the largest logit at temperature 0, else by inverse CDF in float64."""
    if not bool(torch.isfinite(logits_XV.amax(-1)).all()):
        raise ArithmeticError("the target gave logits that are not finite")
    tokens = logits_XV.argmax(-1)
    sampled = [row for row, answer in enumerate(answers) if answer.request.temperature > 0]
    if sampled:
        rows_X = torch.tensor(sampled, device=logits_XV.device)
        temperature_X1 = torch.tensor([[answers[row].request.temperature] for row in sampled], device=logits_XV.device)
        cdf_XV = torch.softmax(logits_XV[rows_X] / temperature_X1, dim=-1).double().cumsum(-1)
        uniform_X = [answers[row].streams.uniforms("plain", len(answers[row].token_ids), 1)[0] for row in sampled]
        uniform_X1 = torch.from_numpy(np.array(uniform_X)[:, None]).to(logits_XV.device)
        picked_X1 = torch.searchsorted(cdf_XV, uniform_X1 * cdf_XV[:, -1:], right=True)
        tokens[rows_X] = picked_X1[:, 0].clamp_max(logits_XV.shape[-1] - 1)
    return tokens.tolist()
