"""ZeRO++: fewer bytes between nodes, with each of its three keys and with all.

torchrun --nproc-per-node 4 integration/examples/tutorials/zeropp.py
"""

import torch
import torch.distributed as dist
from lesson import draw, read_config, show, train
from torch.distributed.device_mesh import init_device_mesh


def main():
    config, options = read_config()
    dist.init_process_group()
    # The mesh declares two nodes on one machine. On real nodes no mesh is needed.
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (2, dist.get_world_size() // 2))
    zero = config["zero_optimization"]
    plain = {"stage": 3}
    settings = {"stage 3": plain}
    settings |= {name: plain | {name: zero[name]} for name in zero if name != "stage"}
    settings["all three"] = zero
    runs = {}
    for name, keys in settings.items():
        short = name.removeprefix("zero_").removesuffix("_size").replace("_", " ")
        runs[short] = train(config | {"zero_optimization": keys}, options.steps, mesh)
    show(runs)
    links = {
        name: {"within a node": run.within_node, "between nodes": run.between_nodes}
        for name, run in runs.items()
    }
    draw(options.plot, "Sent by a rank in one step", links)

    first, *others = runs.values()
    assert first.losses[-1] < first.losses[0]
    assert all(abs(run.losses[-1] / first.losses[-1] - 1) < 0.05 for run in others)
    assert all(run.between_nodes < first.between_nodes for run in others)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
