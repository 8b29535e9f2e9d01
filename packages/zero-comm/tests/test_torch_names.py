"""The wrappers of torch functions whose names differ between torch's releases."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zero_comm.transport.torch_compat import all_gather_single, premultiplier, reduce_scatter_single

GATHERS = ("all_gather_single", "all_gather_into_tensor")
REDUCTIONS = ("reduce_scatter_single", "reduce_scatter_tensor")


def leave_only(monkeypatch: pytest.MonkeyPatch, name: str, names: tuple[str, str]) -> None:
    """Make ``name`` the only one of ``names`` that torch has.

    The stand-in copies its input to the output, doubled if ``op`` is given.
    """

    def collective(
        out: Tensor, given: Tensor, op: object = None, group: object = None, async_op: bool = False
    ) -> None:
        out.copy_(given if op is None else given * 2)

    for known in names:
        monkeypatch.delattr(dist, known, raising=False)
    monkeypatch.setattr(dist, name, collective, raising=False)


@pytest.mark.parametrize("names", [GATHERS, REDUCTIONS])
@pytest.mark.parametrize("index", [0, 1])
def test_either_name_of_a_collective_is_called(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], index: int
) -> None:
    leave_only(monkeypatch, names[index], names)
    out = torch.zeros(3)
    if names is GATHERS:
        all_gather_single(out, torch.ones(3), None)
    else:
        reduce_scatter_single(out, torch.ones(3), dist.ReduceOp.SUM, None)
    assert out.tolist() == [1 if names is GATHERS else 2] * 3


def test_the_factor_of_a_premultiplied_sum_is_found() -> None:
    assert premultiplier(dist._make_nccl_premul_sum(0.25)) == 0.25  # type: ignore[attr-defined]
