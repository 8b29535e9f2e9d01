"""Code shared by the tutorials: options, a byte-level model, a training loop, table and chart."""

import argparse
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zero_core

WIDTH, CONTEXT, BATCH = 128, 8, 32


@dataclass
class Run:
    """A run's losses, planned bytes by kind, and bytes that this rank sent in the last step."""

    losses: list[float]
    device: dict[str, int]
    host: dict[str, int]
    within_node: int
    between_nodes: int


def read_config():
    """Return the content of the script's JSON file, and the command-line options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plot", help="write the picture there (matplotlib is needed)")
    return json.loads(Path(sys.argv[0]).with_suffix(".json").read_text()), parser.parse_args()


def make_model():
    first = [nn.Embedding(256, WIDTH // CONTEXT), nn.Flatten(), nn.Linear(WIDTH, WIDTH)]
    blocks = [nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(8)]
    return nn.Sequential(*first, *blocks, nn.Linear(WIDTH, 256))


def train(config, steps, mesh=None):
    """Train with ``config``, always from the same initial weights and on the same text."""
    torch.manual_seed(0)
    engine = zero_core.build(make_model(), config, mesh=mesh)
    text = torch.tensor(list(inspect.getsource(argparse).encode()), device=engine.device)
    windows = text.unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        window = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        loss = nn.functional.cross_entropy(engine(window[:, :-1]), window[:, -1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    sent = engine.comm_report()
    engine.close()
    device, host = count_bytes(config, mesh)
    return Run(
        losses,
        device,
        host,
        sum(row.within_node_bytes for row in sent),
        sum(row.between_nodes_bytes for row in sent),
    )


def count_bytes(config, mesh):
    """Return planned bytes by kind, on the device and on the host. Empty on ranks other than 0."""
    if dist.get_rank() != 0:
        return {}, {}
    world_size = dist.get_world_size()
    with torch.device("meta"):
        model = make_model()
    nodes = {"ranks_per_node": mesh.size(1) if mesh else world_size}
    memory = zero_core.plan(model, config, world_size, **nodes).memory
    return memory.device, memory.host


def show(runs):
    """Print one line per run, on rank 0."""
    if dist.get_rank() == 0:
        row = "{:24}{:>18}{:>11}{:>9}{:>14}{:>14}".format
        print(row("", "loss", "device kB", "host kB", "in the node", "between nodes"))
        for name, run in runs.items():
            loss = f"{run.losses[0]:.4f} -> {run.losses[-1]:.4f}"
            sizes = [sum(run.device.values()), sum(run.host.values())]
            sizes += [run.within_node, run.between_nodes]
            print(row(name, loss, *(f"{size / 1000:.0f}" for size in sizes)))


def draw(path, title, bars):
    """Draw stacked bars, ``{bar: {kind: bytes}}``, to ``path`` on rank 0."""
    if path is None or dist.get_rank() != 0:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(bars) + 1.6), layout="constrained")
    axes.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
    starts = dict.fromkeys(bars, 0.0)
    for kind in dict.fromkeys(kind for bar in bars.values() for kind in bar if bar[kind]):
        sizes = [bar.get(kind, 0) / 1e6 for bar in bars.values()]
        axes.barh(list(bars), sizes, left=list(starts.values()), label=kind)
        starts = {name: starts[name] + size for name, size in zip(bars, sizes, strict=True)}
    axes.invert_yaxis()
    axes.set(xlabel="MB", title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.savefig(path, dpi=110)
