"""Compiles the kernels of mckpt.live.kernels for a GPU, which need not be there: the interpreter
takes what the compiler refuses. It prints the kernels, and how `compare` reads.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mckpt.live import kernels
from mckpt.live.changes import BLOCK, STEPS

TABLES = {"table": "*i64", "rows": "*i64", "copy_of": "*i32"}
SIZES = ("rows", "columns", "step", "code_step", "scale_step", "down", "along", "tiles")
FOUND = {"masks": "*i32", "counts": "*i32"}
MIXING = dict(zip(("FIRST", "SECOND", "THIRD"), STEPS, strict=True))
# kernel, types of its tensors and numbers, constants
CASES: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    *(
        (
            kernels.compare,
            {**TABLES, **FOUND, "like": "*i16"},
            {"UNIT": 8, "WIDTH": 2, "DENSE": dense},
        )
        for dense in (True, False)
    ),
    *(
        (
            kernels.collect,
            {
                **TABLES,
                **FOUND,
                **{"before": "*i64", "indices": kind, "values": "*i16", "sums": "*i64"},
                **{"first_block": "i32", "start": "i64"},
            },
            MIXING,
        )
        for kind in ("*i32", "*i64")
    ),
    (kernels.add_all, {**TABLES, "like": "*i16", "sums": "*i64"}, MIXING),
    (
        kernels.arrange,
        {
            **{"pieces": "*i64", "indices": "*i32", "values": "*i16"},
            **{"to_indices": "*i64", "to_values": "*i16"},
        },
        {},
    ),
    *(
        (
            kernels.quantise,
            {"values": "*bf16", "codes": "*fp8e4nv", "scales": kind, "bad": "*i32"}
            | dict.fromkeys(SIZES, "i32"),
            {"LARGEST": 448.0, "HEIGHT": height, "WIDTH": width, "COUNT": count, "POWERS": powers},
        )
        for kind, height, width, count, powers in (
            ("*fp32", 128, 128, 1, False),
            ("*u8", 1, 32, 64, True),
        )
    ),
    (
        kernels.quantise_e2m1,
        {"values": "*bf16", "whole": "*fp32", "codes": "*u8", "scales": "*fp8e4nv", "bad": "*i32"}
        | dict.fromkeys(("blocks", "step", "code_step", "scale_step", "tiles"), "i32"),
        {"LARGEST": 448.0, "WIDTH": 16, "COUNT": 128},
    ),
]


def main() -> None:
    for kernel, types, constants in CASES:
        names = kernel.arg_names
        given = {(names.index(name),): value for name, value in constants.items()}
        if "BLOCK" in names:
            given[(names.index("BLOCK"),)] = BLOCK
        even = [["tt.divisibility", 16]]
        attributes = {(names.index(n),): even for n, kind in types.items() if kind[0] == "*"}
        every = {name: types.get(name, "constexpr") for name in names}
        source = ASTSource(kernel, every, constexprs=given, attrs=attributes)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(kernel.__name__)
        if constants.get("DENSE"):
            text = made.asm["ptx"]
            one_by_one = "ld.global.b16" in text or "ld.global.u16" in text
            print("compare reads", "2" if one_by_one else "16", "bytes at once")


if __name__ == "__main__":
    main()
