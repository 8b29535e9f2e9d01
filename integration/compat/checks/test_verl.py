"""verl's workers train with this engine as with verl's own FSDP2 engine, on the CPU.

verl's trainer starts workers by Ray, and generates by vLLM, which needs a GPU. Here rank processes
call the workers, with given responses and rewards.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zero_core.testing import spawn

pytest.importorskip("verl", reason="verl needs other releases of transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
FP32 = "mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
COMMON = (
    *("model.use_remove_padding=False", "+model.override_config.attn_implementation=eager"),
    *("+model.load_tokenizer=False", "rollout.log_prob_micro_batch_size_per_gpu=2"),
    "ref.log_prob_micro_batch_size_per_gpu=2",
    *("actor.optim.lr=0.01", "actor.optim.lr_scheduler_type=cosine"),
    *("actor.optim.total_training_steps=4", "actor.optim.override_optimizer_config={eps: 1e-3}"),
    *("actor.use_kl_loss=False", "actor.ppo_micro_batch_size_per_gpu=1"),
    *(f"+actor.fsdp_config.{FP32}", f"+ref.fsdp_config.{FP32}"),
    "actor.fsdp_config.use_no_sync_for_gradient_accumulation=True",
)
FSDP2 = (
    *("actor.strategy=fsdp2", "~actor.fsdp_config.zero"),
    "actor.fsdp_config._target_=verl.workers.config.FSDPEngineConfig",
)


def _prepare_cpu() -> None:
    """Add the platform "cpu" to verl, which has CUDA, ROCm and NPUs, and its FSDP2 engine there."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    bytes_of = (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    )
    module = SimpleNamespace(**dict.fromkeys((*bytes_of, "is_available"), lambda: 0))
    vars(module).update(mem_get_info=lambda: (0, 0), get_device_name=lambda: "CPU")

    class Cpu(PlatformCUDA):
        device_name, device_module = "cpu", module
        current_device = lambda self: torch.device("cpu")  # noqa: E731

    set_platform(Cpu())
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    EngineRegistry.register("language_model", "fsdp2", device="cpu")(FSDPEngineWithLMHead)


def _make_worker(path: Path, *overrides: str, role: str = "actor") -> Any:
    """Return a worker of the example's configuration with ``overrides``."""
    from hydra import compose, initialize_config_dir
    from verl.workers.engine_workers import ActorRolloutRefWorker

    given = [
        f"{text[: text[0] in '+~']}actor_rollout_ref.{text.lstrip('+~')}"
        for text in (f"model.path={path}", *COMMON, *overrides)
    ]
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        config = compose("verl", given).actor_rollout_ref
    worker = ActorRolloutRefWorker(config, role=role)
    worker.init_model()
    return worker


def _batch(rank: int, world_size: int, **further: torch.Tensor) -> Any:
    """Return this rank's part of 8 responses to 2 prompts, with GRPO's advantages."""
    import numpy as np
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.utils.padding import left_right_2_no_padding

    seeded = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 61, (8, 10), generator=seeded)
    mask = (torch.arange(6) < torch.tensor([[6], [3], [5], [6], [2], [6], [4], [6]])).long()
    rewards = torch.rand(8, 6, generator=seeded) * mask
    attended = torch.cat([torch.ones(8, 4, dtype=torch.long), mask], dim=1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.repeat([0, 1], 4))
    every = {
        "input_ids": ids,
        "prompts": ids[:, :4],
        "responses": ids[:, 4:],
        "response_mask": mask,
    }
    every |= {"attention_mask": attended, "position_ids": (attended.cumsum(1) - 1).clamp(min=0)}
    own = {k: v.chunk(world_size)[rank] for k, v in (every | {"advantages": advantages}).items()}
    settings = {"temperature": 1.0, "calculate_entropy": True, "compute_loss": False}
    settings |= {"global_batch_size": 4, "mini_batch_size": 4, "epochs": 1, "seed": 1}
    return left_right_2_no_padding(get_tensordict(own | further, settings))


def _infer(compute: Any, *ranks: int) -> list[torch.Tensor]:
    from verl.workers.utils.padding import no_padding_2_padding

    output = compute(batch := _batch(*ranks))
    return [no_padding_2_padding(output[name], batch) for name in ("log_probs", "entropy")]


def _train(worker: Any, *ranks: int) -> list[torch.Tensor]:
    found = _infer(worker.compute_log_prob, *ranks)
    metrics = worker.update_actor(_batch(*ranks, old_log_probs=found[0]))["metrics"]
    return [*found, *(torch.tensor(metrics[name]) for name in ("loss", "grad_norm", "lr"))]


def _trains_as_fsdp2(rank: int, world_size: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="", MASTER_PORT="0")
    _prepare_cpu()
    plain = _make_worker(folder / "llama", *FSDP2)
    expected = [_train(plain, rank, world_size) for _ in range(2)]
    sent = dict(plain.actor.engine.get_per_tensor_param()[0])
    for zero in ("stage1", "stage2-offload", "stage3"):
        worker = _make_worker(folder / "llama", f"actor.fsdp_config.zero={zero}")
        found = [_train(worker, rank, world_size)]
        worker.save_checkpoint(str(folder / zero))
        found.append(_train(worker, rank, world_size))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        weights = dict(worker.actor.engine.get_per_tensor_param()[0])
        torch.testing.assert_close(weights, sent, rtol=0.0, atol=1e-5)
        worker.load_checkpoint(str(folder / zero))
        torch.testing.assert_close(_train(worker, rank, world_size), found[1], rtol=0.0, atol=0.0)
        worker.actor.engine.engine.offload_states()
        again = dict(worker.actor.engine.get_per_tensor_param()[0])
        torch.testing.assert_close(again, weights, rtol=0.0, atol=0.0)
        assert worker.actor.engine.engine.offloaded_states
    reference = _make_worker(folder / "llama", role="ref")
    found = _infer(reference.compute_ref_log_prob, rank, world_size)
    torch.testing.assert_close(found, expected[0][:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_verls_workers_train_as_with_fsdp2(world_size: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 61}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    spawn(_trains_as_fsdp2, world_size, tmp_path, ranks_per_node=world_size)
