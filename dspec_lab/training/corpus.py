"""All sequences of a run, split by prompt, with where their features come from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.data import SequenceSet, StepOrder, TrainSequence, build_sequences, held_out, token_counts
from dspec_lab.training.feature_source import CachedFeatures, FeatureSource, StreamedFeatures
from dspec_lab.training.responses import read_responses
from dspec_lab.training.target_reader import TargetReader
from dspec_lab.training.train_config import TrainConfig


class Corpus:
    """Training and validation sequences of some files of responses.

    Sequences are numbered through all files. `training` and `validation` list numbers; a prompt and all its answers
    are on one side, and validation mixes the files' domains by turns.
    """

    def __init__(
        self, sets: Sequence[SequenceSet], reader: TargetReader, config: TrainConfig, cache: Path | str | None = None
    ) -> None:
        self.sequences: list[TrainSequence] = [sequence for part in sets for sequence in part.sequences]
        self._vocab_size = reader.target.vocab_size
        self._layers, self._width = reader.taps.layers, reader.target.hidden_size
        aside = [held_out(sequence, config.validation_share) for sequence in self.sequences]
        self.training = [index for index, out in enumerate(aside) if not out]
        self.validation = _by_turns([index for index, out in enumerate(aside) if out], self.sequences)
        if not self.training:
            raise ValueError(f"no training sequence is left with validation_share {config.validation_share}")
        if config.features == "cache":
            if cache is None:
                raise ValueError("features: cache needs a folder for the cache")
            self.features: FeatureSource = CachedFeatures(reader, self.sequences, cache)
        else:
            self.features = StreamedFeatures(reader, self.sequences)
        digest = hashlib.blake2b(digest_size=8)
        for sequence in self.sequences:
            digest.update(np.int64([sequence.num_prompt, sequence.num_tokens]).tobytes())
            digest.update(sequence.ids_T.tobytes())
        self.key = digest.hexdigest()

    def counts(self, *, prompts: bool = False) -> np.ndarray:
        """How often each token id occurs in training responses, or with `prompts` in all sequences whole."""
        chosen = range(len(self.sequences)) if prompts else self.training
        return token_counts([self.sequences[i] for i in chosen], self._vocab_size, prompts=prompts)

    def order(self, config: TrainConfig) -> StepOrder:
        """Which of `training` each optimiser step sees."""
        lengths = [self.sequences[index].num_tokens for index in self.training]
        return StepOrder(lengths, config.sequences_per_step, config.seed, config.first_step)

    def loss_mask(self, members: Sequence[int]) -> Tensor:
        """The padded loss mask [B, T] of some sequences, without their features."""
        length = max(self.sequences[index].num_tokens for index in members)
        position_T = torch.arange(length)
        start_B1 = torch.tensor([[self.sequences[index].num_prompt] for index in members])
        end_B1 = torch.tensor([[self.sequences[index].num_tokens] for index in members])
        return (position_T >= start_B1) & (position_T < end_B1)

    def columns(self, layers: Sequence[int]) -> list[slice]:
        """Where the given layers lie in the tapped features."""
        places = [self._layers.index(layer) for layer in layers]
        return [slice(place * self._width, (place + 1) * self._width) for place in places]

    @property
    def num_tokens(self) -> int:
        """Response tokens to train on."""
        return sum(self.sequences[index].num_response for index in self.training)


def feature_reader(config: TrainConfig, target: LeanDecoder, drafter_layers: Sequence[int]) -> TargetReader:
    """The reader that a drafter tapping `drafter_layers` needs; its cache may hold more layers, for other drafters."""
    if config.cached_layer_ids is None:
        return TargetReader(target, drafter_layers)
    missing = sorted(set(drafter_layers) - set(config.cached_layer_ids))
    if missing:
        raise ValueError(f"cached_layer_ids {list(config.cached_layer_ids)} lack the drafter's layers {missing}")
    return TargetReader(target, config.cached_layer_ids)


def read_corpus_files(
    paths: Sequence[Path | str], config: TrainConfig, vocab_size: int, ends_prompt: Sequence[int] = ()
) -> list[SequenceSet]:
    """The sequences of each file of responses."""
    if not paths:
        raise ValueError("no file of responses was given")
    return [
        build_sequences(
            read_responses(path),
            max_tokens=config.max_tokens,
            vocab_size=vocab_size,
            ends_prompt=ends_prompt,
            name=str(path),
        )
        for path in paths
    ]


def _by_turns(indices: Sequence[int], sequences: Sequence[TrainSequence]) -> list[int]:
    """Indices reordered so that any beginning holds all domains, greedy and sampled responses alike."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for index in indices:
        groups.setdefault((sequences[index].domain, sequences[index].temperature == 0), []).append(index)
    ordered = [groups[key] for key in sorted(groups)]
    longest = max((len(group) for group in ordered), default=0)
    return [group[i] for i in range(longest) for group in ordered if i < len(group)]
