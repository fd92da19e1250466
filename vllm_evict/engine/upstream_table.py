"""The table of ``upstream``: which names of vLLM this project imports, overrides, calls and reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One class or function of vLLM. That it exists is always checked.

    Args:
        module: where we (or vLLM) find it.
        name: in that module; ``Class.method`` for methods, inherited ones too.
        overrides: its parameters, all of them in their order (self left out), where our own has them by name.
        passed: what we pass, in order: known, and all that is needed.
        has: attributes, methods and fields that we use, inherited ones too.
        abstract: abstract methods that our subclass defines; there may be fewer.
        mentions: names its body must use, because that is how our part comes into play.
        body: fingerprints of its body as it was read (``upstream`` prints them); another one is to be read again.

    """

    module: str
    name: str
    overrides: tuple[str, ...] | None = None
    passed: tuple[str, ...] | None = None
    has: tuple[str, ...] = ()
    abstract: tuple[str, ...] | None = None
    mentions: tuple[str, ...] = ()
    body: str | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _names(module: str, names: str) -> tuple[Hook, ...]:
    return tuple(Hook(module, name) for name in names.split())


_FORWARD = _words("layer query key value kv_cache attn_metadata output output_scale output_block_scale")
_BUILD = _words("common_prefix_len common_attn_metadata fast_build")
_BACKENDS = {
    "cpu_attn": ("CPUAttentionBackend", "CPUAttentionBackendImpl", "CPUAttentionMetadataBuilder"),
    "flash_attn": ("FlashAttentionBackend", "FlashAttentionImpl", "FlashAttentionMetadataBuilder"),
    "flashinfer": ("FlashInferBackend", "FlashInferImpl", "FlashInferMetadataBuilder"),
    "triton_attn": ("TritonAttentionBackend", "TritonAttentionImpl", "TritonAttentionMetadataBuilder"),
}


def _attention_hooks() -> tuple[Hook, ...]:
    hooks = []
    for file, (backend, impl, builder) in _BACKENDS.items():
        module = f"vllm.v1.attention.backends.{file}"
        softcap = "logits_soft_cap"
        hooks += [
            Hook(module, backend, has=_words("get_impl_cls get_builder_cls customize_spec get_name")),
            Hook(module, f"{backend}.customize_spec", overrides=("spec",)),
            Hook(module, f"{impl}.forward", overrides=_FORWARD),
            Hook(module, impl, has=("num_heads", "scale", softcap)),
            Hook(module, f"{builder}.build", overrides=_BUILD, mentions=_words("seq_lens block_table_tensor")),
            Hook(module, f"{builder}.get_cudagraph_support", overrides=_words("vllm_config kv_cache_spec")),
            Hook(module, f"{builder}.build_for_cudagraph_capture", overrides=("common_attn_metadata",)),
            Hook(module, builder, has=_words("kv_cache_spec layer_names vllm_config device")),
        ]
    return tuple(hooks)


ATTENTION = (
    *_attention_hooks(),
    *_names("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadata"),
    Hook(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder",
        has=_words("dtype isa head_dim block_size kv_cache_dtype"),
    ),
    Hook(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionMetadata",
        has=_words("max_query_len num_actual_tokens seq_lens causal mm_prefix_range_tensor rswa_window"),
    ),
    Hook(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionImpl",
        has=_words("head_size attn_type kv_cache_dtype sliding_window chunk_lookback alibi_slopes sinks"),
    ),
    Hook(
        "vllm.v1.attention.backends.flashinfer",
        "FlashInferMetadataBuilder.build",
        mentions=("seq_lens_cpu_upper_bound",),
    ),
    *_names("vllm.v1.attention.backend", "AttentionLayer AttentionBackend AttentionMetadataBuilder"),
    Hook("vllm.v1.attention.backend", "AttentionCGSupport", has=_words("NEVER UNIFORM_SINGLE_TOKEN_DECODE")),
    Hook(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        has=_words(
            "block_table_tensor seq_lens seq_lens_cpu_upper_bound max_seq_len num_reqs req_idx slot_mapping "
            "query_start_loc query_start_loc_cpu num_actual_tokens max_query_len"
        ),
    ),
    Hook(
        "vllm.v1.attention.backends.registry",
        "AttentionBackendEnum",
        has=_words("CPU_ATTN FLASH_ATTN FLASHINFER TRITON_ATTN clear_override get_path"),
    ),
    Hook("vllm.v1.attention.backends.registry", "register_backend", passed=_words("backend class_path")),
    Hook("vllm.v1.attention.selector", "_cached_get_attn_backend"),
    Hook(
        "vllm.v1.attention.selector",
        "get_attn_backend",
        passed=_words("head_size dtype kv_cache_dtype use_mla"),
        mentions=("_cached_get_attn_backend",),
    ),
    Hook(
        "vllm.model_executor.layers.attention", "Attention", has=_words("impl kv_cache sliding_window get_attn_backend")
    ),
    Hook("vllm.model_executor.layers.attention", "Attention.get_kv_cache_spec"),
    Hook(
        "vllm._custom_ops",
        "cpu_attn_reshape_and_cache",
        passed=_words("key value key_cache value_cache slot_mapping isa kv_cache_dtype"),
    ),
)

