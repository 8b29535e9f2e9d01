"""``deepspeed.utils.init_on_device``."""

from __future__ import annotations

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """A context that makes tensors on ``device``, floating ones in ``dtype`` by default."""

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        """Prepare the context. With ``enabled`` false it changes nothing."""
        self.dtype = dtype
        self.enabled = enabled
        self.device = torch.device(device)
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._before)
