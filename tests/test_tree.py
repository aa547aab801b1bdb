"""What tests a file is found by its name: tests/ has the folders of mirror/, and its files."""

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "mirror"
SMALL = 50  # lines; what is shorter needs no tests of its own
MAX_LINES = 350
MAX_FILES = 13  # of tests in a folder
# What whole training scripts do, by their habits: folders of no file of mirror/.
MANY_FILES = {"training"}

# Files whose tests have other names, because what they do is seen elsewhere.
TESTED_BY = {
    "comm/host/host_library.py": "comm/host/test_host.py",
    "comm/kernels/ring_backend.py": "comm/kernels/test_two_bytes.py",
    "comm/kernels/simulator.py": "comm/kernels/test_kernels.py",
    "comm/workers/worker_group.py": "comm/workers/test_workers.py",
    "comm/workers/checked_gather.py": "comm/workers/test_workers.py",
    "comm/nccl/communicators.py": "comm/nccl/test_clique.py",
    "comm/nccl/communicators.py": "comm/nccl/test_errors.py",
    "comm/topology.py": "comm/kernels/test_hierarchical.py",
    "threads/cancellation.py": "concurrency/test_interrupts.py",
    "threads/merge_point.py": "concurrency/test_lockstep.py",
    "threads/user_frames.py": "concurrency/test_standstill.py",
    "threads/run_queue.py": "concurrency/test_lockstep.py",
    "data/loader_copy.py": "data/test_resume.py",
    "data/join_batches.py": "strategy/test_input.py",
    "data/sampler_state.py": "data/test_position.py",
    "data/worker_sharding.py": "data/distributed/test_agreement.py",
    "data/adapters.py": "data/distributed/test_distribute.py",
    "data/rng_state.py": "data/test_drawing.py",
    "data/tfrecord/compressed.py": "data/tfrecord/test_tfrecord.py",
    "data/tfrecord/record_index.py": "data/tfrecord/test_dataset.py",
    "errors.py": "mistakes",
    "run/current_replica.py": "strategy/test_replica_context.py",
    "run/lockstep_stack.py": "execution/test_runner.py",
    "run/lifecycle.py": "execution/test_parts.py",
    "run/replicas.py": "execution/test_parts.py",
    "run/run_state.py": "strategy/test_run.py",
    "run/replica_thread.py": "execution/test_thread_state.py",
    "replica/collectives/collectives.py": "strategy/test_replica_context.py",
    "replica/collectives/autograd_nodes.py": "replica/collectives/test_at_once.py",
    "replica/params/local_buffers.py": "train/checkpoint/test_checkpoint.py",
    "replica/params/mirrored_buffer.py": "replica/copies/test_buffers.py",
    "replica/params/gradient_hooks.py": "replica/gradients/test_hooks.py",
    "replica/params/torch_function.py": "replica/copies/test_parameters.py",
    "replica/params/replicated_param.py": "replica/copies/test_parameters.py",
    "replica/params/replicated_params.py": "replica/copies/test_identity.py",
    "replica/params/replicated_params.py": "replica/copies/test_identity.py",
    "replica/keras/keras_metrics.py": "keras/test_catalogue.py",
    "replica/keras/keras_library.py": "replica/keras/test_calls.py",
    "replica/keras/keras_call.py": "replica/keras/test_calls.py",
    "replica/multi_worker/worker_reduction.py": "replica/gradients/agreed/test_agreed_gradients.py",
    "replica/multi_worker/worker_bucket.py": "replica/gradients/agreed/test_agreed_gradients.py",
    "replica/multi_worker/contributions.py": "replica/gradients/agreed/test_agreed_gradients.py",
    "replica/multi_worker/worker_non_finite.py": "replica/gradients/agreed/test_flights.py",
    "replica/gradients/ready_grads.py": "replica/gradients/test_local_gradients.py",
    "replica/gradients/unmirrored.py": "mistakes/test_scope.py",
    "replica/gradients/graph_boundary.py": "replica/gradients/test_parallel_pass.py",
    "replica/gradients/grad_tracker.py": "replica/gradients/test_hooks.py",
    "replica/scatter_gather/mutations.py": "replica/joining/test_arguments.py",
    "replica/scatter_gather/gather.py": "replica/joining/test_arguments.py",
    "replica/exactness/loss_graph.py": "replica/exactness/test_scalar_outputs.py",
    "replica/modules/module_dicts.py": "replica/modules/test_modules.py",
    "replica/modules/per_replica_values.py": "replica/modules/test_attributes.py",
    "replica/modules/recording.py": "replica/copies/test_recorded.py",
    "replica/modules/transparent_call.py": "replica/modules/test_split_call.py",
    "replica/optimizers/global_hooks.py": "replica/optimizer/test_hooks.py",
    "replica/optimizers/param_swap.py": "replica/optimizer/test_steps.py",
    "replica/optimizers/optimizer_registry.py": "replica/optimizer/test_making.py",
    "replica/params/mirrored_tensor.py": "replica/test_functions.py",
    "server/engine/actor_process.py": "server/engine/test_processes.py",
    "server/engine/socket_client.py": "server/engine/test_protocol.py",
    "server/engine/fork_server_main.py": "server/engine/test_processes.py",
    "server/engine/connection.py": "server/engine/test_protocol.py",
    "server/engine/fork_server.py": "server/engine/test_processes.py",
    "server/engine/ray_init.py": "server/engine/on_ray/test_engine.py",
    "server/engine/ray_client.py": "server/engine/test_protocol.py",
    "server/engine/ray_actor.py": "server/engine/test_protocol.py",
    "server/engine/child_output.py": "server/engine/test_processes.py",
    "server/engine/node_agent.py": "server/engine/seats/test_engine.py",
    "server/engine/service_loop.py": "server/engine/test_protocol.py",
    "server/engine/base_engine.py": "server/engine/test_protocol.py",
    "server/pull_on_read.py": "server/test_recording.py",
    "server/roles/variable_client.py": "server/roles/test_worker_model.py",
    "server/roles/worker_datasets.py": "server/roles/test_coordinator.py",
    "server/roles/actor_pool.py": "server/roles/test_faults.py",
    "server/roles/remote_optimizer.py": "server/roles/test_variables.py",
    "server/roles/session.py": "server/roles/test_coordinator.py",
    "server/roles/worker_role.py": "server/roles/test_worker_model.py",
    "compiler/capture/option_guards.py": "steps/following/test_unchanged.py",
    "compiler/capture/functional_rng.py": "steps/running/test_compiled_step.py",
    "compiler/capture/functional_graph.py": "steps/pieces/test_cut.py",
    "compiler/capture/placeholders.py": "steps/running/test_compiled_step.py",
    "compiler/capture/tracer.py": "steps/running/test_compiled_step.py",
    "compiler/step_inputs.py": "steps/running/test_compiled_step.py",
    "compiler/user_lines.py": "steps/following/test_watching.py",
    "compiler/lowering/graph_builder.py": "steps/pieces/test_cut.py",
    "compiler/lowering/gradient_packing.py": "steps/pieces/test_cut.py",
    "compiler/lowering/step_plan.py": "steps/pieces/test_cut.py",
    "compiler/lowering/programs.py": "steps/running/test_compiled_step.py",
    "compiler/lowering/step_trace.py": "steps/running/test_compiled_step.py",
    "compiler/state_tensors.py": "steps/running/test_compiled_step.py",
    "compiler/runtime/trace_guards.py": "steps/running/test_compiled_step.py",
    "compiler/runtime/bindings.py": "steps/running/test_compiled_step.py",
    "compiler/runtime/param_sync.py": "steps/running/test_compiled_step.py",
    "compiler/runtime/build_program.py": "steps/running/test_compiled_step.py",
    "compiler/runtime/step_program.py": "steps/running/test_compiled_step.py",
    "compiler/torch_internals.py": "steps/running/test_compiled_step.py",
    "compiler/runtime/held_states.py": "steps/running/test_compiled_step.py",
    "compiler/lowering/cost_model.py": "steps/pieces/test_cut.py",
    "compiler/runtime/step_arguments.py": "steps/running/test_compiled_step.py",
    "strategy/run_arguments.py": "strategy/test_gradients.py",
    "strategy/make_communicator.py": "strategy/test_constructor.py",
    "strategy/strategy_base.py": "strategy/test_run.py",
    "strategy/compiled_steps.py": "steps/running/test_compiled_step.py",
    "strategy/group.py": "strategy/test_constructor.py",
    "strategy/inspection.py": "replica/copies/test_identity.py",
    "strategy/server_options.py": "strategy/kinds/test_parameter_server.py",
    "strategy/placing_scope.py": "strategy/kinds/test_parameter_server.py",
    "strategy/mirrored.py": "strategy/test_constructor.py",
    "strategy/strategy_options.py": "strategy/test_constructor.py",
    "integrations/tpu/tpu_programs.py": "tpu/programs/test_program.py",
    "integrations/tpu/tpu_program_reach.py": "tpu/programs/test_program.py",
    "integrations/tpu/torch_function_watch.py": "tpu/programs/test_call.py",
    "train/checkpoint/read_checkpoint.py": "faults/test_damage.py",
    "train/checkpoint/atomic_checkpoint.py": "faults/test_disk.py",
    "train/checkpoint/staging.py": "train/checkpoint/test_beside.py",
    "train/checkpoint/snapshot.py": "train/checkpoint/test_checkpoint.py",
    "train/checkpoint/generator_state.py": "train/checkpoint/test_checkpoint.py",
    "train/checkpoint/tree_json.py": "train/archive/test_skeleton.py",
    "train/loop/hook.py": "train/loop/test_training.py",
    "train/loop/training_state.py": "train/loop/test_training.py",
    "train/loop/hooks.py": "train/loop/test_training.py",
    "tools/planning/plan_error.py": "train/planning/test_workload.py",
    "tools/planning/plan_result.py": "train/planning/test_plan.py",
    "tools/planning/plan_result.py": "train/planning/test_plan.py",
    "values.py": "strategy/test_per_replica.py",
}