XFORMERS = (
    Hook("vllm.v1.attention.backend", "AttentionBackend", abstract=_words("get_name get_impl_cls get_builder_cls")),
    Hook("vllm.v1.attention.backend", "AttentionBackend.validate_configuration"),
    *(
        Hook("vllm.v1.attention.backend", f"AttentionBackend.{name}")
        for name in _words(
            "supported_kv_cache_layouts get_supported_head_sizes supports_sliding_window supports_compute_capability "
            "supports_device_cpu_query_lens_mismatch get_supported_kernel_block_sizes"
        )
    ),
    Hook(
        "vllm.v1.attention.backend",
        "AttentionBackend",
        has=_words("forward_includes_kv_cache_update supported_dtypes supported_kv_cache_dtypes"),
    ),
    Hook(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder",
        abstract=_words("__init__ build"),
        has=("supports_update_block_table",),
    ),
    Hook("vllm.v1.attention.backend", "AttentionMetadataBuilder.build", overrides=_BUILD),
    Hook("vllm.v1.attention.backend", "AttentionImpl", abstract=_words("__init__ forward")),
    Hook("vllm.v1.attention.backend", "AttentionImpl.forward", overrides=_FORWARD),
    Hook("vllm.model_executor.layers.attention.attention", "unified_kv_cache_update", mentions=("do_kv_cache_update",)),
    *_names("vllm.v1.attention.backend", "AttentionMetadata MultipleOf"),
    Hook("vllm.v1.attention.backend", "AttentionType", has=("DECODER",)),
    Hook("vllm.v1.kv_cache_layout", "KVCacheLayout", has=("LBNHC",)),
    Hook("vllm.v1.kv_cache_interface", "SlidingWindowSpec", has=_words("block_size sliding_window")),
    Hook(
        "vllm.v1.attention.ops.triton_reshape_and_cache_flash",
        "triton_reshape_and_cache_flash",
        passed=_words("key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"),
    ),
    Hook("vllm.utils.torch_utils", "async_tensor_h2d", passed=_words("data device")),
    *_names("vllm.config.cache", "CacheDType"),
    *_names("vllm.platforms.interface", "DeviceCapability"),
)

