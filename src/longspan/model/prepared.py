# For the branch `model`: what prepare_language_model becomes over check_model (imports: longspan.model.exactness.check_model
# check_model, Evidence; drop adapter_in, check_adapter, check_equal_adapters, refuse_mtp, refuse_class, try_class,
# put_copied_depths_in_place, without_adapter, nullcontext, probe_model, check_kernel, random_draws, draws_in_evaluation, refuse_unsupported)
    pipeline, placement = options.pipeline(world), options.placement(world)
    if options.fused_norms not in ("auto", "on", "off"):
        raise ModelError(f"fused_norms is {options.fused_norms!r}; use 'auto', 'on' or 'off'")
    peft_model, model = model, model_inside(model)

    def connect(model: PreTrainedModel) -> None:
        check_kernels(model, options.mixer_kernels, placement.dtype_of(model), world.device)
        _choose_norms(model, options.fused_norms, world.device)
        _connect(model, options.mixer_kernels)

    kernel, stages = options.attention_kernel, pipeline.stages
    evidence = check_model(model, placement, connect, stages=stages, kernel=kernel, probe=options.probe)
    assert isinstance(model, PreTrainedModel)  # others were refused
    model.config.use_cache = False
    execution = _execution(model, placement, evidence.calls, options)
    # The first pass would show it on the last stage only, and the others wait.
    tried = add_row_loss(model, probe=options.probe or world.home.pp > 1, required=options.probe)
    rules = _call_rules(model, placement, options.attention_kernel, evidence)
    # ... as before; `evidence.adapter` in place of `adapter` at the end; `_check` goes; `_connect(model, mixer_kernels)`
    # keeps its lines up to use_experts(model); `_call_rules` takes evidence.draws and evidence.draws_in_evaluation

def _execution(model: PreTrainedModel, placement: Placement, calls: tuple[AttentionCall, ...], options: PrepareOptions) -> Execution:
    dtype, reduce_dtype = placement.dtype_of(model), placement.reduce_dtype_of(model)
    mixers = len(find_mixers(model))
    return Execution(model.dtype, dtype, reduce_dtype, calls, options.attention_kernel, mixers, options.mixer_kernels)
