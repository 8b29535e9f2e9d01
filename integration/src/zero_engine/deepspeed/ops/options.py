"""Options of DeepSpeed's optimizers that this engine refuses."""

from __future__ import annotations

__all__ = ["check_fp32_states", "refuse_amsgrad"]


def check_fp32_states(optimizer: str, is_fp32: bool) -> None:
    """Refuse states in the parameters' dtype.

    Raises:
        ValueError: ``is_fp32`` is false.
    """
    if not is_fp32:
        raise ValueError(
            f"{optimizer}: fp32_optimizer_states=False is not served; give "
            'zero_optimization.offload_optimizer.state_dtype = "bfloat16" in the configuration, '
            "or make a cpu_adam.CPUAdam(..., state_dtype='bfloat16')"
        )


def refuse_amsgrad(optimizer: str, asked: bool) -> None:
    """Refuse AMSGrad, as DeepSpeed does.

    Raises:
        RuntimeError: ``asked``.
    """
    if asked:
        raise RuntimeError(
            f"{optimizer} does not support the AMSGrad variant; torch.optim.AdamW(amsgrad=True) "
            "can be given to initialize() as an object"
        )
