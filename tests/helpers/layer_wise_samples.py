"""The state of Muon, distributed by layers, that megatron-core 0.19 saves as `torch` and, of the
same steps, as `torch_dist`. It makes the samples of fixtures/muon, and needs Python 3.12.

    PYTHONPATH=. python -m tests.helpers.layer_wise_samples DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers.fsdp_samples import SMALL_MOE, Sample, source
from tests.helpers.judging import explain, judge

BY_LAYERS = {
    "optimizer": "muon",
    "distributed_optimizer": False,
    "dtype": "bfloat16",
    "args": {
        "muon_tp_mode": "duplicated",
        "use_layer_wise_distributed_optimizer": True,
        "use_layer_wise_param_layout": False,
    },
}
SIZES = {"tp": 2, "ep": 2, "etp": 1}


def main() -> None:
    directory = Path(sys.argv[1]).absolute()
    start = source(Sample("qwen3-moe", {"ep": 2}, ""), directory / "sources", SMALL_MOE)
    job = {"kind": "train", "checkpoint": str(start), "steps": 2, "lr": 1e-2, "world": 4}
    job |= {"global_batch_size": 4, "seq_length": 16} | SIZES | BY_LAYERS
    cases = [
        job | {"name": format, "format": format, "save": str(directory / format)}
        for format in ("torch", "torch_dist")
    ]
    for name, result in judge(cases, directory / "results").items():
        print(name, explain(result)[-2000:])


if __name__ == "__main__":
    main()
