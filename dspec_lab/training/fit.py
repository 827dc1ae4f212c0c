"""Training of a drafter, end to end: data, features, optimiser steps, validation, checkpoints, resumption."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from dspec_lab.checkpoints.identity import checkpoint_hash
from dspec_lab.checkpoints.layout import write_checkpoint
from dspec_lab.core.files import write_json
from dspec_lab.drafters.vocabulary import DraftModel
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.anchors import Anchors, sample_anchors
from dspec_lab.training.build import architecture, frequent_tokens, new_drafter, trainable
from dspec_lab.training.corpus import Corpus
from dspec_lab.training.data import Batch
from dspec_lab.training.feature_source import collate
from dspec_lab.training.losses import Ratio
from dspec_lab.training.on_policy import on_policy_lengths
from dspec_lab.training.state import RunState, load_state, save_state
from dspec_lab.training.step import (
    AcceleratedProcesses,
    MicroBatch,
    Processes,
    add_metrics,
    optimiser_step,
    step_vocabulary,
)
from dspec_lab.training.target_reader import fingerprint
from dspec_lab.training.train_config import TrainConfig
from dspec_lab.training.validate import validate
from dspec_lab.training.warm_start import start_from, warm_start

STATE, CHECKPOINT, HISTORY = "resume.safetensors", "checkpoint", "history.json"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a progress display gets after each step."""

    step: int
    progress: float  # share of the run, 0..1
    seconds: float  # spent training
    seconds_left: float
    loss: float
    tau: float  # expected accepted length, 1 - TV, on the training batch
    accept_rate: tuple[float, ...]
    rate: float
    grad_norm: float
    tokens_per_s: float
    anchors_per_s: float