def without_tests(package: Path, tests: Path, tested_by: dict[str, str]) -> list[str]:
    """Returns the files of a package that neither a test, by its name, nor the list knows.

    ``a/b.py`` is tested by ``a/test_b.py``, ``a/test_b_*.py``, or the files of ``a/b/``.
    """
    files = [path.relative_to(package) for path in sorted(package.rglob("*.py"))]
    return [
        file.as_posix()
        for file in files
        if not file.name.startswith("__")
        and needs_tests(file, package, tests)
        and not list(tests.glob(tested_by.get(file.as_posix(), "nowhere")))
    ]


def needs_tests(file: Path, package: Path, tests: Path) -> bool:
    """Whether a file is not short, and no tests have its name."""
    return (
        len((package / file).read_text().splitlines()) > SMALL
        and not list((tests / file.parent).glob(f"test_{file.stem}.py"))
        and not list((tests / file.parent).glob(f"test_{file.stem}_*.py"))
        and not list((tests / file.with_suffix("")).glob("test_*.py"))
    )


def test_every_file_has_tests():
    assert without_tests(PACKAGE, TESTS, TESTED_BY) == []


def test_the_list_is_true():
    for file, tests in TESTED_BY.items():
        assert (PACKAGE / file).exists(), file
        assert (TESTS / tests).exists(), tests
        assert needs_tests(Path(file), PACKAGE, TESTS), file


