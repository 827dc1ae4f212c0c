"""What a trained drafter asks of its target and of commits, said at once rather than by low acceptance."""

from __future__ import annotations

from torch import Tensor

from dspec_lab.drafters.architecture import Architecture, MedusaArchitecture
from dspec_lab.drafters.protocol import Commit
from dspec_lab.models.protocol import Target


def check_target(arch: Architecture, target: Target, name: str) -> None:
    """Raise `ValueError` where the target's sizes are not those the drafter was trained with."""
    hidden = arch.spec.hidden_size if isinstance(arch, MedusaArchitecture) else arch.target_hidden_size
    for what, has, needs in (
        ("layers", target.num_layers, arch.num_target_layers),
        ("hidden units", target.hidden_size, hidden),
        ("vocabulary entries", target.vocab_size, arch.spec.vocab_size),
    ):
        if has != needs:
            raise ValueError(f"drafter {name} was trained for a target of {needs} {what}; {target.name} has {has}")


def context_rows(commit: Commit, rows_NF: Tensor | None, *, first: bool, name: str) -> Tensor:
    """The feature rows of a commit that enter the draft context: one for each known token but the newest.

    A round that ends on an accepted end token also brings that token's own row. It is left out here: the newest token
    is the anchor, and its row comes with the next commit if the request goes on. Any other count raises `ValueError`.
    """
    if rows_NF is None:
        raise ValueError(f"drafter {name} needs the target's features with every commit, got none")
    count = len(commit.token_ids) - (1 if first else 0)
    if count < 1 or rows_NF.shape[0] not in (count, count + 1):
        raise ValueError(f"{len(commit.token_ids)} committed tokens need {count} feature rows, got {rows_NF.shape[0]}")
    return rows_NF if rows_NF.shape[0] == count else rows_NF[:count]
