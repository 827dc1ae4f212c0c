"""What a run will take before it starts: disk, memory and hours, from sizes and a short measurement."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from dspec_lab.kernels.rows import row_ops
from dspec_lab.models.decoder import LeanDecoder
from dspec_lab.training.build import tapped_layers
from dspec_lab.training.corpus import feature_reader
from dspec_lab.training.data import SequenceSet
from dspec_lab.training.feature_store import FeatureStore, free_bytes, sequence_key
from dspec_lab.training.train_config import TrainConfig


@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes in bytes, times in seconds. Times are for one process on a machine as busy as now."""

    num_sequences: int
    num_tokens: int
    num_response_tokens: int
    features_bytes: int  # of all sequences on disk; 0 when features are streamed
    missing_bytes: int  # of these not there yet
    free_bytes: int  # where the cache would lie
    read_s: float  # one pass of the target over all sequences
    sequences_used: int  # different sequences that the run's steps can visit
    slow_bf16: bool = False  # precision is bf16 on a CPU that has to emulate products of such numbers

    @property
    def run_read_s(self) -> float:
        """Time the target takes in this run; later runs on the same cache need none."""
        share = self.missing_bytes / self.features_bytes if self.features_bytes else 1.0
        return share * self.read_s * self.sequences_used / self.num_sequences

    def lines(self) -> list[str]:
        """The estimate in words."""
        missing, free = self.missing_bytes / 1e9, self.free_bytes / 1e9
        store = f"{self.features_bytes / 1e9:.2f} GB, {missing:.2f} GB of them to be made, {free:.1f} GB free"
        if not self.features_bytes:
            store = "streamed, nothing stored"
        return [
            f"data: {self.num_sequences} sequences, {self.num_tokens} tokens, {self.num_response_tokens} in responses",
            f"features: {store}",
            f"reading the target: {self.read_s / 3600:.2f} h for all sequences once, "
            f"{self.run_read_s / 3600:.2f} h for what this run lacks",
            *(["precision: bf16 is slower than fp32 here, the CPU does not multiply such numbers"] * self.slow_bf16),
        ]


def estimate(
    config: TrainConfig, target: LeanDecoder, sets: list[SequenceSet], cache: Path, *, probes: int = 2
) -> Estimate:
    """Sizes and times of a run; measures `probes` sequences of middle length."""
    reader = feature_reader(config, target, tapped_layers(config, target))
    sequences = [sequence for part in sets for sequence in part.sequences]
    ordered = sorted(sequences, key=lambda sequence: sequence.num_tokens)
    rates = []
    for sequence in ordered[len(ordered) // 2 :][:probes]:
        started = time.perf_counter()
        reader.read(sequence.ids_T.tolist(), sequence.num_prompt)
        rates.append((time.perf_counter() - started) / reader.flops(sequence.num_tokens, sequence.num_response))
    work = sum(reader.flops(sequence.num_tokens, sequence.num_response) for sequence in sequences)
    total_bytes = sum(sequence.num_tokens for sequence in sequences) * reader.bytes_per_token()
    store = FeatureStore(reader, cache) if config.features == "cache" else None
    keys = [(sequence_key(sequence.ids_T, sequence.num_prompt), sequence.num_tokens) for sequence in sequences]
    visits = config.steps * config.sequences_per_step if config.minutes is None else len(sequences)
    if config.features == "stream":
        used = visits
    else:
        used = min(visits, len(sequences))
    return Estimate(
        num_sequences=len(sequences),
        num_tokens=sum(sequence.num_tokens for sequence in sequences),
        num_response_tokens=sum(sequence.num_response for sequence in sequences),
        features_bytes=0 if config.features == "stream" else total_bytes,
        missing_bytes=0 if store is None else store.missing_bytes(keys),
        free_bytes=free_bytes(cache),
        read_s=statistics.median(rates) * work,
        sequences_used=used,
        slow_bf16=config.precision == "bf16"
        and target.device.type == "cpu"
        and not getattr(row_ops("auto", "cpu"), "rounds", False),
    )
