"""``python -m zero_engine.bench.gpu``: is the engine right and fast on one accelerator.

[Note: parts]
correct        equivalence with DDP and torch's optimizers at every stage, with and without offload
               and quantized collectives; the same bits with every stream delayed at random
twin_flow_1b   tokens/s over the ratio, 1.3 B parameters, beside FSDP2 and DeepSpeed
twin_flow_7b   the same, 6.7 B parameters
roofline       an offloaded step over the slowest of what it cannot do without
largest        10 B parameters within 32 GiB of device memory, 13 B within 128 GiB of the host's;
               the peak against the plan
single         nothing offloaded: the engine against plain torch
quantizers     Triton's kernels against copy bandwidth
fragmentation  random lengths: what the allocator reserves over what is allocated

Each part runs in processes of its own and needs nothing from a network. ``--dry-run`` is the same
program with tiny models on the CPU: what only an accelerator can tell is null there.
"""
