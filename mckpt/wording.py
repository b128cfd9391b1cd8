"""Rewrites the options that an error names as keywords of the Python API."""

from __future__ import annotations

import re

# option -> keyword; a keyword with = has this value where the option has none
_KEYWORDS = {
    "account-for-embedding-in-pipeline-split": "account_for_embedding=True",
    "account-for-loss-in-pipeline-split": "account_for_loss=True",
    "allow-inexact": "allow_inexact",
    "allow-overflow": "allow_overflow=True",
    "atol": "atol",
    "check-replicas": "check_replicas=True",
    "checksum": "checksum",
    "common-state": "common_as_object",
    "decoder-first-pipeline-num-layers": "first_stage_layers",
    "decoder-last-pipeline-num-layers": "last_stage_layers",
    "dialect": "dialect",
    "dtype": "dtype",
    "engine": "engine",
    "ep": "ep",
    "etp": "etp",
    "family": "family",
    "format": "format",
    "grouped-experts": "grouped_experts=True",
    "iteration": "iteration",
    "keep-padding": "keep_padding=True",
    "layer-keys": "layer_keys",
    "like": "like",
    "make-vocab-size-divisible-by": "divisible_by",
    "mapping": "mapping",
    "max-memory": "max_memory",
    "max-shard-size": "max_shard_size",
    "megatron-version": "megatron_version",
    "no-adapter": "no_adapter=True",
    "no-optimizer": "no_optimizer=True",
    "no-resume": "resume=False",
    "overwrite": "overwrite=True",
    "pipeline-model-parallel-layout": "layout",
    "pp": "pp",
    "quantize": "quantize",
    "run-config": "run_config=True",
    "sequential-experts": "grouped_experts=False",
    "set": "settings",
    "target-dialect": "dialect",
    "target-format": "format",
    "target-pp": "pp",
    "threads": "threads",
    "to": "format",
    "tokenizer": "tokenizer",
    "tp": "tp",
    "transformer-impl": "transformer_impl",
    "update-tracker": "update_tracker=True",
    "vocab-size": "vocab_size",
    "vpp": "vpp",
}
_OPTION = re.compile(
    rf"--({'|'.join(sorted(_KEYWORDS, key=len, reverse=True))})(?![\w-])"
    r"( (?:[A-Z_]{2,}\b|[A-Z]\b|\d[\w.]*|'[^']*'|[a-z_]+=[\w.]+))?"
)
_ACCEPTED = re.compile(r"--allow-inexact [\w.]+(?: --allow-inexact [\w.]+)*")


def in_keywords(text: str) -> str:
    """Returns the text of an error with `--etp 1` as `etp=1`, and so on."""
    return _OPTION.sub(_keyword, _ACCEPTED.sub(_accepted, text))


def _accepted(found: re.Match[str]) -> str:
    names = found[0].replace("--allow-inexact ", "").split()
    return f"allow_inexact={names}"


def _keyword(found: re.Match[str]) -> str:
    keyword, value = _KEYWORDS[found[1]], (found[2] or "").strip()
    if not value:
        return keyword
    if "=" in keyword:  # the word behind a flag is not its value
        return f"{keyword} {value}"
    if found[1] == "set":
        name, _, new = value.partition("=")
        new = {"true": "True", "false": "False"}.get(new, new)
        return f"{keyword}={{{name!r}: {new}}}" if new else f"{keyword}={value}"
    return f"{keyword}={value}"