REBASE = (
    Hook(
        "vllm.model_executor.layers.rotary_embedding.base",
        "RotaryEmbeddingBase",
        has=_words("is_neox_style _compute_cos_sin_cache"),
    ),
    *_names("vllm.model_executor.layers.rotary_embedding.mrope", "MRotaryEmbedding"),
    Hook("vllm.model_executor.layers.attention", "Attention", has=("kv_sharing_target_layer_name",)),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", has=_words("positions get_model")),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._dummy_run", passed=("num_tokens",)),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._model_forward",
        overrides=_words("input_ids positions intermediate_tensors inputs_embeds"),
    ),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model", mentions=("_model_forward",)),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", has=_words("model_state input_buffers device get_model")),
    Hook(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner._dummy_run",
        passed=_words("num_tokens skip_attn is_profile"),
    ),
    Hook(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.execute_model",
        mentions=_words("model_state prepare_inputs positions"),
    ),
    Hook(
        "vllm.v1.worker.gpu.model_states.interface",
        "ModelState.prepare_inputs",
        overrides=_words("input_batch req_states"),
    ),
    Hook(
        "vllm.v1.worker.gpu.model_states.interface",
        "ModelState.prepare_dummy_inputs",
        overrides=_words("num_reqs num_tokens"),
    ),
    Hook("vllm.v1.worker.gpu.input_batch", "InputBatch", has=("positions",)),
    Hook("vllm.v1.worker.gpu.input_batch", "InputBuffers", has=("positions",)),
    Hook("vllm.engine.arg_utils", "EngineArgs", has=_words("max_model_len create_model_config")),
    Hook("vllm.engine.arg_utils", "EngineArgs.create_model_config", passed=()),
    Hook("vllm.engine.arg_utils", "EngineArgs.create_engine_config", mentions=("create_model_config",)),
    Hook("vllm.config", "ModelConfig", has=_words("max_model_len original_max_model_len get_and_verify_max_len")),
)

PAGES = (
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager",
        has=_words(
            "block_size block_pool req_to_blocks num_cached_block kv_cache_spec kv_cache_group_id _null_block "
            "max_admission_blocks_per_request _has_partial_local_hit _get_num_evictable_blocks"
        ),
    ),
    Hook("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.new_step_starts", overrides=()),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.allocate_new_blocks",
        overrides=_words("request_id num_tokens num_tokens_main_model"),
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.get_num_blocks_to_allocate",
        overrides=_words(
            "request_id num_tokens new_computed_blocks total_computed_tokens num_local_computed_tokens "
            "num_tokens_main_model apply_admission_cap prefill_end"
        ),
        mentions=_words("max_admission_blocks_per_request _get_num_evictable_blocks _has_partial_local_hit"),
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.add_local_computed_blocks",
        overrides=_words("request_id new_computed_blocks num_local_computed_tokens num_external_computed_tokens"),
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.pop_blocks_for_free",
        overrides=("request_id",),
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager._has_partial_local_hit",
        passed=_words("new_computed_blocks num_local_computed_tokens"),
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager._get_num_evictable_blocks",
        passed=("blocks",),
    ),
    *_names("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager get_manager_for_kv_cache_spec"),
    Hook("vllm.v1.core.block_pool", "BlockPool", has=_words("blocks null_block num_gpu_blocks")),
    Hook("vllm.v1.core.block_pool", "BlockPool.free_blocks", passed=("ordered_blocks",)),
    Hook("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", passed=()),
    Hook("vllm.v1.core.block_pool", "BlockPool.touch", mentions=("ref_cnt",)),
    Hook("vllm.v1.core.kv_cache_utils", "KVCacheBlock", has=_words("block_id ref_cnt block_hash is_null")),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", has=("blocks",)),
    Hook(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        has=_words("coordinator empty_kv_cache_blocks allocate_slots"),
    ),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheManager.new_step_starts", mentions=("new_step_starts",)),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheManager.allocate_slots", passed=_words("request num_new_tokens")),
    Hook("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", has=("single_type_managers",)),
    Hook("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator.new_step_starts", mentions=("new_step_starts",)),
    Hook(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.cache_blocks",
        overrides=_words("request num_computed_tokens"),
    ),
    Hook(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.get_num_blocks_to_allocate",
        passed=_words(
            "request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens "
            "num_local_computed_tokens num_tokens_main_model"
        ),
    ),
    *_names("vllm.v1.kv_cache_interface", "AttentionSpec KVCacheSpec"),
    Hook(
        "vllm.v1.kv_cache_interface",
        "FullAttentionSpec",
        has=_words(
            "block_size num_kv_heads head_size dtype page_size_bytes sliding_window max_memory_usage_bytes merge"
        ),
    ),
    Hook("vllm.v1.kv_cache_interface", "FullAttentionSpec.max_memory_usage_bytes", overrides=("vllm_config",)),
    Hook("vllm.v1.kv_cache_interface", "FullAttentionSpec.merge", overrides=("specs",)),
    Hook("vllm.v1.kv_cache_interface", "KVCacheConfig", has=_words("num_blocks kv_cache_tensors kv_cache_groups")),
    Hook("vllm.v1.kv_cache_interface", "KVCacheTensor", has=("size",)),
    Hook("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", has=_words("layer_names kv_cache_spec")),
    Hook("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", has=("first_spec",)),
    Hook("vllm.v1.kv_cache_interface", "iter_layer_specs", passed=("kv_cache_spec",)),
    Hook("vllm.v1.kv_cache_interface", "replace_as"),
    Hook("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry.get_manager_class", passed=("kvcache_spec",)),
    Hook(
        "vllm.v1.kv_cache_spec_registry",
        "register_kv_cache_spec",
        passed=_words("manager_class uniform_type_base_spec"),
    ),
)