@runtime_checkable
class Display(Protocol):
    """Where a run reports to."""

    def on_step(self, report: StepReport) -> None: ...

    def on_validation(self, step: int, measures: Mapping[str, Any]) -> None: ...

    def on_lengths(self, lengths: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class FitResult:
    """A finished run."""

    model: DraftModel
    checkpoint: Path
    state: RunState


def fit(
    config: TrainConfig,
    target: LeanDecoder,
    target_config: Mapping[str, Any],
    corpus: Corpus,
    out: Path | str,
    *,
    display: Display | None = None,
    accelerator: object | None = None,
) -> FitResult:
    """Train the drafter of `config` and write `out/checkpoint`; a run that was cut short goes on where it stopped.

    With `steps` the result does not depend on interruptions. With `minutes` the schedule follows the clock, so it
    depends on the machine. `accelerator` spreads each step's sequences over its processes.
    """
    return Run(config, target, target_config, corpus, Path(out), display, accelerator).finish()


class Run:
    """One training run; `finish` does the work."""

    def __init__(
        self,
        config: TrainConfig,
        target: LeanDecoder,
        target_config: Mapping[str, Any],
        corpus: Corpus,
        out: Path,
        display: Display | None,
        accelerator: object | None,
    ) -> None:
        self.config, self.target, self.target_config, self.corpus = config, target, target_config, corpus
        self.out, self.display = out, display
        self.processes = Processes() if accelerator is None else AcceleratedProcesses(accelerator)
        parts = self.processes.count * config.accumulate
        if config.sequences_per_step % parts:
            raise ValueError(
                f"sequences_per_step {config.sequences_per_step} cannot be shared by {self.processes.count} processes "
                f"with {config.accumulate} micro-batches each"
            )
        arch = architecture(config, target, corpus.counts(prompts=True))
        counts = corpus.counts()
        self.model = new_drafter(arch, target, counts, config.seed)
        self.columns = corpus.columns(getattr(arch, "target_layer_ids", ()))
        if config.start_from is not None:
            start_from(self.model, config.start_from, target)
        elif config.warm_start:
            warm_start(self.model, target)
        self.model.requires_grad_(False)
        self.parameters = trainable(self.model, config.trained_part)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.frequent_ids_N = torch.from_numpy(frequent_tokens(counts, config.vocab_certain)).to(target.device)
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        others = [p for p in self.parameters.values() if p.dim() <= 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        self.generator = torch.Generator().manual_seed(config.seed)
        self.order = corpus.order(config)
        self.state = RunState()
        self.identity = {"config": config.to_dict(), "data": corpus.key, "target": fingerprint(target)}
        if config.start_from is not None:
            self.identity["start"] = checkpoint_hash(config.start_from)[:16]
        if (out / STATE).is_file():
            self.state = load_state(out / STATE, self.parameters, self.optimiser, self.generator, self.identity)

    def finish(self) -> FitResult:
        """Run the steps that are left, then validate and write the checkpoint."""
        config, state = self.config, self.state
        recent: dict[str, Ratio] = {}
        self._mark = time.perf_counter()
        if state.step == 0 and not state.history:
            self._validate()
        self.model.train()
        while (progress := self._progress()) < 1:
            started = time.perf_counter()
            micros = self._micro_batches(progress)
            rate = config.rate_at(progress)
            metrics, norm = optimiser_step(
                self.model, list(self.parameters.values()), self.optimiser, micros, config, rate, self.processes
            )
            took = time.perf_counter() - started
            tokens = sum(int(micro.batch.loss_mask_BT.sum()) for micro in micros)
            anchors = sum(
                int(m.anchors.keep_BA.sum()) if m.anchors else int(m.batch.loss_mask_BT.sum()) for m in micros
            )
            state.step += 1
            self._tick()
            state.tokens += tokens * self.processes.count
            state.anchors += anchors * self.processes.count
            recent = add_metrics(recent, metrics)
            if self.display is not None and self.processes.rank == 0:
                self.display.on_step(self._report(recent, rate, norm, tokens / took, anchors / took))
            if state.step % 20 == 0:
                recent = {}
            if state.step % config.validate_every == 0 and self._progress() < 1:
                self._validate()
            if state.step % config.save_every == 0:
                self._save()
        if not state.history or state.history[-1]["step"] != state.step:
            self._validate()
        if "on_policy" not in state.history[-1]:
            self._measure_on_policy()
        self._save()
        return FitResult(self.model, self.out / CHECKPOINT, state)

    def _tick(self) -> None:
        """Add the time since the last call to the run's own."""
        now = time.perf_counter()
        self.state.seconds += now - self._mark
        self._mark = now

    def _progress(self) -> float:
        if self.config.minutes is None:
            return self.state.step / self.config.steps
        if self.processes.count == 1:
            return self.state.seconds / (60 * self.config.minutes)
        # all processes must agree when to stop: the mean of their clocks
        seconds = self.processes.sum_(torch.tensor([self.state.seconds], device=self.target.device))
        return float(seconds) / self.processes.count / (60 * self.config.minutes)

    def _micro_batches(self, progress: float) -> list[MicroBatch]:
        config, processes = self.config, self.processes
        chosen = [self.corpus.training[i] for i in self.order.step(self.state.step)]
        # anchors are drawn sequence by sequence, alike in all processes: how a step is cut changes none of them
        draw = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=self.generator)))
        drawn = {}
        if config.is_block:
            for index in chosen:
                drawn[index] = sample_anchors(self.corpus.loss_mask([index]), config.anchors_at(progress), draw)
        size = len(chosen) // (processes.count * config.accumulate)
        first = processes.rank * config.accumulate * size
        parts = [chosen[at : at + size] for at in range(first, first + config.accumulate * size, size)]
        batches = [self._load(part) for part in parts]
        vocabulary = None
        if config.vocab_drawn is not None:
            vocabulary = step_vocabulary(self.model, batches, self.frequent_ids_N, config.vocab_drawn, draw)
        slots = config.slots_at(progress)
        device = self.target.device
        micros = []
        for part, batch in zip(parts, batches, strict=True):
            anchors = None
            if config.is_block:
                positions = torch.cat([drawn[index].positions_BA for index in part])
                keep = torch.cat([drawn[index].keep_BA for index in part])
                anchors = Anchors(positions.to(device), keep.to(device)).trimmed()
            micros.append(MicroBatch(batch, anchors, vocabulary, slots))
        return micros

    def _load(self, members: Sequence[int]) -> Batch:
        sequences = [self.corpus.sequences[index] for index in members]
        features = [self.corpus.features.get(index) for index in members]
        return collate(sequences, features, self.columns).to(self.target.device)

    def _validate(self) -> None:
        chosen = self.corpus.validation[: self.config.validation_sequences]
        first, measures, state = self.processes.rank == 0, {}, self.state
        if first and chosen:
            sequences = [self.corpus.sequences[index] for index in chosen]
            measures = validate(self.model, self.config, sequences, lambda i: self._load([chosen[i]]))
        # every process keeps the history, so that all take the same way through the run
        entry = {"step": state.step, "minutes": round(state.seconds / 60, 2), "tokens": state.tokens}
        state.history.append({**entry, "anchors": state.anchors, "measures": measures})
        if first:
            self._write_checkpoint()
            if self.display is not None:
                self.display.on_validation(state.step, measures)
        self.processes.wait()

    def _measure_on_policy(self) -> None:
        """Add accepted lengths from the verifier to the last entry of the history."""
        chosen = self.corpus.validation[: self.config.on_policy_prompts]
        first, lengths = self.processes.rank == 0, {}
        if first and chosen:
            sequences = [self.corpus.sequences[index] for index in chosen]
            lengths = on_policy_lengths(self.model, self.target, sequences, self.config.proposed)
        self.state.history[-1]["on_policy"] = lengths
        if first:
            self._write_checkpoint()
            if self.display is not None:
                self.display.on_lengths(lengths)
        self.processes.wait()

    def _write_checkpoint(self) -> None:
        about = {"training_steps": self.state.step, "training_config": self.config.to_dict()}
        write_checkpoint(
            self.out / CHECKPOINT, self.model, self.target_config, dtype=torch.bfloat16, extra_fields=about
        )
        write_json(self.out / HISTORY, {"identity": self.identity, "history": self.state.history})

    def _save(self) -> None:
        self.corpus.features.flush()
        if self.processes.rank == 0:
            save_state(self.out / STATE, self.state, self.parameters, self.optimiser, self.generator, self.identity)
        self.processes.wait()

    def _report(
        self, recent: Mapping[str, Ratio], rate: float, norm: float, tokens_per_s: float, anchors_per_s: float
    ) -> StepReport:
        state, config = self.state, self.config
        progress = min(self._progress(), 1.0)
        left = state.seconds / progress - state.seconds if progress else float("nan")
        accept = [recent[f"accept_rate@{k}"].value for k in range(config.proposed) if f"accept_rate@{k}" in recent]
        if config.is_block:
            loss = config.loss_ce * recent["ce_loss"].value + config.loss_l1 * recent["l1_loss"].value
        else:
            steps = [recent[f"loss@{k}"].value for k in range(config.proposed) if f"loss@{k}" in recent]
            loss = sum(config.step_loss_decay**k * value for k, value in enumerate(steps))
        return StepReport(
            step=state.step,
            progress=progress,
            seconds=state.seconds,
            seconds_left=left,
            loss=loss,
            tau=recent["tau_probabilistic"].value,
            accept_rate=tuple(accept),
            rate=rate,
            grad_norm=norm,
            tokens_per_s=tokens_per_s * self.processes.count,
            anchors_per_s=anchors_per_s * self.processes.count,
        )
