"""The model of a checkpoint: the mapping of its stored keys, its family, its dims and sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import structs

from mckpt import formats, mapping
from mckpt.checkpoint import description
from mckpt.checkpoint.files import CheckpointFiles
from mckpt.checkpoint.logical import Reader
from mckpt.errors import MappingError, MckptError, SourceError, UsageError
from mckpt.formats import carried
from mckpt.formats.base import FAMILY, Names
from mckpt.formats.hf_config import CONFIG, described_in, read_config
from mckpt.formats.megatron.run_config import (
    RUN_CONFIG,
    description_of,
    mapping_file,
    parallel_of,
    read_model,
    run_config_dims,
    run_config_text,
)
from mckpt.formats.megatron.save_directory import MAPPING
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, ExpressionError, MappingFile
from mckpt.options import SourceOptions
from mckpt.storage import manifest, sparse_copy
from mckpt.storage.staging import MANIFEST


@dataclass(frozen=True)
class ModelDescription:
    """The description of the model in a checkpoint, from all sources that have a part of it: the
    user's options, config.json, Megatron's args, run_config.yaml and mckpt.json.

    Each part is read when it is first used, so that a command needs only what it uses.
    """

    files: CheckpointFiles
    given_dims: Dims | None = None  # if set, replaces `stored_dims`
    unread: bool = True  # with the tensors that no layer computes with

    @cached_property
    def options(self) -> SourceOptions:
        """Returns the user's options. If they name no family, the result has the family file kept
        beside the checkpoint, or the family that its manifest records.

        Raises MappingError if the kept file is not the one that the manifest names.
        """
        options, recorded = self.files.options, self.files.manifest
        # --mapping may also give the name of a family that mckpt has
        if options.mapping and not options.mapping.endswith((".yaml", ".yml")):
            return options.with_(mapping=None, family=options.mapping)
        if options.mapping or options.family:
            return options
        like, kept = Path(options.like) if options.like else None, None
        if like is not None:
            kept = description.kept_mapping(like, manifest.read(like))
        if kept is None and self.files.side_directory is not None:
            kept = description.kept_mapping(self.files.side_directory, recorded)
        if kept is not None:
            return options.with_(mapping=str(kept))
        family = recorded.get("family")
        return options.with_(family=family) if family in mapping.names("hf") else options

    @cached_property
    def mapping(self) -> MappingFile:
        """Returns the family (Hugging Face) or dialect (Megatron) that names the stored keys."""
        if not self.files.is_megatron:
            return self._family_in(described_in(self.files.path))
        opened, own = self.files.opened, self.options.mapping
        if opened.format.trainer == FAMILY:
            if self.family is None:
                raise UsageError(
                    f"{opened.root}: no config.json describes its model; give --like HF_DIR, a"
                    " directory that has it"
                )
            beside = {"optimizer": "optimizer state"}
            return structs.replace(self.family, ignore={**self.family.ignore, **beside})
        if trainer := opened.format.trainer:
            return mapping.load("trainers", trainer)
        run = run_config_text(opened.root / RUN_CONFIG)
        dist = not opened.format.fixed_sizes

        def dialect_of(keys: Iterable[str]) -> MappingFile:
            return mapping.dialect_of(keys, own, run, dist)

        return self.whole_mapping(self._stored, dialect_of) or dialect_of(opened.keys())

    @cached_property
    def described_towers(self) -> set[str]:
        """Returns the keys of the towers in the directory of --like; none without its weights."""
        forms = self.family.forms.values() if self.family else ()
        keys = self._described_keys or ()
        return {key for key in keys if any(form.carries(key) for form in forms)}

    def _stored(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the stored tensors by key."""
        shown = self.files.opened.show(None).tensors
        return {key.rpartition("/")[2]: shape for key, _, shape, _ in shown}

    def whole_mapping(
        self,
        stored: Callable[[], Mapping[str, tuple[int, ...]]],
        dialect_of: Callable[[list[str]], MappingFile],
        trainer: str | None = None,
    ) -> MappingFile | None:
        """Returns the dialect of a whole multimodal model; None for a model without towers.

        stored: returns the shapes of its weights by key. trainer: the program of the adapters, if
        it has those of some weights alone.
        """
        opened = self.files.opened
        if not any(".decoder." in key for key in list(opened.keys())) and not (
            trainer and self.family
        ):
            return None
        tp = opened.parallel().tp if opened.format.fixed_sizes else 1
        if self.family is not None and self.files.described_by is not None:
            config = read_config(self.files.described_by)
            own, form = self.described_towers, self.files.manifest.get("form")
            form = form or (self.family.form_of(own) if own else None)
            named = self.family.form({"form": form} if form else {})
            towers = [tower.of_form(named, own) for tower in self.family.towers.values()]
            if used := self.files.manifest.get("tower_keys"):
                towers = [tower.among(used) for tower in towers]
        else:
            config = {}
            if (path := description_of(opened.root)) is not None:
                config = read_model(path)
            families = (mapping.load("hf", name) for name in mapping.names("hf"))
            towers = [
                tower.of_form(next(iter(family.forms.values())))
                for family in families
                for tower in family.towers.values()
            ]
        if trainer is not None:
            towers = [tower for tower in towers if tower.trainer == trainer]
        some = trainer is not None
        return mapping.dialect_of_whole(towers, stored(), tp, config, dialect_of, some)

    @cached_property
    def family(self) -> MappingFile | None:
        """Returns the family of the model; None if no config.json describes a Megatron
        checkpoint.
        """
        described = self.files.described_by
        return None if described is None else self._family_in(described)

    def _family_in(self, described: Path) -> MappingFile:
        """Returns the family of the model that the config.json of a directory describes."""
        config, named = read_config(described), self.options.family_name
        keys = self._described_keys
        form = None
        if not self.files.is_megatron or self.files.opened.format.trainer == FAMILY:
            keys = list(self.files.opened.keys())
        elif keys is None:
            keys, form = carried.keys(described), self.files.manifest.get("form")
        return description.family_for(config, named, str(described / CONFIG), keys, form)

    @cached_property
    def _described_keys(self) -> Collection[str] | None:
        """The stored keys in the directory of --like; None without one, or if it has no weights."""
        if self.files.options.like is None:
            return None
        like = Path(self.files.options.like)
        weights = formats.detect(like, megatron=False)
        return None if weights is None else set(weights.open(like).keys())

    # -------------------------------------------------------------------------------------- dims

    @cached_property
    def dims(self) -> Dims:
        """Returns the sizes and hyperparameters of the model, without those of layers that are left
        out. The errors are those of `stored_dims`.
        """
        stored = self.stored_dims
        return mapping.without_mtp(stored) if self.files.options.no_mtp else stored

    @cached_property
    def stored_dims(self) -> Dims:
        """Returns the dims of the model that is stored, from all sources that have them.

        The user's values replace others. Raises MappingError if other sources disagree.
        """
        if self.given_dims is not None:
            return self.given_dims
        if self.files.is_megatron:
            return self._megatron_dims(self.files.options.dims)
        own = described_in(self.files.path)
        return self._config_dims(own, self.files.options.dims, self.overruled)

    def with_vocab_size(self, rows: int) -> ModelDescription:
        """Returns the same model with this number of rows of the vocabulary."""
        return replace(self, given_dims={**self.stored_dims, "vocab_size": rows})

    def with_padding(self) -> ModelDescription | None:
        """Returns the same model with the padding rows as part of the vocabulary, for a conversion
        from Megatron to Megatron; None if the embedding is not stored by rows.
        """
        rows = self.files.opened.padded_vocab(self.mapping)
        if rows is None:
            return None
        try:
            dims = self.stored_dims
        except description.VocabSizeUnknown:
            dims = self._megatron_dims({**self.files.options.dims, "vocab_size": rows})
        if rows < dims["vocab_size"]:
            raise SourceError(
                f"{self.files.path}: holds {rows:,} rows of the vocabulary, and vocab_size is"
                f" {dims['vocab_size']:,}"
            )
        return replace(self, given_dims={**dims, "vocab_size": rows})

    @cached_property
    def unstored(self) -> dict[str, Any]:
        """Returns the dims of a Hugging Face directory whose tensor is not stored, although
        config.json or its default has them, with the neutral values that replace them.
        """
        if self.files.is_megatron:
            return {}
        config, keys = read_config(self.files.path), set(self.files.opened.keys())
        neutral = description.unstored(self.mapping, config, keys)
        return {n: value for n, value in neutral.items() if n not in self.files.options.dims}

    @cached_property
    def overruled(self) -> dict[str, Any]:
        """Returns the dims that replace those of config.json, because the tensors contradict it:
        those that the user sets, and `unstored`.

        Raises MappingError if the user contradicts a dim of config.json on which no tensor depends,
        or with which the tensors agree.
        """
        files, family, unstored = self.files, self.mapping, self.unstored
        given = files.options.dims
        if files.is_megatron or not given:
            return unstored
        config, where = read_config(files.path), str(described_in(files.path) / CONFIG)
        try:
            family.read(config, given, where, unstored)
        except MappingError as denied:
            try:
                plain = family.read(config, {}, where, unstored)
            except MappingError:
                raise denied from None
            free = {n for n, spec in family.dims.items() if spec.free}
            apart = {
                n: v for n, v in given.items() if n not in free and not mapping.equal(plain[n], v)
            }
            if not apart:
                raise
            refusal = None if files.options.trusted else self._contradiction(apart, plain)
            if refusal is not None:
                raise refusal from None
            return {**unstored, **apart}
        return unstored

    def _contradiction(self, apart: Mapping[str, Any], plain: Dims) -> MappingError | None:
        """Returns the error for dims that the user sets without need; None if the tensors
        contradict config.json too.

        apart: the user's dims that differ from those of config.json. plain: the dims of
            config.json.
        """
        files, family = self.files, self.mapping
        config, where = read_config(files.path), str(described_in(files.path) / CONFIG)
        stored = family.stored(plain)
        invisible = {
            n: v
            for n, v in apart.items()
            if family.stored(family.read(config, {}, where, {**self.unstored, n: v})) == stored
        }
        if invisible:
            why = "no shape of a tensor depends on it"
        else:
            try:
                layout = files.opened.layout(Names(family, plain, {}, self.parallel))
            except MckptError:
                return None
            if Reader(layout).check_replicas():  # such as an output layer that is not tied
                return None
            why = "the tensors agree with it"
        lines, options = [], []
        for name, value in (invisible or apart).items():
            sized = name == "vocab_size" and files.options.vocab_size is not None
            options.append(f"--vocab-size {value}" if sized else f"--set {name}={value}")
            stated = family.keys_of(name, config) or {name: plain[name]}
            listed = ", ".join(f"{key} is {v!r}" for key, v in stated.items())
            lines.append(f"{options[-1]}: in config.json {listed}, and {why}")
        error = MappingError.of(
            f"{where} contradicts the command line:",
            lines,
            f"Leave out {', '.join(options)}; if config.json is wrong, correct it there."
            + " --no-mtp leaves out the layers of multi-token prediction."
            * ("mtp_layers" in apart),
        )
        assert isinstance(error, MappingError)
        return error

    @cached_property
    def accepted_dims(self) -> dict[str, Any]:
        """Returns the dims that --allow-inexact accepted when mckpt wrote this Megatron checkpoint.
        Its args may be unable to express them.
        """
        accepted = self.files.inexact
        return {
            n: v
            for n, v in (self._recorded if self.files.is_megatron else {}).items()
            if n in mapping.schema().dims and (n in accepted or "config" in accepted)
        }

    def _config_dims(
        self, described: Path, known: Mapping[str, Any], override: Mapping[str, Any]
    ) -> Dims:
        """Returns the dims that the config.json of a directory describes."""
        family, where = self._family_in(described), str(described / CONFIG)
        try:
            return family.read(read_config(described), known, where, override, "--set")
        except MappingError as e:
            raise self.with_hint(e) from None

    def with_hint(self, error: MckptError) -> MckptError:
        """Returns an error with the cure if the user named another family than config.json does."""
        described, given = self.files.described_by, self.files.options.family_name
        named = read_config(described).get("architectures") if described and given else None
        if not isinstance(named, list) or not named:
            return error
        try:
            family = mapping.family_with(str(named[0]))
        except MappingError:
            return error
        if family == given:
            return error
        option = f"{'--mapping' if self.files.options.mapping else '--family'} {given}"
        return error.with_hint(
            f"{option} was given, but config.json has the architecture {named[0]}, which is"
            f" family {family}: leave out {option}."
        )

    def _megatron_dims(self, given: Mapping[str, Any]) -> Dims:
        """Returns the dims of a Megatron checkpoint, from its args, else from run_config.yaml, else
        from the sources that other checkpoints have too.

        given: dims that replace all others.
        """
        root, args = self.files.opened.root, self.files.args
        described = self._described_dims(given)
        known = {**self._recorded, **described}
        # ms-swift 4 saves its own args, and builds the model from config.json
        if args is not None and self.mapping.keys_of("hidden_size", args):
            in_args = self.mapping.keys_of("vocab_size", args)
            if not in_args and "vocab_size" not in {**known, **given}:
                raise self._vocab_size_unknown(
                    f"{root}: its args do not contain the unpadded vocab_size"
                )
            accepted = {
                n: v
                for n, v in self.accepted_dims.items()
                if n not in described or mapping.equal(described[n], v)
            }
            described_by = self.files.described_by
            known_from = MANIFEST if described_by is None else str(described_by / CONFIG)
            try:
                return self.mapping.read(
                    args, known, f"args of {root}", {**accepted, **given}, known_from
                )
            except MappingError as e:
                raise self.with_hint(e) from None
        if (file := self.run_config_file) is not None and (path := description_of(root)):
            stated = {*known, *given, *file.keys_of("vocab_size", read_model(path))}
            if "vocab_size" not in stated:
                raise self._vocab_size_unknown(f"{path}: does not contain the vocab_size")
            return run_config_dims(path, file, known, given, self.family)
        known, dims = {**known, **given}, mapping.schema().dims
        missing = [n for n, dim in dims.items() if n not in known and dim.neutral is None]
        if missing:
            raise UsageError(
                f"{root}: has no args"
                + " with the sizes of the model" * (args is not None)
                + f", so its {', '.join(missing)} are not known; give --like HF_DIR, a directory"
                " whose config.json has them"
            )
        if args is not None and not any(map(args.get, self.mapping.dims["mtp_layers"].keys)):
            known = mapping.without_mtp(known)
        neutral = {
            n: dim.neutral(known) for n, dim in dims.items() if n not in known and dim.neutral
        }
        return {**known, **neutral}

    def _vocab_size_unknown(self, why: str) -> description.VocabSizeUnknown:
        rows = self.files.opened.padded_vocab(self.mapping)
        return description.VocabSizeUnknown(
            f"{why}; give --vocab-size N (the tokenizer may be shorter than the model's), or --like"
            " HF_DIR"
            + f". The embedding has {rows or 0:,} rows, which may end with padding"
            * (rows is not None)
        )

    def _described_dims(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the dims of the config.json that describes a Megatron checkpoint; none without
        one.
        """
        if (described := self.files.described_by) is None:
            return {}
        # A directory with weights, as of --like, may lack some that its config.json describes.
        keys = self._described_keys
        family, config = self._family_in(described), read_config(described)
        lacks = {} if keys is None else description.unstored(family, config, keys)
        # a training may have added layers to a model without any, or have left them out
        if self.files.options.no_mtp or not family.keys_of("mtp_layers", config):
            lacks |= self._trained_mtp
        return self._config_dims(described, {}, {**lacks, **given})

    @cached_property
    def run_config_file(self) -> MappingFile | None:
        """Returns the mapping file of the description of a checkpoint without args, which
        Megatron-Bridge and NeMo write; None if the checkpoint has args, or no such file.
        """
        path = description_of(self.files.opened.root)
        return None if self.files.args is not None or not path else mapping_file(self.mapping, path)

    @property
    def has_mtp(self) -> bool:
        """Returns whether the checkpoint, or the config.json that describes it, has layers of
        multi-token prediction. A training run may have left them out.
        """
        described = self.files.described_by
        stated = described is not None and "mtp_layers" in self.corrected(read_config(described))
        return stated or self.stored_dims["mtp_layers"] > 0

    @property
    def _trained_mtp(self) -> dict[str, Any]:
        """The layers of multi-token prediction that the args state, or run_config.yaml in their
        place; none without both, if none are stored and --no-mtp is given.
        """
        if self.options.no_mtp and self.files.args is None:
            return {} if self.stores_mtp else {"mtp_layers": 0}
        if self._stated_args is None:
            return {}
        file, stated = self._stated_args
        return {"mtp_layers": next(iter(file.keys_of("mtp_layers", stated).values()), 0)}

    @property
    def stores_mtp(self) -> bool:
        """Returns whether a Megatron checkpoint has tensors of layers of multi-token prediction."""
        starts = tuple({rule.key.partition("{")[0] for rule in self.mapping.rules if rule.mtp})
        stored = self.files.opened.keys()
        return any(key.startswith(starts) for key in stored)

    def corrected(self, config: Mapping[str, Any]) -> list[str]:
        """Returns the dims for which the config.json of the model has other values than the model
        itself, but for the size of the vocabulary, which is always written.
        """
        given, family = [n for n in self.files.options.dims if n != "vocab_size"], self.family
        try:
            plain = family.read(config) if family else {}
        except MappingError:  # config.json lacks a dim that the user gives
            return given
        names = dict.fromkeys([*given, "mtp_layers"])
        return [n for n in names if n in plain and not mapping.equal(plain[n], self.dims[n])]

    @property
    def _recorded(self) -> dict[str, Any]:
        """The dims that its manifest records; none without one. Raises SourceError for a name that
        no dim has.
        """
        dims = self.files.manifest.get("dims", {})
        if unknown := sorted(dims.keys() - mapping.schema().dims.keys()):
            raise SourceError(
                f"{self.files.opened.root / MANIFEST}: names the dims {', '.join(unknown)}, which"
                f" mckpt does not know; {manifest.CURE}"
            )
        return dims

    # ------------------------------------------------------------------------- sizes and choices

    @cached_property
    def parallel(self) -> Parallel:
        """Returns the parallel sizes with which the checkpoint was saved."""
        saved, path = self.files.opened.parallel(), self.files.opened.root / RUN_CONFIG
        if self.files.args is None and not self.files.opened.format.fixed_sizes and path.is_file():
            return parallel_of(path)
        if self.files.args is None or self.mapping.stage_sizes is None:
            return saved
        try:
            args = self.mapping.upgraded(self.files.args)
            sizes = self.mapping.stage_sizes({"config": args})
            return saved if sizes is None else saved.with_stage_sizes(sizes)
        except (ExpressionError, UsageError) as e:
            raise SourceError(f"{self.files.path}: its args do not fit its pipeline: {e}") from None

    @cached_property
    def names(self) -> Names:
        """Returns the mapping, dims and choices that turn stored keys into logical tensors."""
        common, dims = self.files.common, self.stored_dims
        file = self.mapping
        if self.files.options.no_mtp and not self.files.is_megatron:
            file, dims = file.without_mtp(dims), self.dims
        file = file if self.unread else file.without_unread()
        stated = self.mapping.choices_in(common.stated if common else {})
        if self.files.opened.format.fixed_sizes:
            try:
                self.parallel.check(dims["num_experts"])
                self.parallel.split(self.mapping.num_numbers(dims), dims["mtp_layers"])
            except UsageError as e:
                raise SourceError(
                    f"{self.files.path}: its sizes ({self.parallel}) do not fit its model: {e}"
                ) from None
        names = Names(file, dims, stated, self.parallel)
        return replace(names, choices=self.files.opened.choices(names))

    # ------------------------------------------------------------------------------------- notes

    @cached_property
    def unknown_args(self) -> dict[str, Any]:
        """Returns the args, or entries of run_config.yaml, that no Megatron known to mckpt has, and
        their values.
        """
        return mapping.unknown_args(*stated) if (stated := self._stated_args) else {}

    @property
    def args_known_by_word(self) -> dict[str, Any]:
        """Returns the args, or entries of run_config.yaml, that only a word of their names explains
        as settings of the run, and their values.
        """
        return mapping.args_known_by_word(*stated) if (stated := self._stated_args) else {}

    @property
    def _stated_args(self) -> tuple[MappingFile, Mapping[str, Any]] | None:
        """The args, or the entries of run_config.yaml in their place, and the file that reads
        them; None without both.
        """
        if not self.files.is_megatron:
            return None
        if self.files.args is not None:
            return self.mapping, self.files.args
        file, path = self.run_config_file, description_of(self.files.opened.root)
        return (file, read_model(path)) if file and path else None

    @cached_property
    def notes(self) -> list[str]:
        """Returns a sentence for each fact that does not come from the user, config.json or args,
        or that contradicts them.
        """
        files, given = self.files, self.files.options
        place = sparse_copy.of(files.path)
        out = [*([place.note] if place and place.note else []), *files.opened.notes]
        named = given.mapping or given.family
        if not named and self.options.mapping:
            out.append(
                f"{MAPPING}, the family file that is kept with the checkpoint, is used; --mapping"
                " overrides it"
            )
        if not named and self.options.family:
            out.append(
                f"family {self.options.family} is taken from {MANIFEST}: --family was given when"
                " the checkpoint was made"
            )
        undescribed = files.is_megatron and files.args is None and files.described_by is None
        bridge = (files.opened.root / RUN_CONFIG).exists()
        if undescribed and not bridge and self._recorded:
            out.append(f"the checkpoint has no args: the dims are taken from {MANIFEST}")
        for name, value in self.overruled.items():
            stated = self.mapping.keys_of(name, read_config(files.path))
            listed = ", ".join(f"{k} {v!r}" for k, v in stated.items())
            out.append(
                f"{name}: config.json has {listed or 'no key for it'}; {value!r} is used, because"
                f" the tensor {self.mapping.dims[name].tensor} is not there"
                if name in self.unstored
                else f"{name}: config.json has {listed}; the value of --set, {value!r}, is used,"
                " because the tensors agree with it"
            )
        if self.unknown_args:
            listed = ", ".join(f"{name} {value!r:.80}" for name, value in self.unknown_args.items())
            out.append(f"its args have names or values that mckpt does not know: {listed}")
        if by_word := self.args_known_by_word:
            listed = ", ".join(f"{name} {value!r:.80}" for name, value in by_word.items())
            out.append(
                "mckpt knows these args by a word of their names only, and takes them for settings"
                f" of the run: {listed}"
            )
        made = "was given when the checkpoint was made"
        if "config" in files.inexact and self.accepted_dims:
            return [*out, f"all dims are those of {MANIFEST}: --allow-inexact config {made}"]
        return out + [
            f"{n}: {v!r} is taken from {MANIFEST}: --allow-inexact {n} {made}"
            for n, v in self.accepted_dims.items()
            if n not in given.dims
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # without the parts that were read: a compiled mapping has no pickle
        return ModelDescription, (self.files, self.given_dims)
