"""Agreement: the one place where ranks compare what they were asked for.

Each rank posts a value in the job's store and reads what the others posted. All ranks read the same
posts, so all reach the same conclusion: one plan, or one error that names the rank at fault. An
error that follows from the posts leaves the group usable, since all ranks raise it and no byte was
sent. A rank that does not post in time breaks the group for good (``World.fail``).

Every store operation runs in a thread of its own with a deadline, because torch's store client
waits without end for a host that is cut off from the network.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from threading import Thread
from typing import Any, Protocol, TypeVar

from torch.distributed import DistNetworkError

from rvdcomm.errors import CommError, LayoutError, ShapeMismatchError
from rvdcomm.layout import ranges_text
from rvdcomm.text import quoted

Post = dict[str, Any]
"""A JSON object that one process sends to others."""

Members = tuple[int, ...]
"""Ranks of a group that agree among themselves."""


class _StoreLostError(CommError):
    """The store of a group does not answer any more: its host ended."""


class Group(Protocol):
    """The interface of a process group that an agreement needs; a ``World`` implements it.

    ``prefix`` is what the group's keys in the store begin with. ``generations``,
    ``num_agreements`` and ``num_partings`` are state of the agreements, kept as long as the group.
    """

    prefix: str
    rank: int
    generations: dict[Members, str]
    num_agreements: dict[Members, int]
    num_partings: dict[Members, int]

    @property
    def timeout(self) -> timedelta:
        """How long a call waits for another rank."""

    @property
    def store(self) -> Any:
        """The key-value store that all ranks of the job reach."""

    def check(self) -> None:
        """Raise a CommError if the group cannot be used any more."""

    def fail(self, error: BaseException) -> None:
        """Break the group for good because of ``error``."""

    def watch(self, members: Members, what: str, is_done: Callable[[], bool]) -> None:
        """Raise a CommError if a member is known to be lost before ``is_done``."""

    def gone(self, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that are known to have ended."""


_Result = TypeVar("_Result")

_FAULTS = {error.__name__: error for error in (LayoutError, ShapeMismatchError)}
"""Errors that the arguments of one rank may raise on all of them."""

FIRST_PAUSE_SECS = 1e-4
MAX_PAUSE_SECS_PER_RANK = 1e-3
"""Pauses between polls of the store grow with the number of ranks, to limit the store's load."""

PROBE_SECS = 0.25
"""Seconds between two looks at whether ranks that are waited for still live."""

GRACE_SECS = 1.0
"""Seconds that a store which still works may need to answer, beyond the group's timeout."""


def exchange_posts(
    world: Group, members: Members, post: Post, what: str, *, num_timeouts: int = 1
) -> dict[int, Post]:
    """Every member's post, by rank; collective over ``members``.

    Args:
        world, members: who agrees.
        post: the value of this rank.
        what: names the agreement in errors.
        num_timeouts: how many times the group's timeout to wait. More than one is needed if members
            may arrive late from an agreement among fewer ranks. If that one fails, it has to fail
            first, so that all ranks report its cause and not the ranks that waited in it.

    Raises:
        CommError: a member did not post in time, is dead, gave up, is in another call, or its post
            cannot be read. The group cannot be used any more.
        CommError: the store is lost, for all members. The group can be used for what its ranks
            agreed on before.
    """
    world.check()
    try:
        return _Agreement(world, members, what, num_timeouts).posts(post)
    except _StoreLostError as lost:
        raise CommError(str(lost)) from None
    except BaseException as error:
        world.fail(error)
        raise


def compare_requests(
    world: Group,
    members: Members,
    asked: Mapping[str, Any],
    what: str,
    *,
    fault: Exception | None = None,
    **own: Any,
) -> dict[int, Post]:
    """Check that ``asked`` is equal on all members; return every member's ``own`` by rank.

    Requests may be long. So ranks compare digests, and exchange the requests only to say what
    differs.

    Args:
        world, members, what: as of ``exchange_posts``.
        asked: the arguments that must be equal on all members, by the names that errors use.
        fault: the error in this rank's own arguments, if any; it is then raised on all members.
        own: values of this rank for the other members.

    Raises:
        LayoutError, ShapeMismatchError: ``asked`` differs, or a member has a fault; the same on all
            members.
        CommError: as of ``exchange_posts``.
    """
    digest = sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    said = None if fault is None else [type(fault).__name__, str(fault)]
    posts = exchange_posts(world, members, {"digest": digest, "fault": said, **own}, what)
    for post in posts.values():
        if post["fault"] is not None:
            kind, text = post["fault"]
            raise _FAULTS[kind](text)
    if len({post["digest"] for post in posts.values()}) > 1:
        texts = exchange_posts(world, members, {"asked": asked}, what)
        check_equal({rank: text["asked"] for rank, text in texts.items()}, what)
    return posts


