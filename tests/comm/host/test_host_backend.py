"""The host backend and the naive one, on values that a reader can check in the head."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mirror
from mirror import comm
from mirror.comm import host_backends
from mirror.comm.communicator import DTYPES, HALF_DTYPES, OPS
from mirror.errors import BackendError, ShapeError
from tests.pairs import each_once

FLOATS = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)
# Of 3 replicas: enough to be shared between threads, and no multiple of any vector.
LARGE = 300_007
# Around the ends of vectors (4 to 64 elements) and of tiles of 4 of them.
SIZES = (1, 3, 4, 15, 16, 17, 63, 64, 65, 127, 259, 1027)
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0, -7e4, 1e-8, -6e-8, 3e38)


@pytest.fixture(params=host_backends.require().levels())
def level(request):
    library = host_backends.require()
    before = library.level()
    library.set_level(request.param)
    yield request.param
    library.set_level(before)


@pytest.fixture
def set_num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_tensors(n, size, dtype):
    """Returns n tensors; in those of floating dtypes some elements are special ones."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return [torch.randint(info.min, info.max, (size,), dtype=dtype) for _ in range(n)]
    tensors = [torch.randn(size) * 10.0 ** torch.randint(-9, 5, (size,)) for _ in range(n)]
    for tensor in tensors:
        places = torch.randint(size, (size // 4,))
        tensor[places] = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), places.shape)]
    return [tensor.to(dtype) for tensor in tensors]


def clones(tensors):
    return [tensor.clone() for tensor in tensors]


def reduced(name, tensors, op="sum", scale=1.0):
    """Returns the one result of an all-reduce of clones."""
    tensors = clones(tensors)
    comm.create(name, ["cpu"] * len(tensors)).all_reduce(tensors, op, scale)
    for tensor in tensors[1:]:
        assert torch.equal(tensor.view(torch.uint8), tensors[0].view(torch.uint8))
    return tensors[0]


