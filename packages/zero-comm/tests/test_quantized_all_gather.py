"""The functional gather in a process without a process group."""

import pytest
import torch

from zero_comm import dequantize, quantize, quantized_all_gather


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_lone_process_gets_its_own_shard_quantized(kind: str) -> None:
    shard = torch.randn(50, 20)
    kept = shard.clone()
    out = quantized_all_gather(shard, format=kind)
    expected = dequantize(quantize(shard, kind), 1000, kind).view(50, 20)
    assert torch.equal(out, expected)
    assert torch.equal(shard, kept)


def test_a_shard_need_not_be_contiguous() -> None:
    shard = torch.randn(50, 20)
    assert torch.equal(quantized_all_gather(shard.t()), quantized_all_gather(shard.t().clone()))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_an_empty_shard_is_gathered(shape: tuple[int, ...]) -> None:
    assert quantized_all_gather(torch.empty(shape)).shape == shape


def test_integers_and_small_shards_come_back_exactly() -> None:
    for shard in (torch.arange(1000), torch.randn(3)):
        out = quantized_all_gather(shard)
        assert torch.equal(out, shard)
        assert out.data_ptr() != shard.data_ptr()


def test_a_parameter_is_gathered_without_a_graph() -> None:
    assert not quantized_all_gather(torch.nn.Parameter(torch.randn(1000))).requires_grad


def test_a_format_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"^format must be one of .*, got 'int2'"):
        quantized_all_gather(torch.randn(10), format="int2")


def test_a_scalar_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^shard must"):
        quantized_all_gather(torch.tensor(1.0))