def check_equal(
    asked: Mapping[int, Mapping[str, Any]], what: str, error: type[Exception] = LayoutError
) -> None:
    """Raise ``error``, the same on all ranks, if two ranks were asked for different things."""
    first = min(asked)
    for rank, theirs in asked.items():
        for name in {**asked[first], **theirs}:
            values = asked[first].get(name), theirs.get(name)
            if values[0] != values[1]:
                one, other = (v if isinstance(v, str) else quoted(v) for v in values)
                raise error(
                    f"{what}: ranks disagree about {name}: rank {first} asks for {one}, rank "
                    f"{rank} for {other}."
                )


def generation_of(world: Group, members: Members, what: str) -> str:
    """A prefix of store keys for this group, agreed by its members and never used by another group.

    So keys that an earlier group of the same name left in the store are never read by this one.
    Collective over ``members`` on the first call.

    Raises:
        CommError: as of ``exchange_posts``.
    """
    try:
        return _Agreement(world, members, what).generation()
    except _StoreLostError as lost:
        raise CommError(str(lost)) from None
    except BaseException as error:
        world.fail(error)
        raise


def part(world: Group, members: Members) -> None:
    """Wait until ``members`` have all that they need of this rank, which may then end.

    Collective over ``members``, after they agreed, connected and shared memory. A rank waits for
    courtesy only: at most for the timeout, not for the dead, not after a failure, and without the
    store, which a rank that served it may have taken along. So this raises nothing.
    """
    generation = world.generations.get(members)
    if generation is not None:
        with suppress(TimeoutError, RuntimeError):
            secs = world.timeout.total_seconds()
            bounded(lambda: _part(world, members, generation, secs), secs + GRACE_SECS)


def _part(world: Group, members: Members, generation: str, timeout_secs: float) -> None:
    store, number = world.store, world.num_partings.get(members, 0)
    world.num_partings[members] = number + 1
    deadline, own = time.monotonic() + timeout_secs, world.rank

    def keys(word: str, number: int, ranks: Iterable[int]) -> list[str]:
        return [f"{generation}/{word}/{number}/{rank}" for rank in ranks]

    def wait_for(word: str) -> bool:
        """Wait until all members have posted a word; False if there is no need to wait longer."""
        pause, next_look = FIRST_PAUSE_SECS, 0.0
        while not store.check(keys(word, number, members)):
            now = time.monotonic()
            if now > deadline or store.check([_failed(generation)]):
                return False
            if now > next_look:
                missing = [r for r in members if not store.check(keys(word, number, [r]))]
                # Nobody is missing if the last one came between the two looks.
                if missing and world.gone(missing) == set(missing):
                    return False
                next_look = now + PROBE_SECS
            time.sleep(pause)
            pause = _longer(pause, members)
        return True

    store.set(*keys("ready", number, [own]), "")
    is_met = wait_for("ready")
    store.set(*keys("parts", number, [own]), "")
    # The lowest rank often serves the store, so it leaves last.
    if is_met and own == members[0]:
        wait_for("parts")
    if is_met and number:
        # All members are ready, so all have parted before and look at those keys no more.
        store.delete_key(*keys("ready", number - 1, [own]))
        if own != members[0]:
            return
        for key in keys("parts", number - 1, members):
            store.delete_key(key)


def tell_failure(world: Group, text: str) -> None:
    """Make members that wait for this rank in an agreement, now or later, raise ``text``."""
    keys = [_failed(generation) for generation in world.generations.values()]
    if keys:
        bounded(lambda: [world.store.set(key, text) for key in keys], GRACE_SECS)


