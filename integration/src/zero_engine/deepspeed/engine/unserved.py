"""Public methods of DeepSpeed's engine that this one does not have: asked for, they are refused."""

from __future__ import annotations

_NAMES = """
    aio_config all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain
    autotuning_end_profile_step autotuning_metric autotuning_metric_path
    autotuning_model_info_path autotuning_start_profile_step buffered_allreduce_fallback
    checkpoint_serialization_enabled checkpoint_writer_enabled clip_fp32_gradients
    coalesce_grad_reduction collect_python_gc compile_zero_optimization_stage cpuadam_cores_perc
    curriculum_learning_config data_efficiency_config data_sampling_config get_autosp_backend
    get_autotp_backend get_compile_time get_deepcompile_backend get_deepspeed_compile_backend
    get_optimizer_configuration get_wall_clock_timers is_iterable_style_dataset
    is_map_style_dataset is_sanity_checks_enabled load_moe_state_dict offload_states
    optimizer_legacy_fusion print_forward_breakdown random_ltd_config random_ltd_initialize
    register_compile_pass reload_states set_custom_curriculum_learning_schedule
    set_data_post_process_func set_train_micro_batch_size sparse_all_gather sparse_allreduce
    sparse_allreduce_bucket sparse_allreduce_no_retain swap_tensor_config tensor_parallel_config
    torch_autocast_lower_precision_safe_modules uses_parallelization_pass_only zenflow_config
    zero_log_trace_cache_warnings zero_save_muon_momentum_buffer_in_memory
"""
UNSERVED = frozenset(_NAMES.split())
