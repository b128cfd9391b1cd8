"""The options of mckpt, each stated once: its name, type, values, bounds, default and help.

A table is a dataclass whose fields are options. The code reads the fields. The command line makes
its options from the tables, and the Python API its keywords, their checks and their explanation.
Errors name an option as the command line does; in a program they name the keyword.
"""

# Without `from __future__ import annotations`: the types of the fields are read.
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from msgspec import Struct, structs

from mckpt import errors
from mckpt.errors import UsageError
from mckpt.geometry.parallel import Parallel
from mckpt.values import dtypes

T = TypeVar("T", bound="Table")


class Section(str):
    """The title of a section of the help. A call makes an option in it, as a field of a table."""

    def __call__(self, help: str, default: Any = None, flags: str = "", **facts: Any) -> Any:
        """facts: further fields of `Option`."""
        return Option(self, help, default, tuple(flags.split()), **facts)


# Sections of the help. An option in a section of a target has no effect on targets of the other.
MODEL = Section("Describing the model")
READING = Section("Reading a Megatron checkpoint")
HUGGING_FACE = Section("Writing a Hugging Face directory")
MEGATRON = Section("Writing a Megatron checkpoint")
PARALLEL = Section("Parallel sizes")
CONVERSION = Section("Conversion")
SUMMING = Section("Weighted sum")
COMPARISON = Section("Comparison")
RUN = Section("Run on Megatron-Core")
DATA = Section("Steps and data")
OPTIMIZER = Section("Optimizer")
SAVING = Section("Saving")
LIVE = Section("Running models")
PLAIN = Section()  # of a command whose help has no sections


class Option(NamedTuple):
    """One option: a field of a table, a keyword of the API, and an option of the command line."""

    section: Section
    help: str
    default: Any
    flags: tuple[str, ...]  # of the command line; the second one of a bool sets False
    name: str = ""  # of the field and of the keyword
    kinds: tuple[Any, ...] = ()  # the types of its values, beside None
    choices: tuple[str, ...] = ()  # the possible texts; of a bool, those for False and True
    least: int = 0  # the smallest number
    word: str | None = None  # stands for the value in the help
    path: str = ""  # "file" or "directory"
    must: str = ""  # describes the values in an error
    read: Callable[["Option", Any], Any] | None = None  # checks a value, and may replace it

    def checked(self, value: Any) -> Any:
        """Returns the value that a field gets. Raises UsageError for a wrong one."""
        if value is None and self.default is None:
            return None
        if self.read:
            return self.read(self, value)
        if not any(self._fits(kind, value) for kind in self.kinds):
            raise self.refusal(value)
        return value

    def _fits(self, kind: Any, value: Any) -> bool:
        if get_origin(kind) is Literal:
            return value in get_args(kind)
        if kind is float:
            return type(value) in (int, float)
        if kind is int:
            return type(value) is int and value >= self.least
        return isinstance(value, kind)

    def refusal(self, value: Any) -> UsageError:
        return UsageError(f"{self.name} is {value!r}, and must be {self.must or self.listed}")

    @property
    def listed(self) -> str:
        """Returns the possible values in words."""
        if self.choices and self.kinds != (bool,):
            *most, last = self.choices
            return f"{', '.join(most)} or {last}"
        numbers = f"a whole number from {self.least} on"
        words = {bool: "True or False", int: numbers, float: "a number"}
        return words.get(self.kinds[0], f"a {self.path or 'text'}")

    def spelled(self, value: Any) -> str:
        """Returns the option and its value on the command line; without a value that is a number
        there.
        """
        if self.kinds == (bool,):
            flag = self.flags[0 if value or self.choices else 1]
            return f"{flag} {self.choices[value]}" if self.choices else flag
        return f"{self.flags[0]} {value}" if isinstance(value, str | Path) else self.flags[0]


@functools.cache
def options_of(table: Any) -> dict[str, Option]:
    found: dict[str, Option] = {}
    kinds: dict[str, Any] = {}
    for base in reversed(table.__mro__):
        kinds |= getattr(base, "__annotations__", {})
    for name, option in zip(table.__struct_fields__, table.__struct_defaults__, strict=True):
        if isinstance(option, Option):
            union = get_origin(kinds[name]) in (Union, UnionType)
            every = get_args(kinds[name]) if union else (kinds[name],)
            own = tuple(kind for kind in every if kind is not type(None))
            found[name] = option._replace(
                name=name,
                kinds=own,
                flags=option.flags or (f"--{name.replace('_', '-')}",),
                choices=get_args(own[0]) if get_origin(own[0]) is Literal else option.choices,
            )
    return found


