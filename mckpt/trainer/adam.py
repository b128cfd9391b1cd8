"""AdamW that keeps its state as Transformer Engine's FusedAdam does, for machines without it.

FusedAdam counts the steps of a group. Without it megatron-core uses torch's AdamW, which counts the
steps of each parameter: it saves other keys than a run on GPUs, and megatron-core 0.16 cannot load
them again, because it looks for a state before the first step and gives all parameters one counter.
"""

from __future__ import annotations

from typing import Any

import torch


class Adam(torch.optim.Optimizer):
    """Adam with decoupled weight decay. Each parameter has exp_avg and exp_avg_sq, each group has
    `step`, the number of updates so far.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode, "weight decay as a part of the gradient is not built"
        # megatron-core passes `capturable` from 0.17 on
        assert not capturable, "an optimizer step in a CUDA graph is not built"
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, self.state[parameter], group)


def update(parameter: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
    """Updates a parameter in place: Adam (Kingma and Ba 2015, algorithm 1) with the weight decay of
    Loshchilov and Hutter 2019.
    """
    if not state:
        state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    gradient, lr, step = parameter.grad, group["lr"], group["step"]
    beta1, beta2 = group["betas"]
    assert gradient is not None
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.addcdiv_(state["exp_avg"], scale, value=-lr / (1 - beta1**step))


def install() -> None:
    """Gives megatron-core this Adam where it found neither Transformer Engine's nor Apex's. May be
    called again.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distrib_optimizer.Adam = Adam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
