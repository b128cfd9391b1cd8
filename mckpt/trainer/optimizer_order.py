"""Checks that a file has the parameters in the order in which the optimizer's state is."""

from __future__ import annotations

from mckpt.errors import SourceError


def same_order(stored: list[str], parameters: list[str], path: str) -> None:
    """Raises SourceError if a file has the parameters of a model in another order, in which its
    optimizer's state, which names none, then is too.
    """
    known, held = set(parameters), set(stored)
    mine = [name for name in parameters if name in held]
    theirs = [name for name in stored if name in known]
    pairs = zip(mine, theirs, strict=False)
    if (apart := next((pair for pair in pairs if pair[0] != pair[1]), None)) is not None:
        raise SourceError(
            f"{path}: has {apart[1]} where this model has {apart[0]}, so it was saved with another"
            " --transformer-impl or other experts, and its optimizer's state has another order;"
            " `mckpt reshard --target-format torch_dist` makes it loadable"
        )