def gone_error(what: str, rank: int, gone: Sequence[int]) -> CommError:
    """The error of ``rank``, which waits for others: one died, and more may have left then."""
    if len(gone) == 1:
        (first,) = gone
        why = f"rank {first} is gone (its process ended, or it destroyed the process group)"
    else:
        each = " and ".join(map(str, gone))
        why = f"ranks {each} are gone (their processes ended, or destroyed the process group)"
    return CommError(f"{what}, rank {rank}: {why}.")


def text_of(error: BaseException) -> str:
    """What an error says, as a sentence, without the C++ stack that torch adds."""
    text = str(error).partition("\nException raised from")[0].strip() or type(error).__name__
    return text if text.endswith((".", "?", "!")) else f"{text}."


def bounded(
    function: Callable[[], _Result],
    timeout_secs: float,
    watch: Callable[[Callable[[], bool]], None] | None = None,
) -> _Result:
    """Run ``function`` in a thread of its own and return its result.

    If the function takes too long, its thread is left running. The same holds if ``watch`` raises.
    It is called again and again meanwhile, with a function that says whether the result is there.

    Raises:
        TimeoutError: the function took longer than ``timeout_secs``.
    """
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, name="rvdcomm-store", daemon=True).start()
    deadline = time.monotonic() + timeout_secs
    while (left := deadline - time.monotonic()) > 0:
        with suppress(FutureTimeoutError):
            return done.result(left if watch is None else min(left, PROBE_SECS))
        if watch is not None:
            watch(done.done)
    raise TimeoutError(f"no answer within {timeout_secs:g} s")


