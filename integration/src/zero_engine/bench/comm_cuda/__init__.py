"""``python -m zero_engine.bench.comm_cuda``: zero-comm's Triton kernels against copy bandwidth.

[Note: figures]
Each row is one operation (encode; decode; decode_sum of 8 rows), kind, dtype and size. Its
**moved** bytes are those that it must read and write, in closed form. A device-to-device copy that
moves as many is timed in the same rounds, in turns with the Triton kernel and with the plain torch
backend on the device. **share** is the copy's time over the kernel's: the kernel's bandwidth as a
share of copy bandwidth. The bar, 0.8, is for sizes of 64 Mi elements and more, which no cache
holds. Before it is timed, each result is compared with the torch backend's on the host; a kernel
that gives another ends the run.

Needs one accelerator that Triton serves. ``--dry-run`` is the same program, tiny, on the CPU, in
Triton's interpreter, or with the torch backend alone where triton isn't installed; it says which.
There, what only an accelerator can tell is null.
"""
