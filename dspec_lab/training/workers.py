"""Answers by several processes side by side, one thread each: on a CPU that is faster than one process with threads."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspec_lab.training.produce import ResponseConfig, parts_folder, produce
from dspec_lab.training.prompts.sources import read_prompts

POLL_S = 0.5


def produce_side_by_side(
    prompts_file: Path,
    target_folder: Path,
    config: ResponseConfig,
    out: Path,
    num_workers: int,
    *,
    device: str = "cpu",
    dtype: str = "fp32",
    features: tuple[Path, tuple[int, ...]] | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> int:
    """Answer tokens produced in this call. `on_progress` gets (answers done, answers in all, tokens of this call).

    `features` are the folder for features and the layers to tap, if they are to be kept for training.

    Every process loads the target for itself. If one fails, the others finish what they are at and the error is raised.
    """
    if num_workers < 1:
        raise ValueError(f"workers must be at least 1, got {num_workers}")
    context = multiprocessing.get_context("spawn")
    done, tokens = (context.Array("q", num_workers) for _ in range(2))
    total = sum(len(prompt.turns) for prompt in read_prompts(prompts_file))
    named = (str(prompts_file), str(target_folder), config, str(out), num_workers, device, dtype, features)
    shared = (*named, done, tokens)
    processes = [context.Process(target=_work, args=(worker, *shared), daemon=True) for worker in range(num_workers)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        time.sleep(POLL_S)
        if on_progress is not None:
            on_progress(sum(done), total, sum(tokens))
    failed = [worker for worker, process in enumerate(processes) if process.exitcode]
    if failed:
        raise OSError(f"worker {failed[0]} of {num_workers} failed; its parts in {parts_folder(out)} are kept")
    return sum(tokens)


def _work(
    worker: int,
    prompts_file: str,
    target_folder: str,
    config: ResponseConfig,
    out: str,
    num_workers: int,
    device: str,
    dtype: str,
    features: tuple[Path, tuple[int, ...]] | None,
    done: Any,
    tokens: Any,
) -> None:
    import torch

    from dspec_lab.models.decoder import LeanDecoder
    from dspec_lab.models.load import load_tokenizer, parse_dtype
    from dspec_lab.training.feature_store import FeatureStore
    from dspec_lab.training.target_reader import TargetReader

    torch.set_num_threads(1)

    def report(answers: int, _total: int, new_tokens: int) -> None:
        done[worker], tokens[worker] = answers, new_tokens

    target = LeanDecoder.from_folder(target_folder, dtype=parse_dtype(dtype, device), device=device)
    store = None if features is None else FeatureStore(TargetReader(target, features[1]), features[0])
    produce(
        read_prompts(Path(prompts_file)),
        target,
        load_tokenizer(Path(target_folder)),
        config,
        out,
        worker=worker,
        num_workers=num_workers,
        store=store,
        on_progress=report,
    )
