"""Benchmarks: every contender in one run, on one machine, with one model.

``python -m zero_engine.bench engine`` compares this engine with DDP, FSDP2 and DeepSpeed.
``python -m zero_engine.bench offload`` compares it, with states off the device, with DeepSpeed's
ZeRO-Offload on the CPU; ``python -m zero_engine.bench.offload_cuda`` does on an accelerator.
``python -m zero_engine.bench comm`` compares ZeRO++ with FSDP2 and DeepSpeed over a slow link.
``python -m zero_engine.bench cpu_adam`` compares cpu-adam with torch's, DeepSpeed's, torchao's and
bitsandbytes' optimizers on the CPU.
"""
