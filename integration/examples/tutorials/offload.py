"""ZeRO-Offload: optimizer states and updates on the host. The losses stay the same up to rounding.

torchrun --nproc-per-node 1 integration/examples/tutorials/offload.py
"""

import torch.distributed as dist
from lesson import draw, read_config, show, train


def main():
    config, options = read_config()
    dist.init_process_group()
    stage = {"stage": config["zero_optimization"]["stage"]}
    runs = {
        "on the device": train(config | {"zero_optimization": stage}, options.steps),
        "offloaded": train(config, options.steps),
    }
    show(runs)
    bars = {f"{name}: device": run.device for name, run in runs.items()}
    bars["offloaded: host"] = runs["offloaded"].host
    draw(options.plot, "Bytes of one rank", bars)

    before, after = runs.values()
    assert after.losses[-1] < after.losses[0]
    # The kernels of host and device round in different orders: about one ulp per step.
    gaps = [abs(a - b) for a, b in zip(before.losses, after.losses, strict=True)]
    assert max(gaps) < 0.01, f"losses differ by {max(gaps)}"
    assert sum(after.device.values()) < sum(before.device.values()) / 2
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
