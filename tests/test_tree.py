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
    "comm/kernels/ring.py": "comm/kernels/test_two_bytes.py",
    "comm/kernels/simulator.py": "comm/kernels/test_kernels.py",
    "comm/workers/alone.py": "comm/workers/test_workers.py",
    "comm/workers/talk.py": "comm/workers/test_workers.py",
    "comm/nccl/communicators.py": "comm/nccl/test_clique.py",
    "comm/nccl/failures.py": "comm/nccl/test_errors.py",
    "comm/topology.py": "comm/kernels/test_hierarchical.py",
    "concurrency/abandoned.py": "concurrency/test_interrupts.py",
    "concurrency/merge_point.py": "concurrency/test_lockstep.py",
    "concurrency/stack.py": "concurrency/test_standstill.py",
    "concurrency/turns.py": "concurrency/test_lockstep.py",
    "data/indices.py": "data/test_resume.py",
    "data/join.py": "strategy/test_input.py",
    "data/samplers.py": "data/test_position.py",
    "data/sharding.py": "data/distributed/test_agreement.py",
    "data/source.py": "data/distributed/test_distribute.py",
    "data/streams.py": "data/test_drawing.py",
    "data/tfrecord/compressed.py": "data/tfrecord/test_tfrecord.py",
    "data/tfrecord/open_files.py": "data/tfrecord/test_dataset.py",
    "errors.py": "mistakes",
    "execution/current.py": "strategy/test_replica_context.py",
    "execution/locksteps.py": "execution/test_runner.py",
    "execution/part.py": "execution/test_parts.py",
    "execution/replicas.py": "execution/test_parts.py",
    "execution/run.py": "strategy/test_run.py",
    "execution/tasks.py": "execution/test_thread_state.py",
    "replica/collectives/collectives.py": "strategy/test_replica_context.py",
    "replica/collectives/nodes.py": "replica/collectives/test_at_once.py",
    "replica/copies/apart.py": "train/checkpoint/test_checkpoint.py",
    "replica/copies/buffer.py": "replica/copies/test_buffers.py",
    "replica/copies/hooks.py": "replica/gradients/test_hooks.py",
    "replica/copies/overrides.py": "replica/copies/test_parameters.py",
    "replica/copies/variable.py": "replica/copies/test_parameters.py",
    "replica/copies/variables.py": "replica/copies/test_identity.py",
    "replica/copies/registry.py": "replica/copies/test_identity.py",
    "replica/keras/metrics.py": "keras/test_catalogue.py",
    "replica/keras/library.py": "replica/keras/test_calls.py",
    "replica/modules/keras_call.py": "replica/keras/test_calls.py",
    "replica/gradients/agreed/reduction.py": "replica/gradients/agreed/test_agreed_gradients.py",
    "replica/gradients/agreed/rows.py": "replica/gradients/agreed/test_agreed_gradients.py",
    "replica/gradients/agreed/summands.py": "replica/gradients/agreed/test_agreed_gradients.py",
    "replica/gradients/agreed/unfit.py": "replica/gradients/agreed/test_flights.py",
    "replica/gradients/deferred.py": "replica/gradients/test_local_gradients.py",
    "replica/gradients/plain.py": "mistakes/test_scope.py",
    "replica/gradients/seams.py": "replica/gradients/test_parallel_pass.py",
    "replica/gradients/watch.py": "replica/gradients/test_hooks.py",
    "replica/joining/changes.py": "replica/joining/test_arguments.py",
    "replica/joining/joiner.py": "replica/joining/test_arguments.py",
    "replica/exactness/scalar_terms.py": "replica/exactness/test_scalar_outputs.py",
    "replica/modules/dicts.py": "replica/modules/test_modules.py",
    "replica/modules/own_values.py": "replica/modules/test_attributes.py",
    "replica/modules/recording.py": "replica/copies/test_recorded.py",
    "replica/modules/transparent_call.py": "replica/modules/test_split_call.py",
    "replica/optimizer/global_hooks.py": "replica/optimizer/test_hooks.py",
    "replica/optimizer/loan.py": "replica/optimizer/test_steps.py",
    "replica/optimizer/optimizers.py": "replica/optimizer/test_making.py",
    "replica/tensors.py": "replica/test_functions.py",
    "server/engine/actor_process.py": "server/engine/test_processes.py",
    "server/engine/connect.py": "server/engine/test_protocol.py",
    "server/engine/fork_server.py": "server/engine/test_processes.py",
    "server/engine/link.py": "server/engine/test_protocol.py",
    "server/engine/nursery.py": "server/engine/test_processes.py",
    "server/engine/on_ray/begin.py": "server/engine/on_ray/test_engine.py",
    "server/engine/on_ray/client.py": "server/engine/test_protocol.py",
    "server/engine/on_ray/host.py": "server/engine/test_protocol.py",
    "server/engine/output.py": "server/engine/test_processes.py",
    "server/engine/seats/seat.py": "server/engine/seats/test_engine.py",
    "server/engine/service.py": "server/engine/test_protocol.py",
    "server/engine/starting.py": "server/engine/test_protocol.py",
    "server/reading.py": "server/test_recording.py",
    "server/roles/client.py": "server/roles/test_worker_model.py",
    "server/roles/datasets.py": "server/roles/test_coordinator.py",
    "server/roles/fleet.py": "server/roles/test_faults.py",
    "server/roles/kept_optimizer.py": "server/roles/test_variables.py",
    "server/roles/session.py": "server/roles/test_coordinator.py",
    "server/roles/worker_role.py": "server/roles/test_worker_model.py",
    "steps/following/options.py": "steps/following/test_unchanged.py",
    "steps/following/draws.py": "steps/running/test_compiled_step.py",
    "steps/following/graphs.py": "steps/pieces/test_cut.py",
    "steps/following/stand_ins.py": "steps/running/test_compiled_step.py",
    "steps/following/tracing.py": "steps/running/test_compiled_step.py",
    "steps/inputs.py": "steps/running/test_compiled_step.py",
    "steps/lines.py": "steps/following/test_watching.py",
    "steps/pieces/builder.py": "steps/pieces/test_cut.py",
    "steps/pieces/packing.py": "steps/pieces/test_cut.py",
    "steps/pieces/parts.py": "steps/pieces/test_cut.py",
    "steps/pieces/programs.py": "steps/running/test_compiled_step.py",
    "steps/pieces/trace.py": "steps/running/test_compiled_step.py",
    "steps/places.py": "steps/running/test_compiled_step.py",
    "steps/running/assumptions.py": "steps/running/test_compiled_step.py",
    "steps/running/bindings.py": "steps/running/test_compiled_step.py",
    "steps/running/coherence.py": "steps/running/test_compiled_step.py",
    "steps/running/making.py": "steps/running/test_compiled_step.py",
    "steps/running/step_program.py": "steps/running/test_compiled_step.py",
    "steps/torch_internals.py": "steps/running/test_compiled_step.py",
    "steps/running/states.py": "steps/running/test_compiled_step.py",
    "steps/pieces/work.py": "steps/pieces/test_cut.py",
    "steps/running/arguments.py": "steps/running/test_compiled_step.py",
    "strategy/arguments.py": "strategy/test_gradients.py",
    "strategy/backend.py": "strategy/test_constructor.py",
    "strategy/base.py": "strategy/test_run.py",
    "strategy/compiling.py": "steps/running/test_compiled_step.py",
    "strategy/group.py": "strategy/test_constructor.py",
    "strategy/inspection.py": "replica/copies/test_identity.py",
    "strategy/kinds/server_options.py": "strategy/kinds/test_parameter_server.py",
    "strategy/kinds/placing_scope.py": "strategy/kinds/test_parameter_server.py",
    "strategy/mirrored.py": "strategy/test_constructor.py",
    "strategy/options.py": "strategy/test_constructor.py",
    "tpu/programs/programs.py": "tpu/programs/test_program.py",
    "tpu/programs/reach.py": "tpu/programs/test_program.py",
    "tpu/programs/watching.py": "tpu/programs/test_call.py",
    "train/checkpoint/contents.py": "faults/test_damage.py",
    "train/archive/durable.py": "faults/test_disk.py",
    "train/checkpoint/host_copies.py": "train/checkpoint/test_beside.py",
    "train/checkpoint/packed.py": "train/checkpoint/test_checkpoint.py",
    "train/checkpoint/random_state.py": "train/checkpoint/test_checkpoint.py",
    "train/archive/skeleton_reader.py": "train/archive/test_skeleton.py",
    "train/loop/hook.py": "train/loop/test_training.py",
    "train/loop/state.py": "train/loop/test_training.py",
    "train/loop/stopping.py": "train/loop/test_training.py",
    "train/planning/errors.py": "train/planning/test_workload.py",
    "train/planning/picture.py": "train/planning/test_plan.py",
    "train/planning/result.py": "train/planning/test_plan.py",
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
