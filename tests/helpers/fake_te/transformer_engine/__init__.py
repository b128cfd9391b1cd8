"""A stand-in for Transformer Engine 2.x on a machine without a GPU: the parameter names, shapes and
_extra_state of the modules that megatron-core's TE layer specs use, and a plain forward (no
autograd) of each.

Put tests/helpers/fake_te on PYTHONPATH to use it.

Its names were compared with the real Transformer Engine 2.11: the state dicts of dense and
grouped-MoE models agree.
"""

from . import common, pytorch

__version__ = "2.8.0"  # megatron-core chooses its code by it
__all__ = ["common", "pytorch"]
