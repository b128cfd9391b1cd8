"""Work that all ranks of a model do together, and that fails on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mckpt.errors import MckptError

T = TypeVar("T")


def gathered(work: Callable[[], T], group: Any = None) -> list[T]:
    """Calls a function on every rank, and returns the results of all ranks, in their order.

    If the function fails on any rank, raises the same error on every rank.
    """
    import torch.distributed as dist

    result: Any = None
    own: BaseException | None = None
    try:
        result, failed = work(), None
    except MckptError as error:
        own, failed = error, error
    except Exception as error:  # of any kind, because the other ranks wait for this one
        own, failed = error, MckptError(f"{type(error).__name__}: {error}")
    if not dist.is_initialized():
        if own is not None:
            raise own
        return [result]
    every: list[Any] = [None] * dist.get_world_size()
    call(dist.all_gather_object, every, (result, failed), group=group)
    errors = {rank: error for rank, (_, error) in enumerate(every) if error is not None}
    if errors:
        raise _merged(errors) from own
    return [result for result, _ in every]


def rank_and_world() -> tuple[int, int]:
    """Returns the number of this rank, and how many there are."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def own_result(work: Callable[[], T]) -> T:
    """Calls a function on every rank, as `gathered`, and returns the result of this rank, which is
    not sent.
    """
    kept: list[T] = []
    gathered(lambda: kept.append(work()))
    return kept[0]


def call(collective: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Calls a collective of torch. Raises MckptError if another rank has died or does not answer in
    the time that the process group allows.
    """
    try:
        return collective(*args, **keywords)
    except RuntimeError as error:
        raise MckptError(
            "the ranks of the model lost each other: a rank has ended or does not answer. Look for"
            f" the error of that rank, and start all ranks again ({error})"
        ) from error


def _merged(errors: dict[int, MckptError]) -> MckptError:
    """Returns one error for those of several ranks."""
    first = min(errors)
    texts = {rank: str(error) for rank, error in errors.items()}
    if len(errors) == 1:
        return errors[first].with_hint(f"This is the error of rank {first}.")
    if len(set(texts.values())) == 1:
        return errors[first]
    listed = [f"rank {rank}: {text}" for rank, text in texts.items()]
    return type(errors[first]).of("the ranks of the model failed:", listed)
