"""Twin-Flow: host and device each update a part. The ratio changes losses only by rounding.

torchrun --nproc-per-node 2 integration/examples/tutorials/twin_flow.py
"""

import copy

import torch.distributed as dist
from lesson import draw, read_config, show, train


def main():
    config, options = read_config()
    dist.init_process_group()
    runs = {}
    for ratio in (0.0, 0.4, 0.7, 1.0):
        changed = copy.deepcopy(config)
        changed["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
        runs[f"ratio {ratio}"] = train(changed, options.steps)
    show(runs)
    draw(options.plot, "Bytes per rank on the device", {n: run.device for n, run in runs.items()})

    first, *others = runs.values()
    assert first.losses[-1] < first.losses[0]
    gaps = [abs(a - b) for run in others for a, b in zip(run.losses, first.losses, strict=True)]
    assert max(gaps) < 0.01, f"losses differ by {max(gaps)}"
    sizes = [sum(run.device.values()) for run in runs.values()]
    assert sizes == sorted(sizes, reverse=True), "more on the host, and more on the device"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
