"""Memory and traffic of a run before anything is allocated, and the smallest change that fits.

    plan = zero_core.plan(model_on_meta, "zero.json", 64, device_memory=24 * 10**9)
    print(plan.advice)   # "does not fit as configured ...; stage 3 with ratio 0.37 fits"

`zero_core.plan.planner` has the choices.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zero_core.blueprint import Blueprint
from zero_core.config import load_config
from zero_core.errors import ConfigError, MissingPartError
from zero_core.plan.forecast import buffer_bytes
from zero_core.plan.planner import Machine, Planner, ranks_of_node
from zero_core.plan.result import Plan


def plan(
    model: Any,
    config: Mapping[str, Any] | str | Path,
    world_size: int,
    *,
    device_memory: int | None = None,
    host_memory: int | None = None,
    ranks_per_node: int | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    device_type: Literal["accelerator", "cpu"] = "accelerator",
    allow_rounding: bool = False,
    nvme_path: str | None = None,
) -> Plan:
    """Compute the memory and traffic of `build` and a training step. Nothing is allocated.

    Bytes of long-lived memory are exact: they come from the code that allocates it. Not counted are
    temporaries within an operation or an optimizer's step, and what torch, the
    communication library and the allocator keep for themselves. Of Muon's step neither the memory
    nor the traffic of its gather of momenta is counted. What a package that is not installed would
    keep and send is not counted either: ``missing`` of the result names it.

    Args:
        model: a module on any device, best on the meta device; or a Hugging Face configuration
            (an object, or what its ``config.json`` holds), of which the model is made there.
        config: the engine's configuration, or the path of its JSON file.
        world_size: number of data-parallel ranks.
        device_memory: bytes of one rank's device; None does not limit it.
        host_memory: bytes of one node's memory, shared by its ranks; None does not limit it.
        ranks_per_node: ranks of one node; 8 unless given, or all if they are fewer.
        example_inputs: arguments of one micro-batch's forward, on any device; with them, the
            activations that autograd saves are counted, and other micro-batches are tried: tensors
            whose first dimension is the micro-batch are made so much longer or shorter.
        device_type: "accelerator", or "cpu" where parameters are in host memory too: the sum
            of both is then held against ``host_memory``.
        allow_rounding: choose configurations as well whose numbers differ: quantized communication,
            and Adam's moments of 16 or 8 bits on the host.
        nvme_path: folder on an NVMe disk that may hold optimizer states. Its room is not checked.

    Raises:
        ConfigError: an argument or the configuration is wrong, or does not fit the model.
        MissingPartError: a Hugging Face configuration without transformers.
    """
    per_node = ranks_of_node(world_size, ranks_per_node)
    machine = Machine(world_size, per_node, device_memory, host_memory, device_type, nvme_path)
    planner = make_planner(model, config, machine, example_inputs)
    return planner.plan(allow_rounding=allow_rounding)


def make_planner(
    model: Any,
    config: Mapping[str, Any] | str | Path,
    machine: Machine,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None,
) -> Planner:
    """Return the choices of a run on a machine. Arguments and errors are those of `plan`."""
    world_size = machine.world_size
    resolved = load_config(config, world_size=world_size)
    resolved = resolved.on_nodes(machine.ranks_per_node, world_size)
    module = model if isinstance(model, nn.Module) else _model_of(model)
    drawn = Blueprint.draw(module, resolved, world_size)
    return Planner(drawn, resolved, machine, buffer_bytes(module, resolved), example_inputs)


def _model_of(config: Any) -> nn.Module:
    """Return a Hugging Face configuration's model, with a language model's head if it has one."""
    # foreign: a configuration of transformers
    is_config = isinstance(config, Mapping) or hasattr(config, "model_type")
    if not is_config:
        raise ConfigError(
            f"model: expected a torch module or a Hugging Face configuration, found "
            f"{type(config).__name__}"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPartError(
            "a plan from a Hugging Face configuration needs the package transformers, which is "
            "not installed: pip install transformers; or pass the model itself, made within "
            "torch.device('meta')"
        ) from error
    try:
        if isinstance(config, Mapping):
            config = transformers.AutoConfig.for_model(**config)
        else:
            config = copy.deepcopy(config)
        is_seq2seq = config.is_encoder_decoder and (
            type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        )
        if is_seq2seq:
            kind = transformers.AutoModelForSeq2SeqLM
        elif type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            kind = transformers.AutoModelForCausalLM
        else:
            kind = transformers.AutoModel
        # An encoder-decoder shifts its labels and fills up with pad_token_id. Others would look for
        # padding in inputs that have no values on the meta device.
        if not is_seq2seq:
            config.pad_token_id = None
        with torch.device("meta"):
            module: nn.Module = kind.from_config(config)
    except Exception as error:  # whatever a model's code makes of values that it does not expect
        cause = " ".join(str(error).split())
        raise ConfigError(f"model: transformers cannot make it: {cause}") from error
    return module.train()
