"""Damages checkpoints and requests at random, and reads them with every parser of mckpt.

    python -m tests.fuzz --inputs 1000000 --processes 16     all parsers
    python -m tests.fuzz --parser zarr --inputs 5000         one of them
    python -m tests.fuzz --replay zarr:0:1234                one input again, with its traceback

Each input must end in success or in an error of mckpt with an exit code of docs/exit-codes.md: no
other exception, no warning, at most LIMIT_S seconds and LIMIT_BYTES of memory. `damage` changes
values and bytes, `parsers` says what is damaged and which code reads it, `running` judges one input
after the other in processes of their own.

It needs only what mckpt itself needs: no torch, no pytest.
"""
