"""The shim over torch's renamed collectives finds either name."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.torch_compat import all_gather_single


@pytest.mark.parametrize("name", ["all_gather_single", "all_gather_into_tensor"])
def test_either_name_is_called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def gather(out: Tensor, shard: Tensor, group: object = None) -> None:
        out.copy_(shard)

    for known in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.delattr(dist, known, raising=False)
    monkeypatch.setattr(dist, name, gather, raising=False)
    out = torch.zeros(3)
    all_gather_single(out, torch.ones(3), None)
    assert out.tolist() == [1, 1, 1]
