"""ZeRO: one training at stages 0 to 3, with equal losses and decreasing memory.

torchrun --nproc-per-node 2 integration/examples/tutorials/zero.py
"""

import torch.distributed as dist
from lesson import draw, read_config, show, train


def main():
    config, options = read_config()
    dist.init_process_group()
    runs = {}
    for stage in range(4):
        runs[f"stage {stage}"] = train(
            config | {"zero_optimization": {"stage": stage}}, options.steps
        )
    show(runs)
    draw(options.plot, "Bytes per rank", {name: run.device for name, run in runs.items()})

    first, *others = runs.values()
    assert first.losses[-1] < first.losses[0]
    assert all(run.losses == first.losses for run in others), "a stage changed a loss"
    sizes = [sum(run.device.values()) for run in runs.values()]
    assert sizes == sorted(sizes, reverse=True), "a higher stage took more memory"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