class _Agreement:
    """One agreement of members of a group, through the store."""

    def __init__(self, world: Group, members: Members, what: str, num_timeouts: int = 1) -> None:
        self.world, self.members, self.what = world, members, what
        self.timeout_secs = num_timeouts * world.timeout.total_seconds()
        self.last_look = time.monotonic()
        self.deadline = self.last_look + self.timeout_secs
        self.prefix = f"{world.prefix}/{ranges_text(members)}"

    def generation(self) -> str:
        return self._bounded(self._generation)

    def posts(self, post: Post) -> dict[int, Post]:
        data = self._bounded(lambda: self._exchange(json.dumps(post)))
        posts = {}
        for rank, text in zip(self.members, data, strict=True):
            try:
                posts[rank] = read_post(text)
            except ValueError as error:
                raise CommError(
                    f"{self.what}: what rank {rank} posted cannot be read ({error}). Do all ranks "
                    "run one version of rvdcomm?"
                ) from None
        first = self.members[0]
        for rank, found in posts.items():
            if found.keys() != posts[first].keys():
                raise CommError(
                    f"{self.what}: ranks {first} and {rank} are in different calls: they posted "
                    f"{sorted(posts[first])} and {sorted(found)}."
                )
        return posts

    def _bounded(self, function: Callable[[], _Result]) -> _Result:
        try:
            return bounded(function, self.timeout_secs + GRACE_SECS, self._watch_stuck)
        except CommError:
            raise
        except TimeoutError:
            raise self._absent("that serve the store, or others,") from None
        except DistNetworkError as error:
            if gone := sorted(self.world.gone(self.members)):
                raise gone_error(self.what, self.world.rank, gone) from None
            raise _StoreLostError(
                f"{self.what}: the store of the process group is lost: {text_of(error)} Calls that "
                "all ranks have made before still run, but nothing new can be agreed on; for that, "
                "form the group again on all of its ranks, with a store that lives."
            ) from None
        except (RuntimeError, OSError, MemoryError) as error:
            raise CommError(
                f"{self.what}, rank {self.world.rank}: {type(error).__name__}: {text_of(error)}"
            ) from None

    def _watch_stuck(self, is_done: Callable[[], bool]) -> None:
        """Raise a CommError if a member is lost while the thread waits for the store alone.

        The thread itself looks between two operations. One may take long: it connects to a store
        whose rank has died.
        """
        if time.monotonic() - self.last_look > 2 * PROBE_SECS:
            self.world.watch(self.members, self.what, is_done)

    # --- in the thread --------------------------------------------------------------------------

    def _generation(self) -> str:
        """Exchange random words until all members have confirmed the same set of words.

        Keys that an earlier group left in the store do no harm: its ranks never confirmed a set
        with the new words.
        """
        world, store = self.world, self.world.store
        if self.members in world.generations:
            return world.generations[self.members]
        hello = [f"{self.prefix}/hello/{rank}" for rank in self.members]
        heard = [f"{self.prefix}/heard/{rank}" for rank in self.members]
        own = self.members.index(world.rank)
        store.set(hello[own], secrets.token_hex(8))
        answer = ""

        def have_heard_alike() -> bool:
            nonlocal answer
            if not store.check(hello):
                return False
            words = store.multi_get(hello)
            if not all(words):
                return False
            digest = sha256(b"/".join(words)).hexdigest()[:16]
            if digest != answer:
                answer = digest
                store.set(heard[own], answer)
            return bool(store.check(heard)) and set(store.multi_get(heard)) == {answer.encode()}

        def absent() -> list[int]:
            silent = [not store.check([key]) for key in hello]
            if not any(silent):
                silent = [store.check([k]) and store.get(k) != answer.encode() for k in heard]
                silent = silent if any(silent) else [not store.check([key]) for key in heard]
            # An empty word: this rank was here, but gave up. No member confirms a set with it.
            store.set(hello[own], "")
            return [rank for rank, is_so in zip(self.members, silent, strict=True) if is_so]

        self._wait(have_heard_alike, absent)
        world.generations[self.members] = f"{self.prefix}/{answer}"
        return world.generations[self.members]

    def _exchange(self, data: str) -> list[bytes]:
        world, store = self.world, self.world.store
        generation = self._generation()
        number = world.num_agreements.get(self.members, 0)
        keys = [f"{generation}/{number}/{rank}" for rank in self.members]
        own = self.members.index(world.rank)
        self._check_failed(generation)
        store.set(keys[own], data)

        def absent() -> list[int]:
            return [
                rank for rank, key in zip(self.members, keys, strict=True) if not store.check([key])
            ]

        self._wait(lambda: bool(store.check(keys)), absent, generation)
        found: list[bytes] = store.multi_get(keys)
        if number:
            # All members have posted now, so all have read the posts of the agreement before.
            store.delete_key(f"{generation}/{number - 1}/{world.rank}")
        world.num_agreements[self.members] = number + 1
        return found

    def _wait(
        self, is_met: Callable[[], bool], absent: Callable[[], list[int]], generation: str = ""
    ) -> None:
        """Poll until ``is_met``; no lock of the store is held between two polls."""
        pause = FIRST_PAUSE_SECS
        while not is_met():
            self.last_look = time.monotonic()
            if time.monotonic() > self.deadline:
                raise self._absent(absent())
            try:
                if generation:
                    self._check_failed(generation)
                self.world.watch(self.members, self.what, is_met)
            except CommError:
                # A rank that gave up may have read all posts first, and given up because of them.
                # This rank then has all posts too, and draws the same conclusion from them.
                if is_met():
                    return
                # A member that is gone may have left because of another one, and says so.
                if generation:
                    self._check_failed(generation)
                raise
            time.sleep(pause)
            pause = _longer(pause, self.members)

    def _check_failed(self, generation: str) -> None:
        if self.world.store.check([_failed(generation)]):
            text = self.world.store.get(_failed(generation)).decode()
            raise CommError(f"{self.what}: another rank gave up: {text}")

    def _absent(self, ranks: Sequence[int] | str) -> CommError:
        return CommError(
            f"{self.what}: ranks {ranks} did not join within {self.timeout_secs:g} s. They may be "
            "in another call, or think that this transition has other ranks."
        )


def _longer(pause_secs: float, members: Members) -> float:
    """The next pause between two polls of the store."""
    return min(1.5 * pause_secs, 0.01 + MAX_PAUSE_SECS_PER_RANK * len(members))


def _failed(generation: str) -> str:
    """The store key of the reason why a rank gave up."""
    return f"{generation}/failed"


def read_post(data: bytes) -> Post:
    """Read the JSON object that another process sent; it holds plain values only.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        found = json.loads(data)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object, or too deep a one")
    return found