def test_every_folder_has_a_folder_of_tests():
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not list((TESTS / folder).rglob("test_*.py"))] == []


def test_files_of_tests_are_short_and_few():
    files = sorted(TESTS.rglob("test_*.py"))
    assert [f for f in files if len(f.read_text().splitlines()) > MAX_LINES] == []
    folders = {f.parent for f in files}
    many = {f.name for f in folders if len(list(f.glob("test_*.py"))) > MAX_FILES}
    assert many <= MANY_FILES


def test_a_file_without_tests_is_found(tmp_path):
    package, tests = tmp_path / "mirror", tmp_path / "tests"
    for folder in (package / "deep", tests / "deep"):
        folder.mkdir(parents=True)
    (package / "deep" / "__init__.py").write_text("1\n" * 99)
    (package / "deep" / "small.py").write_text("1\n" * SMALL)
    (package / "deep" / "large.py").write_text("1\n" * 99)
    assert without_tests(package, tests, {}) == ["deep/large.py"]
    assert without_tests(package, tests, {"deep/large.py": "test_gone.py"}) == ["deep/large.py"]
    for place in ("test_there.py", "deep/test_large.py", "deep/test_large_more.py"):
        (tests / place).write_text("")
        assert without_tests(package, tests, {"deep/large.py": "test_there.py"}) == []
        (tests / place).unlink()
    assert without_tests(package, tests, {}) == ["deep/large.py"]
