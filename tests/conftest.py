"""Fixtures shared by all tests, and which of them only `make test-all` runs."""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ranks import RankPool

if TYPE_CHECKING:
    from browser import Page

# More of what other cases of the same test show, for which `make test` would take longer than anyone waits.
THOROUGH = [
    r"test_pipeline.py::test_every_schedule_at_every_stage",
    r"test_pipeline.py::test_every_schedule_trains_as_one_process_does\[zero_bubble-2\]",
    r"test_pipeline.py::test_every_stage_of_zero_works_over_the_data_axis\[1\]",
    r"test_pipeline.py::test_gradients_that_are_assigned.*\[(zero_bubble-3|zbv-0)\]",
    r"test_pipeline.py::test_gradients_are_reduced_and_.*\[(0-zero_bubble|2-1f1b|3-zero_bubble)\]",
    r"test_pipeline.py::test_mixed_precision_follows_fp32\[(1f1b-fp16|zero_bubble-bf16)\]",
    r"test_pipeline.py::test_(checkpointed_blocks\[1f1b|evaluation_and_.*\[interleaved)\]",
    r"test_gradient_arena.py::test_the_same_bits_from_one_block_in_every_step\[(1-[012]|2-1)-",
    r"test_partition.py::test_the_same_bits_on_every_row_wherever_parts_wait\[[12]\]",
    r"test_partition.py::test_rebuilding_sends_a_tenth_of_what_the_blocks_send_at_most\[.*-4\]",
    r"test_tensor_parallel.py::test_losses_are_those_of_one_process\[train-1\]",
    r"test_offload.py::test_the_same_bits_wherever_the_states_are\[\d-stages[567]",
    r"test_models.py::test_equals_ddp\[(whisper|switch|vit|qwen3|gpt2|t5|llama)-",
    r"test_models.py::test_equals_ddp\[(?!odd_net|mixtral).*-3\]",
    r"test_models.py::test_one_rank_and_five\[.*-5\]",
    r"test_models.py::test_one_rank_and_five\[qwen3",
    r"test_models.py::test_evaluation_between_steps\[(whisper|t5|mixtral)\]",
    r"test_parity.py::test_two_ranks_equal_ddp_to_the_bit\[(?!sgd|momentum|adamw\]|adagrad|rprop)",
    r"test_parity.py::test_more_ranks_stay_within_1e6_of_ddp\[(sgd-4|adamw_eps-3)\]",
    r"test_parity.py::test_losses_stay_within_1e5_at_the_usual_epsilon",
    r"test_parity.py::test_stages_1_2_3_give_the_same_bits\[3\]",
    r"test_parity.py::test_overlap_changes_no_bit\[[012]-settings[12]\]",
    r"test_muon.py::.*\[4\]",
    r"test_compile.py::test_compiled_blocks_share_one_graph_and_change_no_bit\[1\]",
    r"test_unusual.py::test_unusual_(models|steps)\[[02]-",
    r"test_rows.py::test_groups_accumulate_and_clip\[settings[12]-hpz\]",
    r"test_rows.py::test_owners_update_as_one_process_would\[(1|2)-whole",
    r"test_precision.py::test_states_in_bf16_train_with_stochastic_rounding\[options0",
    r"test_faults.py::test_a_call_of_one_rank_alone_is_named_on_all\[\('(attach|full_params)'",
    r"test_ends.py::test_a_recorded_script_that_ends_after_its_last_step_ends_with_0\[(dp|[023])\]",
    r"test_models.py::test_equals_ddp\[llama_lora-2\]",
    r"test_pipeline_guards.py::test_parts_of_the_sequence_pass_from_stage_to_stage\[1f1b-mixtral\]",
    r"test_sequence_parallel.py::test_training_goes_as_on_one_process\[(mixtral|t5)-stage 3, transformers'",
    r"test_sequence_parallel.py::test_gradients_are_those_of_one_process\[mixtral-4\]",
    r"test_precision.py::test_states_in_bf16_train_with_stochastic_rounding\[options1-8-3\]",
    r"test_bench_plan.py::test_what_came_before_a_process_died_is_there\[two_and_an_error",
    r"test_plan_page_command.py::test_the_page_says_what_the_command_says\[layers\]",
    r"test_plan_memory.py::test_buffers_of_chunks_to_the_byte\[2\]",
    r"test_parity.py::test_overlap_changes_no_bit\[3-settings1\]",
    r"test_parity.py::test_two_ranks_equal_ddp_to_the_bit\[rprop\]",
    r"test_partition_files.py::test_a_disk_that_fails_on_one_rank_ends_the_backward_of_all\[4-third read-1\]",
    r"test_offload.py::test_the_same_bits_wherever_the_states_are\[2-stages2-precisions2-1-False\]",
    r"test_faults.py::test_a_slow_rank_is_no_fault_and_no_thread_is_left",
    r"test_cli.py::test_a_failing_rank_is_one_line_and_exit_code_1",
    r"test_train_job.py::test_(torchrun_starts_it_again|ctrl_c_finishes_the_step)",
    r"test_compile.py::test_(inductor_stays|compiled_blocks_under_activation_checkpointing\[non_reentrant)",
    r"test_resume.py::test_accumulating_gives_the_losses_of_larger_batches",
    r"test_accelerator.py::test_loaders_are_shared_out_as_accelerate_does",
    r"test_bench.py::test_tiny_(memory|precision|mixed)_run",
    r"test_load_folder.py::test_other_models_files_and_precisions\[gpt2-3-True-options0\]",
    r"test_engine.py::test_accumulation\[[02]-(by_hand|no_sync|plain)\]",
    r"test_checkpoint.py::test_every_number_of_ranks_and_stage_loads_every_other\[counts1\]",
    r"test_launcher.py::test_(no_process_outlives_the_command\[killed\]|slurm_tells|the_stand_in_is)",
    r"test_hugging_face.py::test_(further_curves|the_recording)",
    r"test_accumulate.py::test_two_ranks\[(?!3-bf16|2-None|hsdp-None)",
    r"test_accumulate.py::test_one_rank_gives_the_bits_of_the_loop\[(3-None|0-bf16|0-fp16)",
    r"test_accumulate.py::test_hugging_face_models\[(?!llama-None|gpt2-bf16)",
    r"test_accumulate.py::test_unusual_models\[(plain|skipped)",
    r"test_park.py::test_training_goes_on_to_the_bit_on_every_row",
    r"test_plan_traffic.py::test_the_ledger_counts_what_the_plan_says\[.*-fp32-1-4\]",
    r"test_ranks.py::test_(the_least_recently|a_hang_ends|a_world_without|errors_caught|an_error_shows)",
    r"test_load_folder.py::test_other_models_files_and_precisions\[gpt2-2-False-options1\]",
    r"test_hugging_face.py::test_stages_1_and_2_give_the_curves",
    r"test_compile.py::test_a_model_compiled_whole_breaks_at_its_units",
    r"test_launcher.py::test_(no_process_outlives_the_command\[interrupted\]|two_ranks_train_with_all)",
    r"test_checkpoint_rare.py::test_what_is_rare",
    r"test_export.py::test_hugging_face_loads_the_same_bits\[dp-None\]",
    r"test_tensor_parallel.py::test_losses_are_those_of_one_process\[(?!train)\w+-[012]\]",
    r"test_tensor_parallel.py::test_losses_are_those_of_one_process\[(tests|qwen3)-3\]",
    r"test_tensor_parallel.py::test_parts_of_the_sequence_and_of_the_words\[(?!both-(train|llama|gpt2))",
    r"test_3d.py::test_the_cube_trains_as_one_process_does\[[012]\]",
    r"test_3d.py::test_each_pair_of_axes_trains_as_one_process_does",
    r"test_3d.py::test_(without_a_word_layers_are_shared_as_well|a_given_plan_for_a_model_without_memory)",
    r"test_tensor_parallel_ways.py::test_(?!bf16)",
    r"test_tensor_parallel.py::test_losses_are_those_of_one_process\[(?!train|llama|mixtral)",
    r"test_pipeline.py::test_(every_schedule_trains_as_one_process_does\[(gpipe|interleaved)|gradients_that_are_assigned)",
    r"test_pipeline.py::test_(mixed_precision|checkpointed_blocks\[(?!zbv)|evaluation_and)",
    r"test_train_job.py::test_a_killed_process_is_started_again",
    r"test_bench.py::test_(tiny_run_from_end_to_end|engines_that_fail|a_rank_that_dies)",
    r"test_bench_(activation|offload|comm).py::test_(a_tiny_model_takes|tiny_offload_run|a_tiny_run)",
    r"test_load_folder.py::test_other_models_files_and_precisions\[llama-3-True-options3\]",
    r"test_plan_command.py::test_one_quadrillion",
    r"test_checkpoint.py::test_every_number_of_ranks_and_stage_loads_every_other",
    r"test_checkpoint.py::test_a_resumed_run_equals_one_that_was_not_interrupted_to_the_bit\[copies\]",
    r"test_launcher.py::test_two_hosts_train_together",
    r"test_accelerator.py::test_the_loop_equals_ddp\[0-2",
    r"test_ranks.py::test_a_dead_rank_is_noticed_at_once",
    r"test_export.py::test_hugging_face_loads_the_same_bits\[0-None\]",
    r"test_reporting.py::test_everything_at_once_on_two_ranks",
    r"test_fingerprints.py::test_a_flipped_bit_in_one_replica_is_named\[0-parameter-None\]",
    r"test_precision.py::test_micro_batches_add_up_in_fp32",
    r"test_mesh_checkpoint_kinds.py::",
    r"test_partition.py::test_the_same_bits_on_every_row",
    r"test_pipeline_guards.py::test_a_model_that_hands_on_more_than_the_stream_is_refused\[(?!residual|another|one|shared)",
    r"test_unusual.py::test_unusual_(models|steps)\[1-",
    r"test_models.py::test_evaluation_between_steps\[(llama_lora|gpt2)\]",
    r"test_models.py::test_equals_ddp\[(conv_net-2|mixtral-3)\]",
    r"test_offload.py::test_the_same_bits_wherever_the_states_are\[4-stages4",
    r"test_load_folder.py::test_other_models_files_and_precisions\[gpt2_base-3-True-options2\]",
    r"test_meta.py::test_values_come_from_the_init_function\[\('dp', None\)\]",
    r"test_bench_fragmentation.py::test_both_ways_train_alike",
    r"test_export.py::test_hugging_face_loads_the_same_bits\[dp-bf16\]",
    r"test_mesh_checkpoint_kinds.py::test_(adapters_know|masters_owners)",
    r"test_launcher.py::test_a_restart_is_told_and_one_signal",
    r"test_3d.py::test_(parts_of_the_sequence_and_of_the_words|a_head_tied_to_its_embedding|every_schedule)\[",
    r"test_3d.py::test_checkpointed_blocks_of_which_each_tensor_rank_keeps_a_part\[(?!1f1b-host)",
    r"test_3d.py::test_a_checkpoint_of_the_cube_goes_on_in_any_mesh\[gpt2-",
    r"test_pipeline_guards.py::test_parts_of_the_sequence_pass_from_stage_to_stage\[zbv-gpt\]",
    r"test_tensor_guards.py::test_parts_outlive_the_sharding\[2\]",
    r"test_partition_layers.py::test_a_rank_keeps_its_part_and_sends_a_tenth_at_most\[4\]",
    r"test_partition.py::test_the_same_bits_on_every_row_wherever_parts_wait\[0\]",
    r"test_tensor_parallel.py::test_losses_are_those_of_one_process\[mlp-3\]",
    r"test_tensor_parallel.py::test_parts_of_the_sequence_and_of_the_words\[both-gpt2\]",
    r"test_tensor_parallel_ways.py::test_accumulation_checkpoints_and_an_optimizer_in_the_midst\[1\]",
    r"test_train_mesh.py::test_a_killed_rank_ends_the_run_and_another_mesh_goes_on",
    r"test_checkpoint.py::test_a_resumed_run_equals_one_that_was_not_interrupted_to_the_bit\[groups\]",
    r"test_axes_loss_scale.py::test_(the_cube|two_ranks\[.*-[01]-bf16|four_ranks\[data-tensor)",
    r"test_stage_errors.py::test_all_ranks_stop_and_go_on\[.*-(gpipe|zero_bubble)-",
    r"test_bench_plan.py::test_(experts_run_through_every_row|a_row_shows_what_it_shows)",
    r"test_axis_traffic.py::test_the_plan_stands_beside",
    r"test_tracing.py::test_what_is_remembered_changes_nothing\[(t5|mixtral)\]",
    r"test_bench_activation.py::test_the_plan_says_what_was_measured_on_an_h200\[(logits|host)",
    r"test_mesh_checkpoint.py::test_any_mesh_goes_on_where_the_cube_was\[8-sizes[24]",
    r"test_precision.py::test_states_in_bf16_train_with_stochastic_rounding\[options2",
    r"test_parity.py::test_(stages_1_2_3_give_the_same_bits|more_ranks_stay_within_1e6_of_ddp)\[.*4\]",
    r"test_activation.py::test_every_row_and_way_gives_the_same_bits\[(2|hpz)\]",
    r"test_stage_errors.py::test_all_ranks_stop_and_go_on\[\{'tensor': 2, 'pipeline': 2\}-1f1b-0\]",
    r"test_state_dicts.py::test_torchs_distributed_checkpoint_saves_and_reshards\[1\]",
    r"test_3d.py::test_checkpointed_blocks_of_which_each_tensor_rank_keeps_a_part\[1f1b-host\]",
    r"test_axes_loss_scale.py::test_four_ranks\[tensor-pipeline-bf16\]",
    r"test_tensor_parallel.py::test_losses_are_those_of_one_process\[train-2\]",
    r"test_precision.py::test_micro_batches_equal_one_large_batch\[fp32",
    r"test_resume.py::test_it_goes_on_with_another_number_of_ranks\[2-4\]",
    r"test_activation.py::test_every_row_and_way_gives_the_same_bits\[1\]",
    r"test_compile.py::test_compiled_blocks_under_activation_checkpointing\[reentrant\]",
    r"test_parity.py::test_overlap_changes_no_bit\[3-settings2\]",
    r"test_load_folder.py::test_other_models_files_and_precisions\[llama-0-False-options4\]",
    r"test_verify.py::test_command_prints_json_and_succeeds",
    r"test_sequence_parallel.py::test_training_goes_as_on_one_process\[.*-four\]",
    r"test_tensor_parallel.py::test_parts_of_the_sequence_and_of_the_words\[both-train\]",
    r"test_tensor_parallel.py::test_losses_are_those_of_one_process\[llama-3\]",
    r"test_muon.py::test_adafactor_gives_the_weights_of_one_process",
    r"test_load_folder.py::test_other_models_files_and_precisions\[llama_bf16-1-True-options5\]",
    r"test_activation.py::test_every_row_and_way_gives_the_same_bits\[(hsdp|dp)\]",
    r"test_mesh_checkpoint.py::test_any_mesh_goes_on_where_the_cube_was\[8-sizes[013]-\d-1\]",
]

