"""Found in the place of torch by the tests of tests/unit, and by the processes that they start."""

raise RuntimeError(
    "tests/unit must not import torch, so that it stays quick:"
    " a test that needs torch belongs in tests/formats or tests/judge"
)
