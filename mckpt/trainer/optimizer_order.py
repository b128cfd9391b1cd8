"""Checks that a file has the parameters in the order in which the optimizer's state is."""

from __future__ import annotations

from mckpt.errors import SourceError


def same_order(stored: list[str], parameters: list[str], path: str) -> None:
    """Raises SourceError if a file has the parameters of a model in another order. The optimizer's
    state in the file has the same order, and no names by which it could be sorted.
    """
    wanted, there = set(parameters), set(stored)
    mine = [name for name in parameters if name in there]
    theirs = [name for name in stored if name in wanted]
    pairs = zip(mine, theirs, strict=False)
    if (apart := next((pair for pair in pairs if pair[0] != pair[1]), None)) is not None:
        raise SourceError(
            f"{path}: has {apart[1]} where this model has {apart[0]}, so it was saved with another"
            " --transformer-impl or other experts, and its optimizer's state has another order;"
            " `mckpt reshard --target-format torch_dist` makes it loadable"
        )
