"""Hooks on modules that use quantized parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_core._torch import outside_graphs
from zero_core.core.passes import Passes
from zero_core.core.unit import Unit
from zero_core.layout.discovery import Metadata, Quantized, is_same_memory
from zero_core.sharded.sharded_state import ShardedState


def hook_components(
    passes: Passes, modules: Sequence[nn.Module], state: ShardedState
) -> list[RemovableHandle]:
    """Hook modules that hold quantized parameters, and their blocks, which may read them, too.

    At stage 3 the hooks gather a block before the backward of such a module. At every stage, if a
    module's forward repacked a weight, the weight's memory and metadata are restored afterwards. If
    a block's forward replaced a parameter by another one over the same memory (as peft's DoRA
    does), the original object is restored. A parameter with other memory is kept, because it has
    other values (as after peft merges an adapter).
    """
    units = {
        index: unit
        for unit in passes.units.blocks
        for flat in unit.params
        if flat.segment.is_opaque and not flat.is_kept
        for index in map(id, flat.params)
    }
    whole = {id(q.param): q for q in state.quantized}
    handles = []
    entries: list[tuple[nn.Module, str, nn.Parameter]] = []  # holder, attribute, parameter

    def hook_attached(module: nn.Module, attached: list[Quantized]) -> None:
        before = [(state.places[id(q.param)], Metadata(q.param)) for q in attached]

        def put_back(module: nn.Module, args: Any, output: Any) -> None:
            for (flat, position), metadata in before:
                if flat.shown.restore(position):
                    metadata.put_back()

        handles.append(module.register_forward_hook(outside_graphs(put_back)))
        own = {id(q.param) for q in attached}
        named = module._parameters.items()
        entries.extend((module, n, p) for n, p in named if p is not None and id(p) in own)

    def hook_entries(block: nn.Module) -> None:
        parts = set(block.modules())
        own = [entry for entry in entries if entry[0] in parts]

        def put_back(module: nn.Module, args: Any, output: Any) -> None:
            for holder, name, param in own:
                found = holder._parameters.get(name)
                if found is not None and is_same_memory(found, param):
                    holder._parameters[name] = param

        if own:
            handle = block.register_forward_hook(outside_graphs(put_back), always_call=True)
            handles.append(handle)

    def hook(module: nn.Module, unit: Unit) -> None:
        def watch(module: nn.Module, args: Any, output: Any) -> None:
            passes.units.saved.watch_outputs(unit, output)

        handles.append(module.register_forward_hook(outside_graphs(watch)))

    for module in modules[0].modules():
        own = [whole[id(p)] for p in module.parameters(recurse=False) if id(p) in whole]
        attached = [q for q in own if not q.is_plain and q.components[0] is q.param]
        if attached:
            hook_attached(module, attached)
        for unit in {units[n] for q in own for n in map(id, q.components) if n in units}:
            if module is not modules[unit.index]:
                hook(module, unit)
    for unit in set(units.values()):
        hook(modules[unit.index], unit)
    for block in dict.fromkeys(modules):
        hook_entries(block)
    return handles
