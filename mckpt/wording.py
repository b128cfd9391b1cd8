"""Rewrites the options that an error names as keywords of the Python API."""

from __future__ import annotations

import re

# options with a value, and flags, whose keywords have the same name
_VALUES = (
    *("allow-inexact", "atol", "checksum", "cp", "dialect", "dtype", "engine", "ep", "etp"),
    *("family", "format", "iteration", "layer-keys", "level", "like", "mapping", "max-memory"),
    *("max-shard-size", "megatron-version", "pp", "quantize", "revision", "threads", "tokenizer"),
    *("tp", "transformer-impl", "vocab-size", "vpp"),
)
_FLAGS = (
    *(
        "allow-overflow",
        "check-replicas",
        "grouped-experts",
        "keep-padding",
        "no-adapter",
        "no-mtp",
    ),
    *("no-optimizer", "overwrite", "run-config", "update-tracker"),
)
# option -> keyword; a keyword with = has this value where the option has none
_KEYWORDS = {
    **{option: option.replace("-", "_") for option in _VALUES},
    **{flag: f"{flag.replace('-', '_')}=True" for flag in _FLAGS},
    "account-for-embedding-in-pipeline-split": "account_for_embedding=True",
    "account-for-loss-in-pipeline-split": "account_for_loss=True",
    "common-state": "common_as_object",
    "decoder-first-pipeline-num-layers": "first_stage_layers",
    "decoder-last-pipeline-num-layers": "last_stage_layers",
    "make-vocab-size-divisible-by": "divisible_by",
    "no-resume": "resume=False",
    "pipeline-model-parallel-layout": "layout",
    "sequential-experts": "grouped_experts=False",
    "set": "settings",
    "target-dialect": "dialect",
    "target-format": "format",
    "target-pp": "pp",
    "to": "format",
}
_OPTION = re.compile(
    rf"--({'|'.join(sorted(_KEYWORDS, key=len, reverse=True))})(?![\w-])"
    r"( (?:[A-Z_]{2,}\b|[A-Z]\b|\d[\w.]*|'[^']*'|[a-z_]+=[\w.]+"
    r"|bytes\b|forward\b|train\b))?"
)
_ACCEPTED = re.compile(r"--allow-inexact [\w.]+(?: --allow-inexact [\w.]+)*")


def in_keywords(text: str) -> str:
    """Returns the text of an error with `--etp 1` as `etp=1`, and so on."""
    return _OPTION.sub(_keyword, _ACCEPTED.sub(_accepted, text))


def _accepted(options: re.Match[str]) -> str:
    names = options[0].replace("--allow-inexact ", "").split()
    return f"allow_inexact={names}"


def _keyword(option: re.Match[str]) -> str:
    keyword, value = _KEYWORDS[option[1]], (option[2] or "").strip()
    if not value:
        return keyword
    if "=" in keyword:  # the word behind a flag is not its value
        return f"{keyword} {value}"
    if option[1] == "set":
        name, _, new = value.partition("=")
        new = {"true": "True", "false": "False"}.get(new, new)
        return f"{keyword}={{{name!r}: {new}}}" if new else f"{keyword}={value}"
    return f"{keyword}={value!r}" if option[1] == "level" else f"{keyword}={value}"
