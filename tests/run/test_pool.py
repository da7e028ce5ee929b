"""Laws of the pool: memory in use is never given to another tensor or to a forked child."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.run import pool as pool_module
from rvdcomm.run.pool import MAX_KEPT_BYTES, MIN_BYTES, Pool, empty, mapping_of
from tests.covering import each_value

CPU = torch.device("cpu")
CAPACITY = 4 * MAX_KEPT_BYTES
PAGE = mmap.PAGESIZE


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    fresh = Pool(CAPACITY, is_shared=request.param)
    monkeypatch.setattr(pool_module, "_pool", fresh)
    monkeypatch.setattr(pool_module, "_is_made", True)
    # A garbage collection then visits only the objects of this test.
    gc.freeze()
    yield fresh
    gc.unfreeze()
    fresh.clear()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@each_value(
    dtype=[torch.float32, torch.bool, torch.complex32, torch.float8_e4m3fn, torch.uint16],
    shape=[(3, 5), (1 << 20, 3)],
)
def test_empty_gives_a_contiguous_writable_tensor(
    pool: Pool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    made = rv.empty(shape, dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == (shape, dtype, True)
    made.view(torch.uint8).fill_(1)
    assert int(made.view(torch.uint8).count_nonzero()) == made.numel() * dtype.itemsize


def _numpy(made: Tensor) -> object:
    return made[7:].numpy()


def _graph(made: Tensor) -> object:
    # The backward pass of a product needs its factors.
    return torch.ones(len(made), requires_grad=True) * made


def _thread(made: Tensor) -> object:
    held: list[Tensor] = []
    thread = threading.Thread(target=held.append, args=(made[::2],))
    thread.start()
    thread.join()
    return held


HOLDERS: tuple[Callable[[Tensor], object], ...] = (
    lambda made: made[3:9],
    lambda made: made.view(torch.uint8),
    lambda made: made.numpy().data,
    lambda made: made.untyped_storage(),
    lambda made: torch.utils.dlpack.from_dlpack(made),
    _numpy,
    _graph,
    _thread,
)


@pytest.mark.parametrize("hold", HOLDERS)
def test_memory_returns_to_the_pool_when_the_last_reference_is_gone(
    pool: Pool, hold: Callable[[Tensor], object]
) -> None:
    made = empty((MIN_BYTES,), torch.float32, CPU)
    address, holder = made.data_ptr(), hold(made)
    del made
    gc.collect()
    assert pool.kept_bytes == 0
    del holder
    gc.collect()
    assert pool.kept_bytes == 4 * MIN_BYTES
    assert empty((MIN_BYTES,), torch.int32, CPU).data_ptr() == address


def test_tensors_alive_at_the_same_time_share_no_memory(pool: Pool) -> None:
    draw = random.Random(0)
    alive: dict[int, Tensor] = {}
    for i in range(300):
        if alive and draw.random() < 0.5:
            number = draw.choice(list(alive))
            assert bool((alive.pop(number) == number % 251).all())
        else:
            size = MIN_BYTES + draw.randrange(3) * PAGE
            alive[i] = empty((size,), torch.uint8, CPU).fill_(i % 251)
        if draw.random() < 0.1:
            pool.clear()
    alive.clear()
    pool.clear()
    # All holes are merged again: the whole range is free.
    assert pool.take(CAPACITY // 2) is not None


def test_block_that_is_freed_while_another_is_taken_leaves_the_pool_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the garbage collector ran in the middle of ``take``."""
    pool = Pool(8 * PAGE, is_shared=True)
    monkeypatch.setattr(pool_module, "MAX_KEPT_BYTES", 0)
    allocate, held = os.posix_fallocate, [pool.take(PAGE)]
    between = pool.take(PAGE)

    def allocate_and_free(fd: int, offset: int, size: int) -> None:
        allocate(fd, offset, size)
        held.clear()

    monkeypatch.setattr(os, "posix_fallocate", allocate_and_free)
    taken = pool.take(PAGE)
    assert taken is not None
    assert pool.kept_bytes == 0
    del between, taken
    assert pool.take(8 * PAGE) is not None