def assert_same_bits(one, other):
    """NaN agrees with NaN: which payload is left is not specified; and so is a zero's sign."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_host_and_naive_agree_bit_for_bit(n, dtype):
    shapes = [(0,), (1,), (3, 5), (1000,), (64, 3, 3)]
    lists = [[(torch.randn(shape) * 100).to(dtype) for shape in shapes] for _ in range(n)]
    copies = [[tensor.clone() for tensor in column] for column in lists]
    comm.create("host", ["cpu"] * n).all_reduce_lists(lists, scale=1 / 7)
    comm.create("naive", ["cpu"] * n).all_reduce_lists(copies, scale=1 / 7, bytes_per_pack=100)
    for column, copied in zip(lists, copies, strict=True):
        assert all(map(torch.equal, column, copied))


def test_replicas_are_added_in_their_order():
    # 1e8 swallows a 1 in float32: (1e8 - 1e8) + 1 is 1, (1 - 1e8) + 1e8 is 0.
    for values, expected in (((1e8, -1e8, 1), 1), ((1, -1e8, 1e8), 0)):
        tensors = [torch.tensor([float(value)]) for value in values]
        comm.create("host", ["cpu"] * 3).all_reduce(tensors)
        assert [tensor.item() for tensor in tensors] == [expected] * 3


@each_once(dtype=DTYPES, op=OPS)
def test_every_instruction_set_has_the_bits_of_naive(level, dtype, op):
    scales = (1.0, 1 / 3) if dtype.is_floating_point else (1.0,)
    for size in SIZES:
        for scale in scales:
            tensors = random_tensors(3, size, dtype)
            expected = reduced("naive", tensors, op, scale)
            assert_same_bits(reduced("host", tensors, op, scale), expected)


@pytest.mark.parametrize("dtype", sorted(HALF_DTYPES, key=str))
def test_every_half_is_read_and_rounded_as_torch_does(level, dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    for scale in (1 / 3, 1.001, 1e-4):  # n = 1: read, scale in float32, round
        assert_same_bits(
            reduced("host", [values], scale=scale), (values.float() * scale).to(dtype)
        )


@pytest.mark.parametrize("dtype", sorted(HALF_DTYPES, key=str))
def test_ties_are_rounded_to_even(level, dtype):
    # The sum of two neighbours, halved, is a tie in every binade, subnormal or not.
    lower = torch.arange(0, 0x7BFF, dtype=torch.int16)
    tensors = [lower.view(dtype), (lower + 1).view(dtype)]
    even = (lower + (lower & 1)).view(dtype)
    assert torch.equal(reduced("host", tensors, scale=0.5), even)


def test_there_is_an_instruction_set_for_every_machine():
    assert host_backends.require().levels()[0] == "portable"
    assert host_backends.require().level() == host_backends.require().levels()[-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_change_the_bits(set_num_threads, dtype):
    tensors = random_tensors(3, LARGE, dtype)
    results = []
    for num_threads in (1, 2, 4):
        set_num_threads(num_threads)
        results.append(reduced("host", tensors).view(torch.uint8))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


def test_threads_flush_subnormals_where_the_caller_does(set_num_threads):
    tensors = [torch.full((LARGE,), 1e-40) for _ in range(3)]
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormals")
        for num_threads in (1, 2):
            set_num_threads(num_threads)
            assert torch.count_nonzero(reduced("host", tensors).view(torch.int32)) == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.count_nonzero(reduced("host", tensors)) == LARGE


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_does_not_change_the_bits(dtype):
    tensors = random_tensors(3, 1027, dtype)
    expected = reduced("host", tensors)
    for offsets in ((1, 1, 1), (0, 1, 3), (7, 2, 5)):
        memory = [torch.zeros(1040, dtype=dtype) for _ in tensors]
        moved = [m[o : o + 1027] for m, o in zip(memory, offsets, strict=True)]
        for one, other in zip(moved, tensors, strict=True):
            one.copy_(other)
        comm.create("host", ["cpu"] * 3).all_reduce(moved)
        for one, whole, offset in zip(moved, memory, offsets, strict=True):
            assert_same_bits(one, expected)
            assert torch.count_nonzero(whole[:offset]) == 0
            assert torch.count_nonzero(whole[offset + 1027 :]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_does_not_change_the_bits(dtype):
    tensors = random_tensors(3, LARGE, dtype)
    expected = reduced("host", tensors)
    lists = [list(tensor.clone().split([1, 1000, 70_000, 0, 229_006])) for tensor in tensors]
    comm.create("host", ["cpu"] * 3).all_reduce_lists(lists)
    for column in lists:
        assert_same_bits(torch.cat(column), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_chunks_are_scattered_and_gathered(set_num_threads, dtype):
    set_num_threads(4)
    tensors = random_tensors(3, LARGE, dtype)
    expected = reduced("naive", tensors)
    communicator = comm.create("host", ["cpu"] * 3)
    communicator.reduce_scatter(tensors)
    communicator.all_gather(tensors)
    for tensor in tensors:
        assert_same_bits(tensor, expected)
    tensors[0].fill_(1)
    tensors[2].copy_(torch.arange(LARGE) % 100)
    communicator.broadcast(tensors, root=2)
    assert all(torch.equal(tensor, tensors[2]) for tensor in tensors)
    assert tensors[0][99] == 99


def test_callers_at_the_same_time_do_not_disturb_each_other(set_num_threads):
    set_num_threads(2)

    def work(value):
        communicator = comm.create("host", ["cpu"] * 2)
        for _ in range(20):
            tensors = [torch.full((LARGE,), value) for _ in range(2)]
            communicator.all_reduce(tensors)
            for tensor in tensors:
                assert bool((tensor == 2 * value).all())
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, (1.0, 2.0, 3.0, 4.0)))


def test_gapless_tensors_are_reduced_where_they_are(monkeypatch):
    monkeypatch.setattr(host_backends, "_copies", None)
    shape = (2, 3, 4, 5)
    lists = [
        [
            torch.full(shape, r).to(memory_format=torch.channels_last),
            torch.full(shape, r).permute(3, 1, 0, 2),
            torch.full((3, 1, 2), r)[:, :, :],
            torch.full((), r),
        ]
        for r in (1.0, 2.0, 3.0)
    ]
    comm.create("host", ["cpu"] * 3).all_reduce_lists(lists)
    assert all(bool((tensor == 6).all()) for column in lists for tensor in column)


def test_elements_between_those_of_a_view_stay(set_num_threads):
    lists = [[torch.arange(12.0).view(3, 4)[:, 1:3]] for _ in range(2)]
    comm.create("host", ["cpu"] * 2).all_reduce_lists(lists)
    for (view,) in lists:
        assert view._base.tolist() == [0, 2, 4, 3, 4, 10, 12, 7, 8, 18, 20, 11]


def test_lists_that_overlap_are_refused_and_stay_as_they_were():
    memory = torch.ones(8)
    lists = [[memory[:4], torch.ones(2)], [torch.ones(4), memory[3:5]]]
    with pytest.raises(ShapeError, match="two of these do"):
        comm.create("host", ["cpu"] * 2).all_reduce_lists(lists)
    assert memory.tolist() == [1] * 8


def test_host_serves_the_cpu_only():
    kind = host_backends.HostCommunicator
    assert kind.unavailable_reason((torch.device("cpu"),) * 3) is None
    assert "CPU" in kind.unavailable_reason((torch.device("cuda", 0),))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "is not built; .*build_ext"), (b"no library", "does not load .*build_ext")],
)
def test_without_its_library_it_says_so(monkeypatch, tmp_path, content, reason):
    path = tmp_path / "_reduce.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(host_backends, "PATH", path)
    host_backends.forget()
    try:
        with pytest.raises(BackendError, match=f"'host' cannot serve cpu: its library .*{reason}"):
            comm.create("host", ["cpu"])
        with pytest.raises(BackendError, match=reason):
            host_backends.HostCommunicator(["cpu"])
        with mirror.MirroredStrategy(["cpu"]) as strategy:
            assert strategy.backend == "naive"
    finally:
        host_backends.forget()


@pytest.mark.parametrize(("op", "expected"), [("sum", 9), ("min", 2), ("max", 4), ("prod", 24)])
def test_each_op_on_2_3_4(op, expected):
    tensors = [torch.full((3,), value) for value in (2, 3, 4)]
    comm.create("naive", ["cpu"] * 3).all_reduce(tensors, op)
    assert [tensor.tolist() for tensor in tensors] == [[expected] * 3] * 3


def test_integers_wrap_around():
    tensors = [torch.full((1,), 200, dtype=torch.uint8) for _ in range(2)]
    comm.create("naive", ["cpu"] * 2).all_reduce(tensors)
    assert tensors[0].item() == 400 - 256


def test_scatter_and_gather_cut_like_tensor_split():
    communicator = comm.create("naive", ["cpu"] * 2)
    tensors = [torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30])]
    communicator.reduce_scatter(tensors)
    assert tensors[0][:2].tolist() == [11, 22]
    assert tensors[1][2:].tolist() == [33]
    communicator.all_gather(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[11, 22, 33]] * 2


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce_scatter", "all_gather"])
def test_every_collective_looks_at_its_tensors_first(collective):
    call = getattr(comm.create("naive", ["cpu"] * 2), collective)
    shared = torch.arange(6.0)
    with pytest.raises(ShapeError, match="share memory"):
        call([shared[:4], shared[2:]])
    with pytest.raises(ShapeError, match="shape"):
        call([torch.ones(2), torch.ones(3)])
    assert torch.equal(shared, torch.arange(6.0))


def test_lists_of_tensors_are_looked_at_first():
    communicator = comm.create("naive", ["cpu"] * 2)
    first = torch.ones(2)
    for other in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ShapeError, match="replica 1 at 1 has"):
            communicator.all_reduce_lists([[torch.ones(1), first], [torch.ones(1), other]])
    assert first.tolist() == [1, 1]