# Nothing is downloaded. Hugging Face's packages read it when they are imported, by ranks before any test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The server that ranks are forked from starts with an interpreter's own path, as commands do: without this, ranks of a
# second checkout would test the package that is installed.
SOURCE = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))

# Threads that wait for each other spin: on busy cores a small operation of two takes ten times as long as that of one.
# Processes that tests start inherit both settings. Not beside a GPU, where the host has large tensors to update.
if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for those that ask for more threads all the same
    torch.set_num_threads(1)


# First, one after another: eight processes take long to start, and push those of other tests out.
EIGHT_RANKS = {"test_3d.py", "test_mesh.py", "test_mesh_checkpoint.py", "test_mesh_checkpoint_kinds.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in EIGHT_RANKS)
    thorough = re.compile("|".join(THOROUGH))
    for item in items:
        if thorough.search(item.nodeid):
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    # Modules and thousands of tests, which live on: looking through them took most of a second in each collection.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(2, fn, *args)` runs `fn` on two gloo ranks and returns what each returned; see ranks.py."""
    pool = RankPool(keep=4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def page() -> "Iterator[Page]":
    """A tab of a real Chromium; see browser.py."""
    from browser import chromium, find_chromium

    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium: install it (apt-get install chromium) or name one in $CHROMIUM to test the pages")
    with chromium(executable) as opened:
        yield opened