SCHEDULING = (
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        has=_words(
            "vllm_config kv_cache_config kv_cache_manager requests policy max_model_len log_stats make_stats "
            "reset_prefix_cache max_num_scheduled_tokens"
        ),
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule",
        mentions=_words("new_step_starts allocate_slots SchedulerOutput"),
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        overrides=_words("scheduler_output model_runner_output"),
        mentions=_words("_free_request kv_transfer_params"),
    ),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler._free_request", mentions=("_free_blocks",)),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.make_stats", mentions=("kv_connector_stats",)),
    *_names("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    Hook("vllm.v1.core.sched.request_queue", "SchedulingPolicy", has=("PRIORITY",)),
    Hook(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        has=_words("finished_req_ids preempted_req_ids num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs"),
    ),
    Hook("vllm.v1.core.sched.output", "NewRequestData", has=_words("req_id block_ids num_computed_tokens")),
    Hook(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        has=_words("req_ids new_block_ids num_computed_tokens resumed_req_ids"),
    ),
    Hook(
        "vllm.v1.request",
        "Request",
        has=_words(
            "request_id num_computed_tokens num_tokens num_prompt_tokens num_in_flight_tokens num_preemptions priority "
            "sampling_params status"
        ),
    ),
    Hook("vllm.v1.request", "RequestStatus", has=("RUNNING",)),
    Hook("vllm.v1.engine", "EngineCoreOutputs", has=("outputs",)),
    Hook("vllm.v1.engine", "EngineCoreOutput", has=_words("request_id kv_transfer_params")),
    Hook("vllm.v1.metrics.stats", "SchedulerStats", has=("kv_connector_stats",)),
)

WORKER = (
    *(
        Hook(
            f"vllm.v1.worker.{file}",
            name,
            has=_words(
                "vllm_config device model_runner load_model get_kv_cache_spec determine_available_memory "
                "initialize_from_config execute_model sample_tokens"
            ),
        )
        for file, name in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker"))
    ),
    Hook("vllm.v1.worker.gpu_worker", "Worker.get_kv_cache_spec", overrides=()),
    Hook("vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", overrides=()),
    Hook("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", overrides=()),
    Hook("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config", overrides=("kv_cache_config",)),
    Hook("vllm.v1.worker.gpu_worker", "Worker.execute_model", overrides=("scheduler_output",)),
    Hook("vllm.v1.worker.gpu_worker", "Worker.sample_tokens", overrides=("grammar_output",)),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", has=_words("attn_groups input_batch")),
    Hook("vllm.v1.worker.gpu_input_batch", "InputBatch", has=("req_ids",)),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", has=_words("attn_groups req_states")),
    Hook("vllm.v1.worker.gpu.states", "RequestState", has=("index_to_req_id",)),
    Hook("vllm.v1.worker.gpu.attn_utils", "build_attn_metadata", mentions=_words("req_idx build_metadata")),
    Hook("vllm.v1.worker.utils", "AttentionGroup", has=_words("metadata_builders backend layer_names kv_cache_spec")),
    Hook("vllm.v1.worker.utils", "AttentionGroup.build_metadata", mentions=("build",)),
    Hook(
        "vllm.v1.worker.utils",
        "AttentionGroup.build_metadata_for_cudagraph_capture",
        mentions=("build_for_cudagraph_capture",),
    ),
    Hook("vllm.v1.worker.block_table", "get_block_table_width", passed=_words("max_num_blocks block_size")),
    Hook("vllm.v1.outputs", "ModelRunnerOutput", has=("kv_connector_output",)),
    *_names("vllm.v1.outputs", "KVConnectorOutput"),
    Hook("vllm.v1.outputs", "AsyncModelRunnerOutput", abstract=_words("get_output get_kv_connector_output")),
    Hook("vllm.v1.outputs", "AsyncModelRunnerOutput.get_output", overrides=()),
    Hook("vllm.distributed", "get_tp_group", passed=()),
    Hook("vllm.distributed", "get_pp_group", passed=()),
    Hook("vllm.distributed.parallel_state", "GroupCoordinator", has=_words("all_reduce world_size ranks is_last_rank")),
)

