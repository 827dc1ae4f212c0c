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

# prompts that enter the batch together are padded to the longest of them
MOST_PADDING = 1.5


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
    """Samples answers in a batch of `num_slots` sequences."""

    def __init__(
        self,
        target: LeanDecoder,
        *,
        num_slots: int = 64,
        max_prompt: int = 512,
        max_new_tokens: int = 256,
        seed: int = 0,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self.max_prompt, self.max_new_tokens, self._seed = max_prompt, max_new_tokens, seed
        self._end_ids = target.eos_ids
        self._batch = BatchDecoder(target, num_slots, max_prompt + max_new_tokens)
        self._device = target.device

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
        # half-empty places are filled in groups: a prefill of few prompts is slow
        group = max(slots // 8, 1)
        while waiting or active:
            if waiting and (slots - len(active) >= group or not active):
                entering = [waiting.pop() for _ in range(min(slots - len(active), len(waiting)))]
                fresh = self._enter(requests, entering, first_slot=len(active))
                active += fresh
                if on_tokens is not None:
                    on_tokens(len(fresh))
            yield from self._retire(active)
            if not active:
                continue
            slots_X = torch.arange(len(active), device=self._device)
            ids_X = torch.tensor([answer.token_ids[-1] for answer in active], device=self._device)
            place_X = torch.tensor([answer.length for answer in active], device=self._device)
            self._append(active, self._batch.logits(self._batch.step(slots_X, ids_X, place_X)))
            if on_tokens is not None:
                on_tokens(len(active))
            yield from self._retire(active)

    def _enter(self, requests: Sequence[Request], numbers: list[int], first_slot: int) -> list[_Answer]:
        answers = []
        while numbers:
            shortest = len(requests[numbers[0]].prompt_ids)
            part = [n for n in numbers[:16] if len(requests[n].prompt_ids) <= MOST_PADDING * shortest + 8]
            numbers = numbers[len(part) :]
            fresh = [_Answer(n, requests[n], self._seed) for n in part]
            lengths = [len(answer.request.prompt_ids) for answer in fresh]
            ids_XT = torch.zeros(len(part), max(lengths), dtype=torch.int64)
            for row, answer in enumerate(fresh):
                ids_XT[row, : lengths[row]] = torch.tensor(answer.request.prompt_ids)
            start = first_slot + len(answers)
            slots_X = torch.arange(start, start + len(part), device=self._device)
            lengths_X = torch.tensor(lengths, device=self._device)
            self._append(
                fresh, self._batch.logits(self._batch.prefill(slots_X, ids_XT.to(self._device), lengths_X)), new=True
            )
            answers += fresh
        return answers

    def _append(self, answers: Sequence[_Answer], logits_XV: Tensor, *, new: bool = False) -> None:
        for answer, token in zip(answers, draw(logits_XV, answers), strict=True):
            if not new:
                answer.length += 1
            answer.token_ids.append(token)

    def _retire(self, active: list[_Answer]) -> Iterator[tuple[int, list[int]]]:
        at = 0
        while at < len(active):
            answer = active[at]
            if answer.token_ids[-1] in self._end_ids or len(answer.token_ids) >= self.max_new_tokens:
                last = active.pop()
                if last is not answer:
                    # active answers keep to the first slots
                    self._batch.cache.move(len(active), at)
                    active[at] = last
                yield answer.number, answer.token_ids
            else:
                at += 1


class _Answer:
    """An answer in the making: its tokens, and how many tokens its cache slot holds."""

    def __init__(self, number: int, request: Request, seed: int) -> None:
        self.number, self.request = number, request
        self.token_ids: list[int] = []
        self.length = len(request.prompt_ids)
        self.streams = RandomStreams(seed, request.request_id)


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
