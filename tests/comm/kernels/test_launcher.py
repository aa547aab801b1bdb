"""mirror/comm/kernels/launcher.py: one C call launches on all devices, on a fake driver."""

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from mirror.comm.kernels import launcher
from mirror.comm.kernels.launcher import KernelArguments, Launch, launch
from mirror.errors import BackendError
from tests.comm.backends import can_launch_elsewhere
from tests.pairs import each_once

SOURCE = Path(__file__).with_name("fake_driver.cpp")
LAUNCHER = Path(__file__).parents[3] / "csrc" / "host" / "launch.cpp"
CUDA_H = [Path(p) for p in ("/usr/local/cuda/include", "/usr/local/cuda-13.0/include")]


class Seen(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("blocks", ctypes.c_uint),
        ("rows", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("depth", ctypes.c_uint),
        ("is_cooperative", ctypes.c_int),
        ("call", ctypes.c_int),
        ("first", ctypes.c_longlong),
    ]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The launcher, of which this process may have another, and the driver that it has loaded."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("launcher")
    built = []
    for source in (SOURCE, LAUNCHER):
        library = folder / f"{source.stem}.so"
        flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
        built.append(library)
    return built


@pytest.fixture
def driver(libraries, monkeypatch):
    fake_path, launcher_path = libraries
    monkeypatch.setattr(launcher, "PATH", launcher_path)
    monkeypatch.setattr(launcher, "DRIVER", str(fake_path))
    launcher.launcher_library.cache_clear()
    launcher.launcher_missing_reason.cache_clear()
    fake = ctypes.CDLL(str(fake_path))
    fake.fake_seen.restype = ctypes.POINTER(Seen)
    fake.fake_current.restype = ctypes.c_void_p
    fake.fake_make_current.argtypes = [ctypes.c_void_p]
    fake.fake_reset(-1, -1)
    fake.fake_make_current(None)
    assert launcher.launcher_missing_reason() is None
    yield fake
    launcher.launcher_library.cache_clear()
    launcher.launcher_missing_reason.cache_clear()


def launches(n, rows=1):
    made = []
    for i in range(n):
        arguments = KernelArguments()
        arguments.data[0] = 1000 + i
        made.append(
            Launch(0x10 + i, 0x20 + i, ctypes.pointer(arguments), i, 7, rows, 512, rows > 1)
        )
    return made


@each_once(rows=[1, 3], n=[1, 2, 8])
def test_every_device_gets_its_kernel_in_order(driver, n, rows):
    launch(launches(n, rows), "direct_all_reduce")
    assert driver.fake_launches() == n
    for i in range(n):
        seen = driver.fake_seen(i).contents
        assert (seen.function, seen.stream, seen.first) == (0x10 + i, 0x20 + i, 1000 + i)
        assert seen.context == (100 + i) * 16, "the device's primary context"
        assert (seen.blocks, seen.rows, seen.depth, seen.threads) == (7, rows, 1, 512)
        assert seen.is_cooperative == (rows > 1)


def test_the_callers_context_is_what_it_was(driver):
    driver.fake_make_current(0x55)
    launch(launches(3), "ring_all_reduce")
    assert driver.fake_current() == 0x55
    driver.fake_reset(1, -1)
    with pytest.raises(BackendError):
        launch(launches(3), "ring_all_reduce")
    assert driver.fake_current() == 0x55


def test_contexts_are_retained_once(driver):
    launch(launches(4), "x")
    before = driver.fake_retained()
    for _ in range(5):
        launch(launches(4), "x")
    assert driver.fake_retained() == before


def test_a_refused_launch_raises_and_names_its_device(driver):
    driver.fake_reset(2, -1)
    with pytest.raises(BackendError, match=r"ring_all_reduce on cuda:2: unspecified .*\(719\)"):
        launch(launches(4), "ring_all_reduce")
    assert driver.fake_launches() == 2, "nothing after it"


def test_a_device_that_is_not_there_stops_all_before_the_first_launch(driver):
    driver.fake_reset(-1, 40)
    four = launches(4)
    four[3].device = 40
    with pytest.raises(BackendError, match="cuda:40: invalid device"):
        launch(four, "x")
    assert driver.fake_launches() == 0


def test_no_other_collective_is_launched_meanwhile(monkeypatch):
    others = []

    class Library:
        def mirror_launch(self, array, count, failed):
            others.append(can_launch_elsewhere())
            return 0

    monkeypatch.setattr(launcher, "launcher_library", Library)
    assert can_launch_elsewhere()
    launch(launches(2), "x")
    assert others == [False]
    assert can_launch_elsewhere()


def test_launches_of_threads_take_turns(driver):
    driver.fake_pause_after_launches(1)
    threads = [threading.Thread(target=launch, args=(launches(2), "x")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    driver.fake_pause_after_launches(0)
    seen = [driver.fake_seen(i).contents for i in range(driver.fake_launches())]
    assert [(one.function, one.context) for one in seen] == 8 * [
        (0x10 + i, (100 + i) * 16) for i in range(2)
    ]


def test_without_a_driver_the_reason_says_so(libraries, monkeypatch):
    _, path = libraries
    copy = path.with_name("another.so")  # one that has not loaded a driver
    shutil.copy(path, copy)
    monkeypatch.setattr(launcher, "PATH", copy)
    monkeypatch.setattr(launcher, "DRIVER", "libnowhere.so.1")
    launcher.launcher_library.cache_clear()
    launcher.launcher_missing_reason.cache_clear()
    try:
        assert "libnowhere.so.1 does not load" in launcher.launcher_missing_reason()
        with pytest.raises(BackendError, match="not loaded"):
            launch(launches(1), "x")
    finally:
        launcher.launcher_library.cache_clear()
        launcher.launcher_missing_reason.cache_clear()


def test_without_the_library_the_reason_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "PATH", tmp_path / "_launch.so")
    launcher.launcher_missing_reason.cache_clear()
    try:
        assert "build_ext --inplace" in launcher.launcher_missing_reason()
    finally:
        launcher.launcher_missing_reason.cache_clear()


def test_the_structs_are_those_of_cuda(tmp_path):
    include = next((p for p in CUDA_H if (p / "cuda.h").exists()), None)
    if include is None or shutil.which("g++") is None:
        pytest.skip("there is no cuda.h, or no g++")
    program = tmp_path / "compare.cpp"
    program.write_text(
        "#include <cuda.h>\n#include <cstddef>\n"
        f'#include "{LAUNCHER}"\n'
        "static_assert(sizeof(Config) == sizeof(CUlaunchConfig));\n"
        "static_assert(offsetof(Config, stream) == offsetof(CUlaunchConfig, hStream));\n"
        "static_assert(offsetof(Config, attributes) == offsetof(CUlaunchConfig, attrs));\n"
        "static_assert(offsetof(Config, num_attributes) == offsetof(CUlaunchConfig, numAttrs));\n"
        "static_assert(sizeof(Attribute) == sizeof(CUlaunchAttribute));\n"
        "static_assert(offsetof(Attribute, value) == offsetof(CUlaunchAttribute, value));\n"
        "static_assert(kCooperative == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);\n"
    )
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{include}", str(program)]
    subprocess.run(command, check=True)