FRONT_END = (
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs",
        has=_words("additional_config block_size create_engine_config _api_process_count"),
    ),
    Hook("vllm.engine.arg_utils", "EngineArgs.add_cli_args", overrides=("parser",)),
    Hook("vllm.engine.arg_utils", "EngineArgs.from_cli_args", overrides=("args",)),
    Hook("vllm.engine.arg_utils", "AsyncEngineArgs.add_cli_args", mentions=("add_cli_args",)),
    Hook(
        "vllm.v1.engine.input_processor",
        "InputProcessor",
        has=_words("vllm_config process_inputs"),
    ),
    Hook(
        "vllm.v1.engine",
        "EngineCoreRequest",
        has=_words("prompt_token_ids prompt_embeds sampling_params"),
    ),
    Hook("vllm.utils", "length_from_prompt_token_ids_or_embeds", passed=_words("prompt_token_ids prompt_embeds")),
    Hook("vllm.v1.engine.async_llm", "AsyncLLM", has=("vllm_config",)),
    Hook("vllm.v1.engine.async_llm", "AsyncLLM.generate", passed=_words("prompt sampling_params request_id")),
    Hook("vllm.v1.metrics.loggers", "StatLoggerManager.__init__", mentions=("vllm_config",)),
    Hook(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.record",
        overrides=_words("scheduler_stats iteration_stats mm_cache_stats engine_idx"),
    ),
    *_names("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionStreamResponse"),
    Hook(
        "vllm.entrypoints.openai.chat_completion.serving",
        "OpenAIServingChat.chat_completion_stream_generator",
        mentions=("result_generator",),
    ),
    Hook(
        "vllm.entrypoints.openai.completion.serving",
        "OpenAIServingCompletion.completion_stream_generator",
        mentions=("result_generator",),
    ),
    Hook("vllm.outputs", "RequestOutput", has=("kv_transfer_params",)),
    Hook("vllm.sampling_params", "SamplingParams", has=_words("extra_args max_tokens stop")),
    *_names("vllm.exceptions", "VLLMValidationError"),
    *_names("vllm.logger", "init_logger"),
    Hook("vllm.plugins", "load_general_plugins"),
    *_names("vllm.entrypoints.cli.serve", "make_arg_parser"),  # imported there; where it is defined moves
    *_names("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
    Hook("vllm.usage.usage_lib", "UsageContext", has=("OPENAI_API_SERVER",)),
)

