"""Training of chain drafters with later steps at all positions and only where the loss counts: seconds by turns.

`python -m dspec_lab.bench.chain_rows [FILE]` times loss and gradients of EAGLE-3 and MTP on answers of
`data/responses/own_small.parquet`. Lengths and prompts are the real ones; the features are random, which changes no
time.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dspec_lab.bench.record import run_record, wanted_threads
from dspec_lab.core.files import json_text, write_text
from dspec_lab.drafters.chain_model import ChainDraftModel
from dspec_lab.training import chain_losses
from dspec_lab.training.data import TrainSequence


@contextlib.contextmanager
def every_row() -> Iterator[None]:
    """Within this context all steps of training-time test run at all positions."""

    def all_rows(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        rows_BT = torch.arange(mask_BT.shape[1]).expand(mask_BT.shape[0], -1)
        return rows_BT, rows_BT

    with mock.patch.object(chain_losses, "gathered_rows", all_rows):
        yield


def bench_chain_rows(
    model: ChainDraftModel, steps: list[list[TrainSequence]], *, repeats: int = 5
) -> list[dict[str, Any]]:
    """Least and median seconds of loss and gradients for each batch of `steps`, both ways by turns."""
    if repeats < 1 or not steps:
        raise ValueError(f"need repeats and batches, got {repeats} and {len(steps)}")
    model.train().requires_grad_(True)
    found = []
    for members in steps:
        batch, lengths = _inputs(model, members)
        seconds: dict[str, list[float]] = {"every_row": [], "chosen_rows": []}
        for repeat in range(repeats + 1):
            for way, context in (("every_row", every_row()), ("chosen_rows", contextlib.nullcontext())):
                model.zero_grad(set_to_none=True)
                started = time.perf_counter()
                with context:
                    chain_losses.ttt_loss(model, *batch, lengths).total.backward()
                if repeat:
                    seconds[way].append(time.perf_counter() - started)
        row: dict[str, Any] = {"tokens": int(lengths.sum()), "in_responses": int(batch[2].sum())}
        row |= {way: {"least": min(each), "median": statistics.median(each)} for way, each in seconds.items()}
        found.append({**row, "ratio": row["every_row"]["median"] / row["chosen_rows"]["median"]})
    return found


def _inputs(model: ChainDraftModel, members: list[TrainSequence]) -> tuple[tuple[Tensor, ...], Tensor]:
    """(features, ids, loss mask, last hidden states) of a padded batch, and its lengths."""
    lengths = torch.tensor([sequence.num_tokens for sequence in members])
    size, length, width = len(members), int(lengths.max()), model.arch.spec.hidden_size
    ids_BT, mask_BT = torch.zeros(size, length, dtype=torch.int64), torch.zeros(size, length, dtype=torch.bool)
    for row, sequence in enumerate(members):
        ids_BT[row, : sequence.num_tokens] = torch.from_numpy(sequence.ids_T.astype("int64"))
        mask_BT[row, sequence.num_prompt : sequence.num_tokens] = True
    generator = torch.Generator().manual_seed(0)
    layers = max(len(model.arch.target_layer_ids), 1)
    features_BTF = torch.randn(size, length, layers * width, generator=generator)
    return (features_BTF, ids_BT, mask_BT, torch.randn(size, length, width, generator=generator)), lengths


def main(arguments: list[str]) -> None:
    """Time both drafters; print the record and write it to the file given."""
    from dspec_lab.core.files import data_dir
    from dspec_lab.evaluation.drafters import build_drafters
    from dspec_lab.models.load import load_target
    from dspec_lab.training.data import build_sequences
    from dspec_lab.training.responses import read_responses

    torch.set_num_threads(wanted_threads())
    target = load_target("smollm2", torch.float32, "cpu")
    path = data_dir() / "responses" / "own_small.parquet"
    sequences = build_sequences(read_responses(path), max_tokens=1024, vocab_size=target.vocab_size).sequences
    steps = [list(sequences[at : at + 2]) for at in (0, 40)]
    names = ("eagle3", "mtp")
    made = build_drafters(names, target)
    models = {name: made[name].model.float() for name in names}  # type: ignore[attr-defined]
    record: dict[str, Any] = {name: bench_chain_rows(model, steps, repeats=3) for name, model in models.items()}
    record["run"] = run_record({"responses": path.name, "sequences_each": 2}, 0, dtype="fp32", model=target.name)
    text = json_text(record)
    if arguments:
        write_text(Path(arguments[0]), text)
    print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
