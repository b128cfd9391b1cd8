"""Records the tensors that Megatron-Bridge saves of models that it alone computes, for tests.

    MEGATRON_BRIDGE_PYTHON=BRIDGE/bin/python python -m tests.helpers.bridge_facts [CASE ...]

It makes each model of fixtures/families/bridge, lets Megatron-Bridge convert it, and writes
fixtures/bridge/CASE.json:

    model    the section `model` of run_config.yaml, without the fields that are null
    tensors  key of torch_dist -> [shape, CRC-32 of the bytes], without padding of the vocabulary
    saved    those tensors that differ if transformers has saved the model: then the layers that
             take the keys and values of others have none of their own

CONTRIBUTING.md has the command that makes the environment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from mckpt.formats.megatron import run_config
from tests.helpers import made_models
from tests.helpers.judging import judge

FACTS = made_models.ROOT / "fixtures" / "bridge"
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def read(case: str) -> dict[str, Any]:
    """Returns the facts of a case."""
    found: dict[str, Any] = json.loads((FACTS / f"{case}.json").read_text())
    return found


def tensors(root: Path) -> dict[str, Any]:
    """Returns the tensors of a torch_dist checkpoint by key, read by torch."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(next(root.rglob(".metadata")).parent)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(found.size, dtype=found.properties.dtype)
        for key, found in stored.items()
        if isinstance(found, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def described(root: Path, rows: int) -> dict[str, list[Any]]:
    """Returns the shape and the checksum of each tensor of a torch_dist checkpoint.

    rows: those of the vocabulary.
    """
    found = {}
    for key, tensor in sorted(tensors(root).items()):
        kept = tensor[:rows] if key in VOCABULARY else tensor
        found[key] = [list(kept.shape), zlib.crc32(kept.contiguous().numpy().tobytes())]
    return found


def main() -> None:
    chosen = sys.argv[1:] or made_models.BRIDGE_MODELS
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        made_models.make(chosen, work / "hf")
        shared = [c for c in chosen if made_models.config(c).get("num_kv_shared_layers")]
        for case in shared:
            saved = work / "hf" / f"{case}.saved"
            made_models.without_unread(work / "hf" / case, saved)
            # Megatron-Bridge multiplies by this number, and published configs have null
            config = made_models.config(case)
            config["num_global_key_value_heads"] = config["num_key_value_heads"]
            (saved / "config.json").write_text(json.dumps(config))
        cases = [
            {"name": c, "source": str(work / "hf" / c), "destination": str(work / "bridge" / c)}
            for c in (*chosen, *(f"{case}.saved" for case in shared))
        ]
        python = os.environ["MEGATRON_BRIDGE_PYTHON"]
        results = judge(cases, work / "ran", te=True, program="bridge", python=python)
        FACTS.mkdir(exist_ok=True)
        for case in chosen:
            assert results[case]["ok"], results[case]["error"]
            root = work / "bridge" / case
            model = run_config.read_model(next(root.rglob(run_config.RUN_CONFIG)))
            rows = made_models.config(case)["vocab_size"]
            facts: dict[str, Any] = {
                "model": {k: v for k, v in model.items() if v is not None and k != "hf_model_id"},
                "tensors": described(root, rows),
            }
            if case in shared:
                saved = described(work / "bridge" / f"{case}.saved", rows)
                facts["saved"] = {k: v for k, v in saved.items() if v != facts["tensors"].get(k)}
            (FACTS / f"{case}.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