CONFIG = (
    Hook("vllm.config", "CUDAGraphMode", has=("NONE",)),
    Hook(
        "vllm.config",
        "VllmConfig",
        has=_words(
            "additional_config model_config cache_config parallel_config scheduler_config compilation_config "
            "attention_config kv_transfer_config kv_events_config speculative_config max_in_flight_tokens "
            "max_concurrent_batches use_v2_model_runner"
        ),
    ),
    *_names("vllm.config", "set_current_vllm_config get_current_vllm_config"),
    Hook(
        "vllm.config",
        "ModelConfig",
        has=_words(
            "max_model_len hf_text_config get_sliding_window get_and_verify_max_len use_mla is_hybrid has_inner_state "
            "is_attention_free is_encoder_decoder runner_type is_diffusion uses_mrope uses_alibi rswa_window "
            "is_mm_prefix_lm served_model_name get_head_size dtype"
        ),
    ),
    Hook("vllm.config", "CacheConfig", has=_words("block_size cache_dtype num_gpu_blocks kv_sharing_fast_prefill")),
    Hook(
        "vllm.config",
        "ParallelConfig",
        has=_words(
            "worker_cls decode_context_parallel_size prefill_context_parallel_size pipeline_parallel_size "
            "use_ubatching data_parallel_size data_parallel_size_local data_parallel_rank_local local_engines_only"
        ),
    ),
    Hook(
        "vllm.config",
        "SchedulerConfig",
        has=_words("scheduler_cls async_scheduling max_num_seqs disable_hybrid_kv_cache_manager"),
    ),
    Hook("vllm.config", "CompilationConfig", has=("static_forward_context",)),
    Hook("vllm.platforms.interface", "Platform", has=_words("is_cpu get_device_name")),
    *_names("vllm.envs", "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_BATCH_INVARIANT VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
)

READ = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward": "20c7c31f1e19",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.allocate_new_blocks": "e437b008c676",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.get_num_blocks_to_allocate": "6e952c2765f8",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.add_local_computed_blocks": "3205de735830",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.pop_blocks_for_free": "414eaa7995ae 81b7c3d1f792",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.cache_blocks": "b37c627b4a39",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit": "f0cec6d3ebf4",
    "vllm.v1.core.single_type_kv_cache_manager:get_manager_for_kv_cache_spec": "276a2bfe0114",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": "a1ede7d308c9 78d104e2e49d",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": "2115d655778b",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "ab31edee3eae",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": "c241c8e9e435",
    "vllm.v1.core.block_pool:BlockPool.touch": "b6e27625b681 e3624e1c5acd",
    "vllm.v1.core.block_pool:BlockPool.free_blocks": "cd29c4d90d63 af5d02bc76e3",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "bdcf88ed7382 a376c8bfdaa7",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "3e1d430e6c51 13c5c931ef1a",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": "6b9a7337adff 9fc4ea92bccb",
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": "9bdc12f4f301",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": "5c35efb3c7e9",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.merge": "fa7e673e5889 380d31e8481b",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes": "8894904bd95f",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": "f9a0541487c9",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "dc3cc01356ba",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_cudagraph_capture": "34811edf5ad0",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build": "c6c024eafb67",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build": "b335b34539ba",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward": "6d88e0f6d3ee",
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.build": "59f23ebab179 397ba44f761f",
    "vllm.v1.attention.backends.flashinfer:FlashInferImpl.forward": "dd7e39dbc88a 80c35be4e95b",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build": "3c6164684b24",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build_for_cudagraph_capture": "4cf4822da7b9",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward": "19b1e65d8b88 cefeab053aa0",
    "vllm.v1.attention.selector:get_attn_backend": "e1282b2835e5 abf6bf677e18",
    "vllm.v1.attention.backends.registry:register_backend": "c1f2460bfd09",
    "vllm.v1.worker.utils:AttentionGroup": "d7c886280a8b",
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": "626130acc1cf",
    "vllm.v1.worker.gpu_worker:Worker.execute_model": "9bf8a46a1bc8",
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory": "86b3aabc3ee1 e350d348bd1c",
    "vllm.v1.worker.gpu.attn_utils:build_attn_metadata": "23c0f7b81f19",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "3973aa45e3d7",
    "vllm.v1.metrics.loggers:StatLoggerManager.record": "2d6717815563",
    "vllm.plugins:load_general_plugins": "8aaf93304287",
}
"""Functions whose inner workings we count on, with fingerprints of what was read: 0.32's, then 0.33's if it differs."""

HOOKS = (
    *ATTENTION,
    *XFORMERS,
    *REBASE,
    *PAGES,
    *SCHEDULING,
    *WORKER,
    *FRONT_END,
    *CONFIG,
    *(Hook(*path.split(":"), body=fingerprint) for path, fingerprint in READ.items()),
)
