"""Work that all ranks of a model do together, and that fails on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import clear_frames
from typing import Any, TypeVar

from mckpt.errors import MckptError, UsageError

T = TypeVar("T")


# of a result: what must be equal on all ranks, by the name of its keyword
Stated = Callable[[T], Mapping[str, Any]]


def gathered(work: Callable[[], T], group: Any = None, stated: Stated[T] | None = None) -> list[T]:
    """Calls a function on every rank, and returns the results of all ranks, in their order.

    If the function fails on any rank, raises the same error on every rank. If ranks state other
    values, raises UsageError on every rank, with all that differ.
    """
    import torch.distributed as dist

    result: Any = None
    said: Mapping[str, Any] = {}
    own: BaseException | None = None
    try:
        result, failed = work(), None
        said = {name: _plain(value) for name, value in stated(result).items()} if stated else {}
    except Exception as error:  # of any kind, because the other ranks wait for this one
        own, failed = error, told(error)
    if group is None and not dist.is_initialized():
        if own is not None:
            raise own
        return [result]
    every: list[Any] = [None] * (dist.get_world_size() if group is None else group.size())
    call(dist.all_gather_object, every, (result, failed, said), group=group)
    errors = {rank: error for rank, (_, error, _) in enumerate(every) if error is not None}
    if errors:
        raise _merged(errors) from own
    if unlike := _unlike([said for *_, said in every]):
        raise UsageError.of(
            "the ranks of the model do not ask for the same:",
            unlike,
            "Call the function on all ranks with the same keywords.",
        )
    return [result for result, *_ in every]


def rank_and_world(group: Any = None) -> tuple[int, int]:
    """Returns the number of this rank, and how many there are.

    group: may be one that has ranks of its own, as the groups of trainers and engines are.
    """
    import torch.distributed as dist

    if group is not None:
        return group.rank(), group.size()
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def own_result(work: Callable[[], T], stated: Stated[T] | None = None) -> T:
    """Calls a function on every rank, as `gathered`, and returns the result of this rank, which is
    not sent.
    """
    kept: list[T] = []
    say = None if stated is None else lambda _: stated(kept[0])
    gathered(lambda: kept.append(work()), stated=say)
    return kept[0]


def call(collective: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Calls a collective of torch. Raises MckptError if another rank has died or does not answer in
    the time that the process group allows.
    """
    try:
        return collective(*args, **keywords)
    except RuntimeError as error:
        raise lost(error) from error


def refusal_of(work: Callable[[], object]) -> MckptError | None:
    """Calls a function, and returns its error; None if it has none."""
    try:
        work()
    except Exception as error:  # of any kind, as in `gathered`
        return told(error)
    return None


def told(error: Exception) -> MckptError:
    """Returns what the other ranks are told of an error of this rank. Frees the variables of the
    functions that it has left, which may hold much memory.
    """
    clear_frames(error.__traceback__)
    if isinstance(error, MckptError):
        return error
    return MckptError(f"{type(error).__name__}: {error}")


def lost(reason: object) -> MckptError:
    """Returns the error of ranks that no longer reach each other."""
    return MckptError(
        "the ranks of the model lost each other: a rank has ended or does not answer. Look for"
        f" the error of that rank, and start all ranks again ({reason})"
    )


def _plain(value: Any) -> Any:
    """Returns what can be compared of the value of a keyword: of an object its class only."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in sorted(value.items(), key=str)}
    return "a function" if callable(value) else type(value).__name__


def _unlike(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each name of which ranks state other values."""
    lines = []
    if len({said.get("function") for said in every}) > 1:  # whose keywords are others
        every = [{"function": said.get("function")} for said in every]
    for name in dict.fromkeys(name for said in every for name in said):
        ranks: dict[str, list[int]] = {}
        for rank, said in enumerate(every):
            ranks.setdefault(repr(said[name]) if name in said else "nothing", []).append(rank)
        if len(ranks) > 1:
            held = (f"{value} on {_listed(some)}" for value, some in ranks.items())
            lines.append(f"{name}: {', '.join(held)}")
    return lines


def _listed(ranks: Sequence[int]) -> str:
    more = "" if len(ranks) < 5 else f" and {len(ranks) - 4} more"
    return f"rank {', '.join(map(str, ranks[:4]))}{more}"


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
