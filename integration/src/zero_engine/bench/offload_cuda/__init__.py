"""``python -m zero_engine.bench.offload_cuda``: optimizer state off one accelerator.

[Note: parts]
speed     tokens/s at every ratio, beside FSDP2's CPUOffloadPolicy and DeepSpeed's ZeRO-Offload
timeline  what a step takes over the slowest of what it cannot do without: the device's kernels,
          the bus, the host's memory
capacity  the 10 B model of the ZeRO-Offload tutorial in 32 GiB of device memory; a 13 B model with
          8-bit states in 128 GiB of host memory

Needs one accelerator and nothing from a network. ``--dry-run`` is the same program with tiny models
on the CPU, where what only an accelerator can tell is null.
"""