def test_small_tensors_do_not_use_the_pool(pool: Pool) -> None:
    rv.empty((MIN_BYTES - 1,), torch.uint8)
    assert pool.kept_bytes == 0


def test_pool_keeps_at_most_its_limit_and_reuses_the_last_block_first(pool: Pool) -> None:
    size = MAX_KEPT_BYTES // 4
    made = [empty((size,), torch.uint8, CPU) for _ in range(6)]
    last = made[-1].data_ptr()
    for i in range(6):
        made[i] = torch.empty(0)
    assert pool.kept_bytes == 4 * size
    # The block that was returned last is reused first, because its pages are in the caches.
    assert empty((size,), torch.uint8, CPU).data_ptr() == last


def test_tensor_is_allocated_by_torch_if_the_pool_is_full(pool: Pool) -> None:
    blocks = [pool.take(MAX_KEPT_BYTES) for _ in range(4)]
    assert all(block is not None for block in blocks)
    assert pool.take(PAGE) is None
    assert empty((MIN_BYTES,), torch.uint8, CPU).fill_(1).sum() == MIN_BYTES


def test_empty_cache_returns_memory_to_the_system(pool: Pool) -> None:
    def held() -> int:
        return os.fstat(pool.fd).st_blocks * 512 if pool.fd >= 0 else 0

    before = held()
    made = empty((MIN_BYTES,), torch.float32, CPU).fill_(1.0)
    assert made.sum() == MIN_BYTES
    del made
    rv.empty_cache()
    assert (pool.kept_bytes, held()) == (0, before)


def test_mapping_of_a_pool_shows_the_bytes_at_a_location_read_only() -> None:
    pool = Pool(CAPACITY, is_shared=True)
    view = pool.take(MIN_BYTES)
    assert view is not None
    view[:3] = b"abc"
    theirs = mapping_of(pool.fd)
    assert theirs is not None
    assert mapping_of(pool.fd) is theirs
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    start = pool.location(address, MIN_BYTES) - 1
    assert theirs[start : start + 3] == b"abc"
    with pytest.raises(TypeError):
        theirs[start] = 0


@pytest.mark.parametrize("least_fd", [0, 1100])
def test_parent_and_forked_child_do_not_see_writes_of_each_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, least_fd: int
) -> None:
    pipe = os.pipe
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= least_fd + 2:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, least_fd + 100), hard))

    def pipe_from() -> tuple[int, int]:
        ends = pipe()
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least_fd) for fd in ends]
        for fd in ends:
            os.close(fd)
        return moved[0], moved[1]

    monkeypatch.setattr(os, "pipe", pipe_from)
    before = len(os.listdir("/proc/self/fd"))
    made = empty((MIN_BYTES,), torch.float32, CPU)
    # A forked child has no threads of torch, so the test uses numpy.
    array = made.numpy()
    array.fill(1.0)
    go, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        is_right = False
        try:
            is_right = bool((array == 1.0).all())
            array.fill(2.0)
            os.write(done[1], b"x")
            os.read(go[0], 1)
            is_right &= bool((array == 2.0).all())
            empty((MIN_BYTES,), torch.float32, CPU).numpy().fill(4.0)
        finally:
            os._exit(0 if is_right else 1)
    os.read(done[0], 1)
    assert bool((array == 1.0).all())
    array.fill(3.0)
    os.write(go[1], b"x")
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert bool((array == 3.0).all())
    for fd in (*go, *done):
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pool_is_private_if_shared_memory_cannot_be_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(pool_module, "_pool", None)
    monkeypatch.setattr(pool_module, "_is_made", False)
    made = empty((MIN_BYTES,), torch.float32, CPU).fill_(1.0)
    found = pool_module.pool_here()
    assert found is not None
    assert found.fd == -1
    assert found.location(made.data_ptr(), made.nbytes) == 0


def test_pool_takes_at_most_an_eighth_of_a_limited_address_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(pool_module, "_pool", None)
    monkeypatch.setattr(pool_module, "_is_made", False)
    found = pool_module.pool_here()
    assert found is not None
    assert found.capacity <= 1 << 27
