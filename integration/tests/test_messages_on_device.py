"""Quantized messages on an accelerator: packing them never waits for the device."""

from __future__ import annotations

import torch

from zero_comm.quantizer.message import HEADER_NBYTES, Packing
from zero_core.testing import late_device, run_alone


def _packs() -> None:
    late_device.load(2)
    packing = Packing("int8")
    values = torch.randn(256)
    rows = torch.zeros(1, packing.nbytes(256), dtype=torch.uint8)
    packing.pack(values, rows)
    device = torch.device("late", 1)
    sent, messages = values.to(device), torch.zeros_like(rows, device=device)
    torch.accelerator.synchronize(1)
    late_device.reset_counters()
    packing.pack(sent, messages)  # the first message of this length: its header is made
    assert late_device.counters(1).syncs == {}
    found = messages.cpu()
    assert found[:, 16] == 1  # whether there is a NaN would have to be asked
    found[:, 16] = rows[:, 16]
    assert torch.equal(found[:, :HEADER_NBYTES], rows[:, :HEADER_NBYTES])


def test_packing_a_first_message_does_not_wait_for_the_device() -> None:
    run_alone(_packs)
