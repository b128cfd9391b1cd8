"""Parallel sizes: which pipeline stage holds which layers, and which files of a `torch` checkpoint
hold which shards and experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mckpt.errors import UsageError, counted
from mckpt.lazy import pattern

MAX_STAGES = 4096  # most stages to which a layout string such as (t|)*1000000000 may unroll
# Limit of each parallel size and of their products: the args of a checkpoint can have any number,
# and ranks are listed.
MAX_SIZE = 65536

# the fields of Parallel that decide which stage has which layers
_SPLIT = (
    "pp",
    "vpp",
    "first_stage_layers",
    "last_stage_layers",
    "account_for_embedding",
    "account_for_loss",
    "layout",
    "stage_sizes",
)
_MTP = pattern(r"m(\*\d{1,5})?")  # layers of multi-token prediction in a layout


@dataclass(frozen=True)
class Parallel:
    """Megatron's parallel sizes.

    etp: tensor parallelism of experts; None means as tp.
    vpp: virtual stages of each pipeline rank.

    The other fields describe uneven pipelines, as Megatron's flags do: the layers of the first and
    last stage, embedding and loss counted as a layer, or a whole `layout` ("Ettt|(tt|)*6tL", see
    PipelineParallelLayerLayout of Megatron-Core). `stage_sizes` is for dialects whose args state
    the number of layers of each stage, stage after stage.

    Raises UsageError for sizes that are out of range or contradict each other.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: str | None = None
    stage_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "etp"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= MAX_SIZE):
                raise UsageError(
                    f"{name} is {value!r}, and must be a whole number from 1 to {MAX_SIZE}"
                )
        listed = self.stage_sizes
        if self.layout is not None and self.vpp == 1:
            listed = tuple(map(len, _parse_layout(self.layout)))
        if listed is not None:
            if not listed or len(listed) % self.pp:
                what = f"layout {self.layout!r}" if self.layout is not None else "pipeline"
                raise UsageError(
                    f"the {what} has {counted(len(listed), 'stage')}, which is not a multiple of pp"
                    f" {self.pp}"
                )
            object.__setattr__(self, "vpp", len(listed) // self.pp)
        for name in ("first_stage_layers", "last_stage_layers"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} is {value!r}, and must be a whole number from 1 on")
        if self.pp * self.vpp > MAX_SIZE or math.lcm(self.tp, self.expert_tp * self.ep) > MAX_SIZE:
            raise UsageError(f"{self}: more than {MAX_SIZE} ranks or stages")
        uneven = self.first_stage_layers is not None or self.last_stage_layers is not None
        accounted = self.account_for_embedding or self.account_for_loss
        if uneven + accounted + (self.layout is not None) + (self.stage_sizes is not None) > 1:
            raise UsageError(
                "choose one of: layers of the first and last stage, account-for-embedding/loss, or"
                " a pipeline layout; Megatron refuses two"
            )
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(
                f"vpp {self.vpp} needs pp > 1: virtual stages interleave pipeline stages"
            )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def stages(self, num_layers: int, mtp_layers: int = 0) -> list[list[list[int]]]:
        """Returns the global layers of each pipeline rank and virtual stage, as Megatron-Core
        places them (transformer_block.py, get_num_layers_to_build).

        The layers of multi-token prediction are not among them: all of them are in `mtp_stage`.
        Raises UsageError if the sizes do not fit.
        """
        counts = self._counts(num_layers, mtp_layers)
        placed: list[list[list[int]]] = [[] for _ in range(self.pp)]
        at = 0
        # a virtual stage runs over all pipeline ranks before the next one begins
        for v in range(self.vpp):
            for p in range(self.pp):
                placed[p].append(list(range(at, at + counts[p][v])))
                at += counts[p][v]
        if at != num_layers:
            raise UsageError(f"the pipeline places {at} layers, and the model has {num_layers}")
        return placed

    @property
    def mtp_stage(self) -> tuple[int, int]:
        """The (pipeline rank, virtual stage) of the layers of multi-token prediction: the last one,
        unless a layout names another.
        """
        stages = _parse_layout(self.layout) if self.layout is not None else []
        at = next((i for i, stage in enumerate(stages) if "m" in stage), self.pp * self.vpp - 1)
        return at % self.pp, at // self.pp

    def split(self, num_layers: int, mtp_layers: int = 0) -> list[int]:
        """Returns the number of layers of each stage: of the pipeline ranks of the first virtual
        stage, then of the second.

        Raises UsageError if the sizes do not fit.
        """
        placed = self.stages(num_layers, mtp_layers)
        return [len(placed[p][v]) for v in range(self.vpp) for p in range(self.pp)]

    def is_split_as(self, other: Parallel) -> bool:
        """Returns whether both cut the layers of a model into the same stages."""
        return all(getattr(self, name) == getattr(other, name) for name in _SPLIT)

    def with_stage_sizes(self, sizes: Sequence[int]) -> Parallel:
        """Returns a copy with these numbers of layers in the stages, as `split` lists them."""
        return Parallel(tp=self.tp, pp=self.pp, ep=self.ep, etp=self.etp, stage_sizes=tuple(sizes))

    def with_layout(self, sizes: Sequence[int], mtp_layers: int = 0) -> Parallel:
        """Returns the same as `with_stage_sizes`, as a `layout`, which equal sizes do not need."""
        plain = Parallel(
            tp=self.tp, pp=self.pp, vpp=len(sizes) // self.pp, ep=self.ep, etp=self.etp
        )
        if len(set(sizes)) == 1:
            return plain
        stages = "|".join("t" * n for n in sizes)
        return replace(plain, vpp=1, layout=f"E{stages}{'m' * mtp_layers}L")

    def without_mtp(self) -> Parallel:
        """Returns a copy whose layout has no layers of multi-token prediction."""
        return self if self.layout is None else replace(self, layout=_MTP.sub("", self.layout))

    def _counts(self, num_layers: int, mtp_layers: int) -> list[list[int]]:
        """Returns the number of layers of each [pipeline rank][virtual stage]."""
        if self.stage_sizes is not None:
            by_virtual = [
                self.stage_sizes[v * self.pp : (v + 1) * self.pp] for v in range(self.vpp)
            ]
            return [list(counts) for counts in zip(*by_virtual, strict=True)]
        if self.layout is not None:
            return self._counts_of_layout(self.layout, num_layers, mtp_layers)
        given = {
            p: n
            for p, n in ((0, self.first_stage_layers), (self.pp - 1, self.last_stage_layers))
            if n is not None
        }
        first, last, layout = (
            "--decoder-first-pipeline-num-layers",
            "--decoder-last-pipeline-num-layers",
            "--pipeline-model-parallel-layout",
        )
        left = num_layers - sum(given.values()) + self.account_for_embedding + self.account_for_loss
        ranks = self.pp - len(given)
        accounted = self.account_for_embedding or self.account_for_loss
        what = f"{num_layers} layers" + (
            f" less {sum(given.values())} of the first or last stage" if given else ""
        )
        what += (
            f" and {self.account_for_embedding + self.account_for_loss} for embedding and loss"
            * accounted
        )
        flags = ((first, self.first_stage_layers), (last, self.last_stage_layers))
        taken = " and ".join(f"{flag} {n}" for flag, n in flags if n is not None)
        if left < 0:
            raise UsageError(f"{taken}: more than the {num_layers} layers of the model; give fewer")
        if left % ranks if ranks else left:
            raise UsageError(
                f"{what} cannot be split evenly over {counted(ranks, 'pipeline stage')} (pp"
                f" {self.pp}); choose another --pp, or give {first}, {last} or {layout}"
                + " instead of --account-for-embedding/loss-in-pipeline-split"
                * accounted
            )
        if given and ranks and not left:
            ends = [end for end, (_, n) in zip(("first", "last"), flags, strict=True) if n]
            raise UsageError(
                f"{taken} take{'s' * (len(ends) == 1)} all {num_layers} layers, so"
                f" {counted(ranks, 'pipeline stage')} (pp {self.pp}) would be empty, which"
                f" Megatron refuses; give the {' or '.join(ends)} stage fewer layers"
            )
        if given and not ranks and self.vpp > 1:
            raise UsageError(
                "layers of the first and last stage at pp 2 with virtual stages: Megatron divides"
                f" by zero; use {layout}"
            )
        per_rank = [given.get(p, left // ranks if ranks else 0) for p in range(self.pp)]
        if any(n % self.vpp for n in per_rank):
            raise UsageError(
                f"the pipeline ranks have {per_rank} layers, which vpp {self.vpp} does not divide;"
                f" choose a --vpp that divides each, or give {layout}"
            )
        counts = [[n // self.vpp] * self.vpp for n in per_rank]
        counts[0][0] -= self.account_for_embedding
        counts[-1][-1] -= self.account_for_loss
        if counts[0][0] < 0 or counts[-1][-1] < 0:
            raise UsageError(
                f"{what}: no room for embedding or loss in a stage of {per_rank[0] // self.vpp}"
                " layers"
            )
        return counts

    def _counts_of_layout(self, layout: str, num_layers: int, mtp_layers: int) -> list[list[int]]:
        stages = _parse_layout(layout)
        if len(stages) != self.pp * self.vpp:
            raise UsageError(
                f"the layout {layout!r} has {len(stages)} stages; pp {self.pp} x vpp"
                f" {self.vpp} need {self.pp * self.vpp}"
            )
        flat = "".join(stages)
        layers, mtp = flat.count("t"), flat.count("m")
        if layers != num_layers:
            raise UsageError(
                f"the layout {layout!r} has {counted(layers, 'decoder layer')} (t), but"
                f" the model has {num_layers}"
            )
        if flat.count("E") + flat.count("L") != 2 or flat[0] + flat[-1] != "EL":
            raise UsageError(
                f"the layout {layout!r} must begin with its only E (embedding) and end"
                " with its only L (loss)"
            )
        if mtp != mtp_layers:
            raise UsageError(
                f"the layout {layout!r} has {counted(mtp, 'MTP layer')} (m), but the"
                f" model has {mtp_layers}; all MTP layers must be in one stage"
            )
        if sum("m" in stage for stage in stages) > 1:
            raise UsageError(
                f"the layout {layout!r} has MTP layers (m) in several stages; all"
                f" {mtp_layers} must be in one stage"
            )
        return [
            [stages[v * self.pp + p].count("t") for v in range(self.vpp)] for p in range(self.pp)
        ]

    def files(self, experts: bool, saved: bool = False) -> list[tuple[int, int]]:
        """Returns, in order, the (tp rank, ep rank) of the files that the ranks of one pipeline
        stage read from a `torch` checkpoint.

        They are {(r % TP, (r // ETP) % EP)} over the ranks r of one stage; with ETP != TP that is
        less than TP x EP.

        saved: return only the files that Megatron-LM itself writes. The first rank of each
            data-parallel group, dense or of experts, writes one. If TP and ETP x EP do not divide
            each other, its ranks read more files than it writes (checkpointing.py
            get_checkpoint_name, save_checkpoint; Megatron-Core, RankGenerator).

        Raises UsageError if one file would hold two shards of an expert.
        """
        if not experts:
            return [(t, 0) for t in range(self.tp)]
        etp = self.expert_tp
        if self.tp % etp:
            raise UsageError(
                f"etp {etp} does not divide tp {self.tp}: one file would hold two shards of an"
                " expert; use --format torch_dist"
            )
        ranks = max(self.tp, etp * self.ep) if saved else math.lcm(self.tp, etp * self.ep)
        return sorted({(r % self.tp, (r // etp) % self.ep) for r in range(ranks)})

    def check(self, num_experts: int) -> None:
        """Raises UsageError if the sizes do not fit a model with that many experts (0: dense)."""
        if self.ep > 1 and num_experts == 0:
            raise UsageError(f"ep {self.ep}: this model has no experts; leave --ep out")
        if num_experts and num_experts % self.ep:
            raise UsageError(
                f"{num_experts} experts are not divisible by ep {self.ep}; choose an --ep that"
                f" divides {num_experts}"
            )

    def directory(self, tp: int, pp: int, ep: int) -> str:
        """Returns the name of one rank's directory: `mp_rank_TT[_PPP][_EEE]`."""
        return (
            f"mp_rank_{tp:02d}"
            + (f"_{pp:03d}" if self.pp > 1 else "")
            + (f"_{ep:03d}" if self.ep > 1 else "")
        )

    @classmethod
    def of_args(cls, args: dict[str, Any]) -> Parallel:
        """Reads the sizes from a checkpoint's args."""
        layout = args.get("pipeline_model_parallel_layout")
        if isinstance(layout, dict):  # Megatron stores an object, which has the original string
            layout = layout.get("input_data")
        if isinstance(layout, (list, tuple)):
            short = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}
            layout = "|".join("".join(short.get(str(x), str(x)) for x in stage) for stage in layout)
        tp, pp = (
            args.get("tensor_model_parallel_size") or 1,
            args.get("pipeline_model_parallel_size") or 1,
        )
        return cls(
            tp=tp,
            pp=pp,
            vpp=1 if pp == 1 else args.get("virtual_pipeline_model_parallel_size") or 1,
            ep=args.get("expert_model_parallel_size") or 1,
            etp=(
                None
                if args.get("expert_tensor_parallel_size") == tp
                else args.get("expert_tensor_parallel_size")
            ),
            first_stage_layers=args.get("decoder_first_pipeline_num_layers"),
            last_stage_layers=args.get("decoder_last_pipeline_num_layers"),
            account_for_embedding=bool(args.get("account_for_embedding_in_pipeline_split")),
            account_for_loss=bool(args.get("account_for_loss_in_pipeline_split")),
            layout=layout,
        )

    def args(self) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tp,
            "decoder_first_pipeline_num_layers": self.first_stage_layers,
            "decoder_last_pipeline_num_layers": self.last_stage_layers,
            "account_for_embedding_in_pipeline_split": self.account_for_embedding,
            "account_for_loss_in_pipeline_split": self.account_for_loss,
            "pipeline_model_parallel_layout": self.layout,
        }

    def with_(self, **sizes: Any) -> Parallel:
        """Returns a copy with other sizes; None and False keep the present value.

        Another pp or layout removes the present uneven split.
        """
        given = {k: v for k, v in sizes.items() if v is not None and v is not False}
        base = self
        if any(k in given and given[k] != getattr(self, k) for k in _SPLIT):
            base = Parallel(tp=self.tp, pp=self.pp, ep=self.ep, etp=self.etp)
            given.setdefault(
                "vpp",
                self.vpp if given.get("pp", self.pp) == self.pp and "layout" not in given else 1,
            )
        return replace(base, **given)

    def __str__(self) -> str:
        shown = [f"tp {self.tp}", f"pp {self.pp}"]
        shown += [f"{name} {n}" for name in ("vpp", "ep") if (n := getattr(self, name)) > 1]
        shown += [f"etp {self.etp}"] * (self.expert_tp != self.tp)
        for end, layers in (("first", self.first_stage_layers), ("last", self.last_stage_layers)):
            if layers is not None:
                shown.append(f"{counted(layers, 'layer')} in the {end} stage")
        for part in ("embedding", "loss"):
            shown += [f"the {part} counts as a layer"] * getattr(self, f"account_for_{part}")
        shown += [f"layout {self.layout}"] * (self.layout is not None)
        if self.stage_sizes is not None and len(set(self.stage_sizes)) > 1:
            shown.append(f"stages of {', '.join(map(str, self.stage_sizes))} layers")
        return ", ".join(shown)


def _parse_layout(text: str) -> list[str]:
    """Returns the stages of a layout string: "Et*3|(tt|)*2L" -> ["Ettt", "tt", "tt", "L"].

    E is the embedding, t a decoder layer, m an MTP layer, L the loss.
    """
    if not isinstance(text, str) or len(text) > MAX_STAGES:
        raise UsageError(
            f"the layout {str(text)[:60]!r} is not text of at most {MAX_STAGES:,} characters"
        )
    out, left = text.replace(",", ""), 64 * MAX_STAGES

    def unrolled(m: re.Match[str]) -> str:
        nonlocal left
        left -= len(m[1]) * int(m[2])
        if left < 0:
            raise UsageError(
                f"the layout {text[:60]!r} unrolls to more than {64 * MAX_STAGES:,} characters"
            )
        return m[1] * int(m[2])

    # unroll groups first, as Megatron does
    for group in (r"\(([^)]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        out = re.sub(group, unrolled, out)
    stages = out.split("|")
    if len(stages) > MAX_STAGES:
        raise UsageError(
            f"the layout {text[:60]!r} has {len(stages):,} stages, and at most {MAX_STAGES:,} are"
            " read"
        )
    for stage in stages:
        if set(stage) - set("EtmL"):
            raise UsageError(
                f"the layout {text!r}: stage {stage!r} contains other characters than E, t, m and L"
            )
    return stages
