"""The tests that `make test-gpu` runs over NCCL, by part; `outcomes.py` says how a run that was ended goes on.

A line names a test of a file, then words that the ids of its cases must hold (none: all of its cases). A case that
needs more ranks than there are GPUs is skipped. Chosen is what differs on GPUs: kernels, messages, streams and memory.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

MOST = 230  # about 3.7 s a test with messages on 4 H200, some twelve minutes
PARTS: dict[str, tuple[str, ...]] = {
    "comm": (
        "bridge/test_bridge.py::test_rows_are_the_same_bits_and_gradients_the_dense_sums",
        "bridge/test_row_exchange.py::test_rows_and_gradients",
        "comm/test_groups.py::test_channels_with_and_without_communicators",
        "comm/test_groups.py::test_messages_that_travel_beside_kernels_go_on_streams_of_high_priority",
        "comm/test_shard.py::test_rows_positions_and_segments_of_every_kind_of_micro_batch",
        "comm/test_ring.py::test_every_block_visits_every_member_and_its_gradient_comes_home",
        "comm/test_tp_collectives.py::test_sums_slices_and_their_gradients",
        "comm/test_meshes.py::test_a_world_after_a_world_has_meshes_of_its_own",
        "comm/test_world.py::test_the_control_group_and_meshes_of_every_home_also_inside_another",
        "comm/test_failure.py::test_a_stuck_gpu_is_reported_and_its_process_ended",
    ),
    "attention": (
        "attention/test_attend.py::test_every_pair_of_the_table 2-0",
        "attention/test_attend.py::test_every_pair_of_the_table 4-0",
        "attention/test_attend.py::test_every_pair_of_the_table 8-0",
        "attention/test_behaviour.py::test_recomputation_double_use_and_no_grad_give_the_same",
        "attention/test_behaviour.py::test_rows_that_see_no_key_have_zero_output_and_gradients",
        "attention/test_replays.py::test_a_captured_call_replays_on_other_inputs",
        "attention/test_replays.py::test_replays_give_what_calls_give",
        "attention/test_behaviour.py::test_groups_are_taken_in_the_order_of_the_plan_and_back",
        "attention/test_kernels.py::test_kernels_match_the_reference float32",
        "attention/test_kernels.py::test_errors_do_not_grow_from_degree_1_to_4",
        "attention/test_kernels.py::test_errors_do_not_grow_to_degree_16 bfloat16",
        "attention/test_memory.py::test_local_rows_alone_are_kept_for_backward",
        "attention/test_memory.py::test_peaks_do_not_grow_with_the_degree",
        "attention/test_kernels.py::test_deterministic_mode_gives_the_same_bits",
        "attention/test_rows.py::test_addends_of_a_block all",
        "attention/test_rows.py::test_copies_and_merges_are_those_of_the_host",
    ),
    "model": (
        "model/test_parity.py::test_equals_the_stock_model few",
        "model/test_parity.py::test_dropout_is_the_same_at_every_degree_under_every_type_and_home",
        "model/experts/test_experts.py::test_equals_the_stock_model few",
        "model/seams/test_norms.py::test_models_with_fused_norms_equal_the_stock_model_under_every_home",
        "model/multimodal/test_encoder_cp.py::test_an_item_over_several_slots_equals_one_dense_process",
        "model/multimodal/test_prepare_encoder.py::test_an_encoder_over_its_home_equals_one_dense_process few 2",
        "model/multimodal/test_prepare_encoder.py::test_frozen_parts_half_precision_and_parameters_that_some_slots_do_"
        "not_use 2",
        "model/pipeline/test_pipeline.py::test_names_logits_and_saved_folders_are_those_of_the_whole_model",
        "model/test_prepare.py::test_parameters_are_sharded_and_freed_after_evaluation_and_the_shard_passes_through_fsdp2",
        "model/tensor_parallel/test_tensor_parallel.py::test_equals_the_stock_model few",
        "model/frozen/test_reading.py::test_each_rank_packs_what_it_reads 2",
        "model/test_host_weights.py::test_weights_and_files_are_those_with_moments_alone_on_the_host",
    ),
    "mixers": (
        "kernels/test_on_gpus.py::test_results_and_gradients_are_those_of_float64",
        "kernels/test_on_gpus.py::test_many_rows_of_few_features",
        "kernels/test_on_gpus.py::test_bytes_and_values_are_those_of_the_host 9216",
        "kernels/test_long_rows.py::test_rows_are_those_of_the_same_rows_alone",
        "ssm/test_parity.py::test_the_whole_table 2-7",
        "ssm/test_parity.py::test_the_whole_table 4-7",
        "ssm/test_parity.py::test_scans_in_float32_are_as_near_as_float32_is",
        "ssm/test_parity.py::test_outputs_gradients_and_the_bits_of_other_documents",
        "model/mtp/test_exact.py::test_every_plan_gives_the_losses_and_gradients_of_one_process 2 slots]",
        "model/mtp/test_exact.py::test_every_plan_gives_the_losses_and_gradients_of_one_process 2 stages]",
        "model/mtp/test_exact.py::test_every_plan_gives_the_losses_and_gradients_of_one_process ep",
        "model/mtp/test_exact.py::test_losses_of_ones_own_and_depths_compute_in_the_type_of_the_layers",
        "train/steps/test_shared_stages.py::test_equals_one_process",
        "train/steps/test_shared_stages.py::test_every_schedule 1",
    ),
    "train": (
        "run/runs/test_completions.py::test_a_copy_whose_layers_come_one_at_a_time_has_the_tokens_of_the_stock_model",
        "train/multimodal/test_checkpoints.py::test_training_goes_through_homes_of_both_modules",
        "train/multimodal/test_oracle.py::test_fan_in_fan_out_and_equal_replicas_in_float32",
        "evaluation/test_evaluate.py::test_every_document_and_metric_equals_the_stock_model",
        "evaluation/test_gathers.py::test_parameters_are_gathered_once_where_all_ranks_have_room",
        "evaluation/test_no_trace.py::test_evaluations_leave_no_trace few",
        "train/own_loss/test_exact.py::test_equals_one_process micro-batch",
        "train/own_loss/test_exact.py::test_equals_one_process split",
        "checkpoint/test_checkpoint.py::test_weights_and_moments_come_back_bit_for_bit",
        "train/steps/test_loss.py::test_families_under_fsdp_equal_the_stock_model",
        "train/steps/test_step.py::test_modes_steps_in_free_mode_and_after_an_error",
        "train/steps/test_gradients.py::test_norms_clipping_what_is_not_finite_and_sums_of_replicas",
        "train/steps/test_matrix.py::test_every_pair_of_the_matrix",
        "train/steps/test_pipelined.py::test_equals_one_process gpt-oss",
        "train/steps/test_pipelined.py::test_four_stages",
        "train/steps/test_pipelined.py::test_few_of_them_sums_of_steps_shared_layers_random_plans_and_layers_that_"
        "reshard",
        "train/steps/test_step.py::test_gradients_do_not_depend_on_the_plan 4",
        "train/steps/test_step.py::test_gradients_do_not_depend_on_the_plan 8",
        "train/steps/test_step.py::test_evaluation_leaves_training_bit_identical_and_bad_input_is_refused_on_every_rank",
    ),
}
_ROOT = Path(__file__).parent


def mark(items: Sequence[pytest.Item], *, whole_suite: bool) -> None:
    """Give the tests of the table the marker nccl, with their part; of the `whole` suite, check the table too."""
    lines = {line: 0 for part in PARTS.values() for line in part}
    for item in items:
        path = item.path.relative_to(_ROOT).as_posix()
        name, _, case = item.name.partition("[")
        for part, tests in PARTS.items():
            for line in tests:
                test, *words = line.split()
                if test == f"{path}::{name}" and all(word in case for word in words):
                    item.add_marker(pytest.mark.nccl(part))
                    lines[line] += 1
    unknown = [line for line, count in lines.items() if not count]
    if whole_suite and (unknown or sum(lines.values()) > MOST):
        raise pytest.UsageError(
            f"tests/over_nccl.py: {sum(lines.values())} tests are chosen, of at most {MOST}; no test fits {unknown}"
        )


def part_of(item: pytest.Item) -> int:
    marker = item.get_closest_marker("nccl")
    return list(PARTS).index(marker.args[0]) if marker else len(PARTS)
