"""Features that a run will need, made by a second process while the run itself trains."""

from __future__ import annotations

from collections.abc import Callable

from dspec_lab.training.corpus import Corpus
from dspec_lab.training.feature_source import CachedFeatures
from dspec_lab.training.train_config import TrainConfig


def read_ahead(corpus: Corpus, config: TrainConfig, on_read: Callable[[int, int], None] | None = None) -> int:
    """Put the features of a run's training sequences into its cache; returns how many tokens had to be read.

    Goes from the run's last step to its first, so a run that starts at the same time meets it in the middle and
    neither repeats the other's work, but for what lies unwritten in the other's memory. A run by the clock
    (`minutes`) is taken to make one epoch. What is on disk already costs nothing, so a call that was cut short goes
    on where it stopped. `on_read` gets the step and the tokens read so far after each sequence that was missing.
    """
    if not isinstance(corpus.features, CachedFeatures):
        raise ValueError(f"reading ahead needs a cache to fill, but features is {config.features!r}")
    order = corpus.order(config)
    steps = order.steps_per_epoch if config.minutes is not None else config.steps
    seen: set[int] = set()
    tokens = 0
    for step in reversed(range(steps)):
        for member in order.step(step):
            index = corpus.training[member]
            if index in seen:
                continue
            seen.add(index)
            if corpus.features.fill(index):
                tokens += corpus.sequences[index].num_tokens
                if on_read is not None:
                    on_read(step, tokens)
    corpus.features.flush()
    return tokens