class Table(Struct, frozen=True):
    """A table of options. Raises UsageError for a value that an option cannot have."""

    def __post_init__(self) -> None:
        for name, option in self._options.items():
            value = getattr(self, name)
            given = option.default if isinstance(value, Option) else value
            structs.force_setattr(self, name, option.checked(given))

    @classmethod
    def of(cls: type[T], given: Mapping[str, Any], **more: Any) -> T:
        """Returns the table with those of `given` that are its fields and not None, and `more`."""
        names = cls.__struct_fields__
        return cls(**{n: given[n] for n in names if given.get(n) is not None} | more)

    def with_(self: T, **changes: Any) -> T:
        return structs.replace(self, **changes)

    def values(self) -> dict[str, Any]:
        return structs.asdict(self)

    @property
    def _options(self) -> dict[str, Option]:
        table: Any = type(self)
        return options_of(table)

    def spelled(self, name: str) -> str:
        """Returns an option and its value on the command line, such as "--quantize fp8"."""
        return self._options[name].spelled(getattr(self, name))

    def given(self, section: str) -> Iterator[str]:
        """Yields the options of a section that do not have their default, as `spelled` does."""
        plain = type(self)()
        for name, option in self._options.items():
            if option.section == section and getattr(self, name) != getattr(plain, name):
                yield self.spelled(name)


# ---------------------------------------------------------------------------- values that are read


def _size(option: Option, value: Any) -> int:
    from mckpt.values.sizes import parse_size

    return parse_size(value, option.flags[0])


def _bytes(option: Option, value: Any) -> int:
    from mckpt.values.sizes import parse_size

    return parse_size(value, option.name)  # no command has the option


