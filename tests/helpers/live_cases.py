"""What tests/helpers/judge.py does with live models. tests/judge/test_live.py has the cases.

live   checkpoint: of Megatron, which megatron-core itself loads
       loads: [[source, keywords of mckpt.live.load]]: each must fill the model with the same
       bits as that load
       fault: makes the first load fail (FAULTS)
       -> differs: {number of a load: names of the weights that differ, on any rank}
       -> error: of the first load on each rank, null on a rank that did not call it
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mckpt import live
from mckpt.errors import MckptError, SourceError
from mckpt.live import loading
from mckpt.trainer import load


def run(case: dict[str, Any], chunks: list[Any], args: Any) -> dict[str, Any]:
    """Runs the parts of one case on this rank, with a model that is built and not filled."""
    if "fault" in case:
        return {"errors": fault(case, chunks)}
    load.load(chunks, args, case["checkpoint"])
    wanted = {name: value.clone() for name, value in load.weights(chunks)}
    differs: dict[str, list[str]] = {}
    for number, (source, options) in enumerate(case["loads"]):
        load.mark(chunks)
        live.load(chunks, source, **options)
        differs[str(number)] = on_any_rank(
            name for name, value in load.weights(chunks) if not same(value, wanted[name])
        )
    return {"differs": differs}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits."""
    bytes_of = [x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bytes_of)


def on_any_rank(names: Any) -> list[str]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(names))
    return sorted({f"rank {rank}: {name}" for rank, held in enumerate(every) for name in held})


# --------------------------------------------------------------------------------------- faults


def extra_parameter(chunks: list[Any]) -> None:
    """Adds a frozen parameter that no mapping names, on one rank only."""
    if dist.get_rank() == 1:
        new = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        chunks[0].decoder.register_parameter("extra", new)


def hidden_parameter(chunks: list[Any]) -> None:
    """Lets sharded_state_dict() leave out a parameter."""
    decoder = chunks[0].decoder
    whole = decoder.sharded_state_dict

    def without(*args: Any, **keywords: Any) -> Any:
        state = whole(*args, **keywords)
        return {name: v for name, v in state.items() if not name.endswith("linear_proj.weight")}

    decoder.sharded_state_dict = without


def renamed_parameter(chunks: list[Any]) -> None:
    """Gives a parameter a name that no mapping has."""
    whole = chunks[0].sharded_state_dict

    def renamed(*args: Any, **keywords: Any) -> Any:
        state = whole(*args, **keywords)
        for value in state.values():
            value.key = value.key.replace("linear_proj.weight", "linear_out.weight")
        return state

    chunks[0].sharded_state_dict = renamed


def failing_read(chunks: list[Any]) -> None:
    """Lets one rank fail while it reads."""

    def read(*args: Any) -> None:
        raise SourceError("the disk of one rank is broken")

    if dist.get_rank() == 1:
        loading.read = read


def lost_rank(chunks: list[Any]) -> None:
    """Lets one rank leave before the load."""
    if dist.get_rank() == 1:
        raise SystemExit


FAULTS = {
    f.__name__: f
    for f in (extra_parameter, hidden_parameter, renamed_parameter, failing_read, lost_rank)
}


def fault(case: dict[str, Any], chunks: list[Any]) -> list[str | None]:
    """Returns the error of each rank, through the store: a group may be broken."""
    rank, world, store = (
        dist.get_rank(),
        dist.get_world_size(),
        dist.distributed_c10d._get_default_store(),
    )
    said = ""
    try:
        FAULTS[case["fault"]](chunks)
        live.load(chunks, *case["loads"][0][:1], **case["loads"][0][1])
    except MckptError as error:
        said = str(error)
    except SystemExit:
        dist.destroy_process_group()
    finally:
        loading.read = READ
    store.set(f"said{rank}", said)
    return [store.get(f"said{r}").decode() for r in range(world)]


READ = loading.read
