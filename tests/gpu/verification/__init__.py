"""Runs `mckpt verify` and mckpt's trainer on GPUs, and writes two pages of docs/ from the results.

    python -m tests.gpu.verification grid        every tiny model x parallel sizes x layers x format
    python -m tests.gpu.verification large       a model of 8 billion parameters: convert, verify
    python -m tests.gpu.verification training    convert, train, reshard, resume, convert back
    python -m tests.gpu.verification write       docs/gpu-verification.md and -tables.md

Each command is a list of cases (`grid`, `large`, `training`), and each case is a process of its own
(`cases`). WORK/results.jsonl gets one line for each finished case. A command skips the cases that
have a line, so a command that was stopped, or that reached --limit-s, continues when it is started
again. A case that fails or hangs is recorded and does not stop the others. `--device cpu` with
`--shrink` and `--only` rehearses every command without a GPU.
"""