def _tolerance(option: Option, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise UsageError(f"{option.flags[0]} {value!r} must be a finite number, at least 0")
    return float(value)


def _names(option: Option, listed: Any) -> tuple[str, ...]:
    names = tuple(listed) if isinstance(listed, Iterable) else (listed,)
    if isinstance(listed, str) or not all(isinstance(name, str) for name in names):
        raise option.refusal(listed)
    return names


def _numbers(option: Option, given: Any) -> tuple[float, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    try:
        numbers = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise UsageError(f"{option.flags[0]} {given!r}: give finite numbers, such as 0.5,0.5")
    return numbers


def _parameters(option: Option, given: Any) -> Mapping[str, float | tuple[float, ...]]:
    words = {"true": 1.0, "false": 0.0}
    try:
        pairs = given
        if isinstance(given, str):
            pairs = dict(part.split("=", 1) for part in given.split(","))
        return {
            str(name): tuple(map(float, value))
            if isinstance(value, list | tuple)
            else float(words.get(str(value).lower(), value))
            for name, value in pairs.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise UsageError(
            f"{option.flags[0]} {given!r}: give NAME=VALUE,..., such as density=0.5,lambda=1.2"
        ) from None


def _dims(option: Option, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise option.refusal(given)
    if given:
        from mckpt.mapping import schema

        for name in given.keys() - schema().dims.keys():
            raise UsageError(
                f"settings: {name!r} is not the name of a dim; `mckpt mappings show logical` lists"
                " the dims"
            )
    return given


def _dtype(option: Option, name: Any) -> str:
    if (found := dtypes.parse(str(name))) not in ("bfloat16", "float16", "float32"):
        raise option.refusal(name)
    return found


def _as_given(option: Option, name: Any) -> str:
    _dtype(option, name)
    return str(name)


# ----------------------------------------------------------------------------------------- tables


_SETTINGS = MODEL(
    "Correct one hyperparameter, such as mtp_layers=0 (names: mappings/logical.yaml). For a"
    " Hugging Face source the tensors must agree with it; for a Megatron source it replaces the"
    " arg. May be repeated.",
    {},
    "--set",
    word="DIM=VALUE",
    must="a dict of dims",
    read=_dims,
)


class SourceOptions(Table, frozen=True):
    """The user's description of a checkpoint.

    For a Megatron checkpoint, `vocab_size` and `settings` replace its args.
    """

    like: str | Path | None = MODEL(
        "Hugging Face directory of the same model; its config.json describes the model.",
        path="directory",
    )
    family: str | None = MODEL(
        "Family of the model (see `mckpt mappings list`), if neither config.json nor mckpt.json"
        " determines it.",
        word="NAME",
    )
    mapping: str | None = MODEL("A family file (YAML) of your own.", path="file")
    vocab_size: int | None = MODEL("Rows of the embedding without padding.", least=1)
    settings: Mapping[str, Any] = _SETTINGS
    iteration: int | None = READING(
        "Iteration to read. Without it, the one that the tracker file names."
    )
    no_mtp: bool = MODEL("Leave out the layers of multi-token prediction.", False)
    # the dims replace those of config.json unchecked, because no tensor is stored yet
    trusted: bool = False

    @property
    def family_name(self) -> str | None:
        return self.mapping or self.family

    @property
    def dims(self) -> dict[str, Any]:
        vocabulary = {} if self.vocab_size is None else {"vocab_size": self.vocab_size}
        return {**self.settings, **vocabulary}


class SizeOptions(Table, frozen=True):
    """The parallel layout of a Megatron checkpoint: fields of `Parallel`, which checks them."""

    tp: int | None = PARALLEL("Tensor-parallel size.", least=1)
    pp: int | None = PARALLEL("Pipeline-parallel size.", least=1)
    vpp: int | None = PARALLEL("Virtual stages of each pipeline rank.", least=1)
    ep: int | None = PARALLEL("Expert-parallel size.", least=1)
    etp: int | None = PARALLEL("Tensor-parallel size of the experts. Without it, tp.", least=1)
    first_stage_layers: int | None = PARALLEL(
        "Number of layers of the first stage.", flags="--decoder-first-pipeline-num-layers", least=1
    )
    last_stage_layers: int | None = PARALLEL(
        "Number of layers of the last stage.", flags="--decoder-last-pipeline-num-layers", least=1
    )
    account_for_embedding: bool = PARALLEL(
        "Count the embedding as a layer.", False, "--account-for-embedding-in-pipeline-split"
    )
    account_for_loss: bool = PARALLEL(
        "Count the loss as a layer.", False, "--account-for-loss-in-pipeline-split"
    )
    layout: str | None = PARALLEL(
        "The layers of every stage, such as 'Ettt|(tt|)*6tL'.",
        flags="--pipeline-model-parallel-layout",
        word="LAYOUT",
    )


class TargetOptions(Table, frozen=True):
    """The form of the new checkpoint: its format, and the options of its contents.

    Which of them a conversion takes depends on its source and format: `refusals.refuse_options`
    decides.
    """

    format: str = CONVERSION("Format of the new checkpoint.", "torch_dist")
    parallel: Parallel = PARALLEL(
        "All sizes at once, such as those of another checkpoint.",
        Parallel(),
        must="a mckpt.Parallel",
    )
    dtype: str | None = CONVERSION(
        "Cast every tensor. Without it, each tensor keeps its dtype.",
        choices=("bf16", "fp16", "fp32"),
        read=_as_given,
    )
    transformer_impl: Literal["transformer_engine", "local"] | None = MEGATRON(
        "Layer spec whose parameter names are written: Transformer Engine's, or the local one of"
        " Megatron-Core. Without it, the source's; from Hugging Face, transformer_engine."
    )
    grouped_experts: bool | None = MEGATRON(
        "Mixtures of experts only: store experts as --moe-grouped-gemm does, or one module for"
        " each. Without it, as in the source; for a Hugging Face source or with --transformer-impl,"
        " grouped for transformer_engine and sequential for local.",
        flags="--grouped-experts --sequential-experts",
    )
    divisible_by: int | None = MEGATRON(
        "Pad the vocabulary to a multiple of N times tp.",
        flags="--make-vocab-size-divisible-by",
        least=1,
    )
    dialect: str | None = MEGATRON(
        "Names of the tensors: gpt for Megatron's GPTModel, hybrid for its HybridModel, which"
        " megatron-core has from 0.18 on.",
        word="NAME",
    )
    towers: Literal["beside", "bridge", "swift"] | None = MEGATRON(
        "Multimodal models: where the towers of images and sound are. beside: in DST/hf,"
        " unchanged, and the checkpoint is the text model; bridge, swift: in the checkpoint,"
        " which is the whole model of Megatron-Bridge or of ms-swift. Without it, as in the source;"
        " from Hugging Face, beside."
    )
    layer_keys: Literal["stacked", "per_layer"] | None = MEGATRON(
        "torch_dist only: one key for all layers, or one for each layer. Without it, the model's"
        " args decide."
    )
    common_as_object: bool = MEGATRON(
        "torch_dist only: where to store args and iteration. file writes common.pt, which every"
        " version reads; object stores them inside the checkpoint, as megatron-core 0.19 does.",
        False,
        "--common-state",
        choices=("file", "object"),
    )
    target_iteration: int | None = MEGATRON("Write iter_N instead of release.", least=1)
    allow_inexact: Iterable[str] = CONVERSION(
        "Convert a model with a feature that the target cannot represent exactly. The error about"
        " the feature prints its NAME. May be repeated.",
        (),
        word="NAME",
        must="a list of names",
        read=_names,
    )
    no_optimizer: bool = MEGATRON(
        "Write the weights only; leave out optimizer and random states.", False
    )
    tokenizer: str | Path | None = HUGGING_FACE(
        "Directory from which the tokenizer and other side files are copied.", path="directory"
    )
    no_adapter: bool = CONVERSION(
        "Convert the weights alone where a Hugging Face directory has an adapter (LoRA) too.", False
    )
    # In bytes. Two writers of one inode wait for each other, so a small model too should have
    # several files, for several threads.
    max_shard_size: int = HUGGING_FACE(
        "Size of the largest safetensors file.", "2GB", word="SIZE", read=_size
    )
    keep_padding: bool = CONVERSION(
        "Keep all rows of the padded vocabulary. Without it, a Megatron target has the rows that"
        " Megatron computes for its tp, and a Hugging Face target has none.",
        False,
    )
    run_config: bool = MEGATRON(
        "torch_dist only: write run_config.yaml too, from which Megatron-Bridge loads the"
        " checkpoint. Its trainer then decides which models are exact. reshard keeps this file of"
        " its source without the option too.",
        False,
    )
    quantize: Literal["fp8", "mxfp8", "nvfp4"] | None = HUGGING_FACE(
        "Quantise the weights of linear layers: fp8 is float8_e4m3fn with one scale for each block"
        " of 128 x 128, mxfp8 with a power of two for each 1 x 32; nvfp4 is numbers of 4 bits with"
        " a scale for each 1 x 16, and one for each tensor (docs/hugging-face.md)."
    )
    megatron_version: str | None = MEGATRON(
        "The megatron-core that will load the checkpoint, such as 0.16 or 0.19.2. Without it, the"
        " newest version that mckpt knows and that loads the format.",
        word="VERSION",
        must="a text such as '0.19'",
    )


class PlaceOptions(Table, frozen=True):
    """The options of a conversion that concern the files at its destination."""

    overwrite: bool = CONVERSION(
        "Replace an existing checkpoint once the new one is complete. In an object store the old"
        " one is removed earlier, before the first file of the new one is sent.",
        False,
    )
    update_tracker: bool = MEGATRON(
        "Make the tracker file name this checkpoint even if it now names a later iteration.", False
    )


class RunOptions(Table, frozen=True):
    """The options of a run of a plan. Raises UsageError for less memory than the threads need."""

    max_memory: int = CONVERSION(  # bytes
        "Size of all buffers together, such as 500MB, 64MiB or 2Gi; at least 512KiB for each"
        " thread.",
        "64MiB",
        word="SIZE",
        read=_size,
    )
    threads: int = CONVERSION("Number of copy threads; 0 chooses automatically.", 0)
    checksum: Literal["crc32", "sha256", "none"] = CONVERSION(
        "Checksum of each file, stored in mckpt.json.", "crc32"
    )
    allow_overflow: bool = CONVERSION(
        "Let values that are too large for fp16, or that large scales of quantised weights make"
        " infinite, become infinite.",
        False,
    )
    resume: bool = CONVERSION(
        "Continue an interrupted run of the same command.", True, "--resume --no-resume"
    )
    check_replicas: bool = READING(
        "Check that the copies of a tensor that several ranks store are equal.", False
    )
    engine: Literal["local", "ray"] = CONVERSION(
        "local: this process and its workers copy. ray: the nodes of the Ray cluster that"
        " RAY_ADDRESS names copy; if it is not set, a cluster on this machine.",
        "local",
    )

    def __post_init__(self) -> None:
        from mckpt.values.sizes import refuse_little

        super().__post_init__()
        refuse_little(self.max_memory, self.threads)


class AdapterOptions(Table, frozen=True):
    """Options for reading an adapter (LoRA) of PEFT and for writing it for Megatron."""

    how: Literal["fused", "block", "canonical", "swift", "swift-block"] | None = CONVERSION(
        "How linears that pack several weights (q, k and v; gate and up) are adapted. fused: by one"
        " adapter, whose factor A all of them share. canonical: each by its own adapter"
        " (CanonicalLoRA). block: by one adapter with the sum of their ranks, which computes the"
        " same. Without it, fused, or canonical if the weights have different factors A. swift,"
        " swift-block: as fused and block, in the form of ms-swift instead of Megatron-Bridge,"
        " without the weights.",
        flags="--layout",
    )
    expert_a: Literal["input", "output"] | None = READING(
        "Of an adapter of PEFT with square matrices of experts in one parameter: the side that the"
        " factor A multiplies. Without it, peft_version or other shapes decide."
    )
    expert_b: Literal["rank_major", "grouped_by_expert"] | None = READING(
        "Of an adapter of PEFT with experts in one parameter: the order of the columns of the"
        " factor B. grouped_by_expert is that of Unsloth before September 2026. Without it,"
        " lora_B_layout of adapter_config.json decides, else rank_major."
    )


Method = Literal[
    "linear",
    "task_arithmetic",
    "slerp",
    "nuslerp",
    "multislerp",
    "karcher",
    "model_stock",
    "ties",
    "dare_linear",
    "dare_ties",
    "breadcrumbs",
    "breadcrumbs_ties",
]


class AverageOptions(Table, frozen=True):
    """Options of a weighted sum of checkpoints: the coefficients, and the iterations of a run."""

    weights: str | Iterable[float] | None = SUMMING(
        "The coefficient of each checkpoint, in their order, such as 0.5,0.3,0.2; may be negative."
        " Without it and --schedule, all have the same, and the sum 1. Of a method with a base"
        " model, those of the others; all 1 without it.",
        word="W,W,...",
        read=_numbers,
    )
    schedule: Literal["linear", "minus-sqrt"] | None = SUMMING(
        "Coefficients that stand for the decay of the learning rate at the end of a run, as"
        " weighted_merge.py of Megatron-LM has them; the oldest checkpoint comes first."
    )
    reverse: bool = SUMMING("Take the coefficients of --schedule in reverse.", False)
    normalize: bool = SUMMING("Divide the coefficients by their sum.", False)
    summed: Literal["weights", "masters", "states"] = SUMMING(
        "weights: the sum of the weights. masters: that of the fp32 master copies of an optimizer,"
        " so that each weight is rounded once. states: the same, and the optimizer's states are"
        " summed too.",
        "weights",
        flags="--from",
    )
    method: Method | None = SUMMING(
        "A method of mergekit in the place of the sum. The first checkpoint is the base model, if"
        " the method has one.",
        word="NAME",
    )
    parameters: str | Mapping[str, Any] | None = SUMMING(
        "Parameters of --method, such as density=0.5,lambda=1.2.",
        word="NAME=VALUE,...",
        read=_parameters,
    )
    arithmetic: Literal["float32", "mergekit"] = SUMMING(
        "float32: round once. mergekit: round as mergekit does, for the methods linear and"
        " task_arithmetic.",
        "float32",
    )
    recipe: str | Path | None = SUMMING(
        "A file of mergekit (YAML) with the method, its parameters and the checkpoints.",
        path="file",
    )
    start: int | None = SUMMING("Of one run: the first iteration that may be taken.")
    end: int | None = SUMMING("Of one run: the last iteration that may be taken.")
    window: float | None = SUMMING(
        "Of one run: take the iterations of the last billions of tokens, by seq_length and"
        " global_batch_size of its args.",
        word="BILLIONS",
    )
    min_interval: int | None = SUMMING(
        "Of one run: take iterations that are at least N apart, from the last one backward.",
        least=1,
    )


class VerifyOptions(Table, frozen=True):
    """The level of a verification, the sizes of the run, and the other options.

    Sizes that are None are those of the checkpoint for `torch` files, else 1.
    """

    level: Literal["bytes", "forward", "train"] = COMPARISON(
        "bytes compares tensors. forward also compares logits. train also compares the losses of a"
        " few steps at two parallel layouts.",
        "forward",
    )
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    cp: int = PARALLEL("Context-parallel size; needs Transformer Engine.", 1, least=1)
    device: Literal["auto", "cpu", "cuda"] = RUN(
        "Device that runs the model; auto takes cuda if there are enough GPUs.", "auto"
    )
    transformer_impl: Literal["auto", "transformer_engine", "local"] = RUN(
        "Implementation of the layers; auto takes transformer_engine if it is installed.", "auto"
    )
    sequences: int = COMPARISON("Number of random sequences, from fixed seeds.", 4, least=1)
    length: int = COMPARISON(
        "Tokens in a random sequence, at most those that the model allows.", 512, least=2
    )
    tokens: str | Path | None = COMPARISON(
        "More sequences of token ids: a text file with one JSON list a line, or .npy.", path="file"
    )
    adapter: str | Path | None = COMPARISON(
        "An adapter (LoRA) of PEFT that MEGATRON has merged into the weights of HF, or holds"
        " alone.",
        path="directory",
    )
    image: bool = COMPARISON(
        "Also run an image of noise: compare the logits at the places of the image and of the text"
        " around it.",
        False,
    )
    alpha: float | None = READING(
        "The alpha of the adapters of a Megatron checkpoint, if neither run_config.yaml nor"
        " mckpt.json states it."
    )
    iteration: int | None = None
    vocab_size: int | None = None
    family: str | None = None
    mapping: str | None = None
    settings: Mapping[str, Any] = _SETTINGS
    no_mtp: bool = False
    steps: int = COMPARISON("Number of steps at --level train.", 4, least=2)
    timeout_s: float = 1800.0  # limit of one collective
    keep: str | Path | None = None  # directory for the arrays of both sides; None: they are removed
    tell: Callable[[str], None] = lambda text: None  # called with each phase when it starts

    @property
    def described(self) -> SourceOptions:
        return SourceOptions.of(self.values())


class CompareOptions(Table, frozen=True):
    """The options of a comparison of two checkpoints."""

    atol: float | None = PLAIN(
        "Largest difference allowed. Without it, every bit must be equal.",
        word="X",
        read=_tolerance,
    )
    no_optimizer: bool = PLAIN(
        "Compare the weights only, not the optimizer state that both have.", False
    )
    allow_overflow: bool = PLAIN(
        "Compare values that large scales of quantised weights make infinite.", False
    )


class PushOptions(Table, frozen=True):
    """The options of an upload to the Hugging Face Hub."""

    revision: str | None = PLAIN(
        "Branch to write; it is created if needed. Without the option, main. {iteration}, as in"
        " iter_{iteration}, stands for the iteration from which the export was made.",
        word="BRANCH",
    )
    private: bool = PLAIN(
        "If the repository does not exist yet, create a private one.",
        False,
    )
    message: str | None = PLAIN("Message of the commit.", word="TEXT")
    dry_run: bool = PLAIN("Print what would be uploaded; send nothing.", False)


class DeltaOptions(Table, frozen=True):
    """The form of a delta between two checkpoints."""

    encoding: Literal["xor", "overwrite"] = PLAIN(
        "xor: the new bytes XOR the old ones, which is smaller. overwrite: positions and new bytes,"
        " which may be applied twice.",
        "xor",
    )
    digest: Literal["xxh3-128", "blake3", "adler32"] = PLAIN(
        "Digest of each tensor, which whoever applies the delta compares.", "xxh3-128"
    )


class LoadOptions(Table, frozen=True):
    """The options of filling a live model."""

    max_memory: int = LIVE("Bytes of all buffers of one rank, on the host.", "512MiB", read=_size)
    threads: int = LIVE("Threads of one rank; 0 means one for each of its cores, at most 4.", 0)
    broadcast: bool = LIVE(
        "Of the ranks that hold the same parameters, each reads a part and sends it to the others.",
        False,
    )
    load_optimizer: bool = LIVE("Fill the state of the optimizer too.", False)
    adapter: str | Path | None = LIVE(
        "Fill the adapters (LoRA) of the model too, from a directory of PEFT or from a Megatron"
        " checkpoint.",
        path="directory",
    )
    keep_masters: bool = LIVE(
        "Load without an optimizer, although parameters have master copies of one.", False
    )


_LIVE_ADAPTER = LIVE(
    "Of a model with adapters (LoRA): merged gives the weights with their products, none without"
    " them, and only gives the adapter.",
    "merged",
)


class SaveOptions(Table, frozen=True):
    """The options of saving a live model, beside those of a conversion and of its run."""

    background: bool = LIVE(
        "Return when the weights are copied to the host, and write while the model is used.", False
    )
    adapter: Literal["merged", "only", "none"] = _LIVE_ADAPTER


class SyncOptions(Table, frozen=True):
    """The options of gathering the Hugging Face tensors of a live model."""

    bucket_bytes: int | None = LIVE(
        "The most bytes that are sent at once, and that one tensor has.", read=_bytes
    )
    dtype: str | None = LIVE("Cast every tensor.", choices=("bf16", "fp16", "fp32"), read=_as_given)
    quantize: Literal["fp8", "mxfp8", "nvfp4"] | None = LIVE(
        "Quantise the weights of linear layers."
    )
    slices: bool = LIVE("Yield a Slice for each tensor, so that a larger one has several.", False)
    adapter: Literal["merged", "only", "none"] = _LIVE_ADAPTER
    allow_inexact: Iterable[str] = LIVE(
        "As for a conversion.", (), must="a list of names", read=_names
    )
    allow_overflow: bool = LIVE("As for the run of a conversion.", False)
    snapshot: bool = LIVE("Each call first copies the weights of this rank on its device.", False)
    delta: Literal["host", "device"] | None = LIVE(
        "Yield what changed since the call before, which is kept there."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta and (self.slices or self.quantize):
            raise UsageError("delta: has whole tensors of one dtype; leave out slices, quantize")
        if self.adapter == "only" and (self.dtype or self.quantize):
            raise UsageError(
                "adapter='only': its tensors keep their dtype; leave out dtype, quantize"
            )


class TrainOptions(Table, frozen=True):
    """The options of a training run; the checkpoint's args describe the model."""

    steps: int = DATA(
        "Total number of steps. With --resume it includes the steps of the earlier run.",
        10,
        least=1,
    )
    resume: bool = DATA(
        "Continue with the optimizer, schedule and iteration of the checkpoint.", False
    )
    data: str | None = DATA(
        "Megatron .bin/.idx (the path without suffix), or .jsonl with tokens or text. Without it,"
        " text that mckpt generates.",
        word="PATH",
    )
    tokenizer: str | None = DATA(
        "Directory of the tokenizer, for .jsonl with text.", path="directory"
    )
    global_batch_size: int = DATA("Sequences in a step.", 8, least=1)
    micro_batch_size: int = DATA("Sequences that one rank computes at once.", 1, least=1)
    seq_length: int | None = DATA("Tokens in a sequence. Without it, the checkpoint's.", least=2)
    seed: int = DATA("Seed of the data order.", 1234, least=-(2**63), word="N")
    lr: float = OPTIMIZER("Largest learning rate.", 1e-4, word="X")
    min_lr: float = OPTIMIZER("Learning rate at the end of the decay.", 0.0, word="X")
    warmup: int = OPTIMIZER("Steps of linear warmup, after which the rate follows a cosine.", 0)
    decay_steps: int | None = OPTIMIZER(
        "Steps over which the learning rate falls. Without it, --steps.", least=1
    )
    weight_decay: float = OPTIMIZER("Weight decay of AdamW.", 0.01, word="X")
    clip_grad: float = OPTIMIZER("Largest norm of the gradient; 0 does not clip.", 1.0, word="X")
    # float32 compares curves to many digits; float16 scales the loss, by the args of the checkpoint
    dtype: str = OPTIMIZER(
        "Dtype of the computation.", "bf16", choices=("bf16", "fp32"), read=_dtype
    )
    optimizer: str = "adam"  # or another of megatron-core, such as muon
    # False: every data-parallel rank has the whole state, as without --use-distributed-optimizer
    distributed_optimizer: bool = OPTIMIZER(
        "Shard the optimizer state over the data-parallel ranks.",
        True,
        "--distributed-optimizer --no-distributed-optimizer",
    )
    save: str | None = SAVING(
        "Save directory for weights and optimizer state. Without it, nothing is saved.",
        path="directory",
    )
    save_interval: int | None = SAVING(
        "Save every N steps. Without it, after the last step only.", least=1
    )
    format: str = SAVING("Format of the saved checkpoints.", "torch_dist")
    optimizer_format: Literal["fully_reshardable", "dp_reshardable"] = SAVING(
        "Layout in which torch_dist stores the state of a distributed optimizer.",
        "fully_reshardable",
    )


SIZES = tuple(options_of(SizeOptions))
# every option that is a keyword of a conversion or describes a checkpoint
TABLES = (SizeOptions, TargetOptions, PlaceOptions, RunOptions, SourceOptions)
_MORE = (
    *(LoadOptions, SaveOptions, SyncOptions, CompareOptions, PushOptions),
    *(VerifyOptions, AdapterOptions, DeltaOptions),
)


def explained(*tables: type) -> str:
    """Returns a line for each option of the tables, by section, in the words of the Python API."""
    lines: dict[str, list[str]] = {}
    for option in (one for table in tables for one in options_of(table).values()):
        text = f"{option.name}: {in_keywords(option.help)}"
        text += f" One of {option.listed}." * bool(option.choices)
        lines.setdefault(option.section, []).append(text)
    return "\n\n".join("\n".join([f"{title}:", "", *listed]) for title, listed in lines.items())


# ------------------------------------------------------------------------------- options in errors

# flags whose keyword no table has
_OTHERS = {"--to": "format"}
_VALUE = r"[A-Z_]{2,}\b|[A-Z]\b|\d[\w.]*|'[^']*'|[a-z_]+=[\w.]+|[a-z]\w*\b"
_ACCEPTED = re.compile(r"--allow-inexact [\w.]+(?: --allow-inexact [\w.]+)*")


@functools.cache
def _flags() -> tuple[dict[str, tuple[str, Option | None]], re.Pattern[str]]:
    """Returns the keyword and the option of each flag, and the pattern of an option in a text. The
    keyword of a flag without a value is such as "keep_padding=True".
    """
    found: dict[str, tuple[str, Option | None]] = {f: (name, None) for f, name in _OTHERS.items()}
    for option in (one for t in (*_MORE, *TABLES) for one in options_of(t).values()):
        for flag, value in zip(option.flags, (True, False), strict=False):
            plain = option.kinds == (bool,) and not option.choices
            keyword = f"{option.name}={value}" if plain else option.name
            found[flag] = keyword, option
            found.setdefault(f"--target-{flag[2:]}", found[flag])
    flags = "|".join(sorted(found, key=len, reverse=True))
    return found, re.compile(rf"({flags})(?![\w-])( (?:{_VALUE}))?")


def in_keywords(text: str) -> str:
    """Returns the text of an error with `--etp 1` as `etp=1`, and so on."""
    return _flags()[1].sub(_keyword, _ACCEPTED.sub(_accepted, text))


def _accepted(options: re.Match[str]) -> str:
    names = options[0].replace("--allow-inexact ", "").split()
    return f"allow_inexact={names}"


def _keyword(found: re.Match[str]) -> str:
    (keyword, option), value = _flags()[0][found[1]], (found[2] or "").strip()
    if not value:
        return keyword
    if option and value in option.choices:
        new = option.choices.index(value) == 1 if option.kinds == (bool,) else value
        return f"{keyword}={new!r}"
    # a word behind a flag is not its value
    if "=" in keyword or (value[0].islower() and "=" not in value):
        return f"{keyword} {value}"
    if keyword == "settings":
        name, _, new = value.partition("=")
        new = {"true": "True", "false": "False"}.get(new, new)
        return f"{keyword}={{{name!r}: {new}}}" if new else f"{keyword}={value}"
    return f"{keyword}={value}"


errors.in_keywords = in_keywords
