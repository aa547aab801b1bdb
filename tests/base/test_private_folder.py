"""Folders of caches: what another user could change is neither used nor loaded."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from mirror.base.safe_files import private_folder, read_private
from mirror.comm import subprocess_probe
from mirror.comm.kernels import cuda_kernels
from mirror.comm.subprocess_probe import FOLDER_VARIABLE, Verdict
from mirror.compiler import torch_internals
from mirror.compiler.lowering import program_cache

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
STRANGER = 12345


def test_missing_folders_are_created_for_this_user_alone(tmp_path):
    folder = private_folder(tmp_path / "a" / "b", create=True)
    assert folder == tmp_path / "a" / "b"
    for made in (folder, folder.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    assert private_folder(folder) == folder


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        private_folder(tmp_path / "a")


def test_links_are_resolved_first_and_what_they_lead_to_is_checked(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "inner").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "open" / "inner")
    assert private_folder(tmp_path / "link") == tmp_path / "open" / "inner"
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="open"):
        private_folder(tmp_path / "link")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o722])
def test_others_may_write_neither_to_the_folder_nor_to_a_parent(tmp_path, mode):
    folder = private_folder(tmp_path / "a" / "b", create=True)
    for changed in (folder, folder.parent):
        changed.chmod(mode)
        with pytest.raises(PermissionError, match=f"other users can write to {changed}"):
            private_folder(folder)
        changed.chmod(0o700)


def test_a_parent_may_be_shared_if_names_in_it_are_protected(tmp_path):
    folder = private_folder(tmp_path / "a" / "b", create=True)
    folder.parent.chmod(0o1777)
    assert private_folder(folder) == folder
    folder.chmod(0o1777)
    with pytest.raises(PermissionError):
        private_folder(folder)


@needs_root
def test_neither_the_folder_nor_a_parent_nor_a_file_belongs_to_another_user(tmp_path):
    folder = private_folder(tmp_path / "a" / "b", create=True)
    (folder / "file").write_bytes(b"x")
    for changed in (folder, folder.parent):
        os.chown(changed, STRANGER, STRANGER)
        with pytest.raises(PermissionError, match="belongs to another user"):
            private_folder(folder)
        os.chown(changed, 0, 0)
    assert read_private(folder / "file") == b"x"
    os.chown(folder / "file", STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="belongs to another user"):
        read_private(folder / "file")


def test_a_file_is_no_link_no_pipe_and_not_writable_by_others(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe", "missing"):
        with pytest.raises(OSError, match=name):
            read_private(tmp_path / name)
    file.chmod(0o666)
    with pytest.raises(PermissionError, match="other users can write"):
        read_private(file)


def stored_verdict(folder, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    subprocess_probe.store({"a": 1}, Verdict(None))
    return lambda: subprocess_probe.load_verdict({"a": 1}) == Verdict(None)


def stored_program(folder, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    key = private_folder(folder / "mirror_steps" / "key", create=True)
    (key / "step.pickle").touch(0o600)
    opened = []
    monkeypatch.setattr(program_cache.pickle, "loads", opened.append)
    monkeypatch.setattr(program_cache.shutil, "rmtree", lambda path: None)

    def is_loaded():
        opened.clear()
        program_cache.load_program("key")
        return bool(opened)

    return is_loaded


def stored_binary(folder, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder / "kernels"))
    compiled = []
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 9), getSupportedArchs=lambda: [90])
    monkeypatch.setattr(cuda_kernels, "import_module", lambda name: SimpleNamespace(nvrtc=nvrtc))

    def compiles(*args, **options):
        compiled.append(args)
        return b"binary"

    monkeypatch.setattr(cuda_kernels, "_compile", compiles)

    def is_loaded():
        compiled.clear()
        cuda_kernels._folder.cache_clear()
        file = cuda_kernels.binary(cuda_kernels.Unit("direct", "float"), 90)
        cuda_kernels._folder.cache_clear()
        return not compiled and folder in file.parents

    is_loaded()
    return is_loaded


@pytest.mark.parametrize("stored", [stored_verdict, stored_program, stored_binary])
@pytest.mark.parametrize("which", ["folder", "parent"])
def test_no_cache_loads_from_a_folder_that_others_can_change(stored, which, tmp_path, monkeypatch):
    root = private_folder(tmp_path / "cache", create=True)
    is_loaded = stored(root, monkeypatch)
    assert is_loaded()
    inner = next(path for path in root.iterdir() if path.is_dir())
    changed = {"folder": inner, "parent": root}[which]
    changed.chmod(0o777)
    assert not is_loaded()


@pytest.mark.slow  # imports inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of that import
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_no_step_is_compiled_where_others_can_change_it(mode, tmp_path, monkeypatch):
    """Inductor loads the code that it has compiled, and its default folder has a known name."""
    from torch._inductor import compile_fx

    folder, elsewhere = tmp_path / "inductor", private_folder(tmp_path / "else", create=True)
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    used = []

    def compiles(*args, **options):
        used.append(Path(cache_dir_utils.cache_dir()))
        return SimpleNamespace(current_callable=lambda inputs: inputs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiles)
    graph = torch.fx.symbolic_trace(lambda x: (x * 2,))
    torch_internals.compile_with_inductor(graph, torch_internals.fake_mode(), [])
    assert used == ([folder] if mode == 0o700 else [*elsewhere.glob("mirror-inductor-*")])
