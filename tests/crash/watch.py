"""What a run has in its store, watched from death to death: every checkpoint can be restored, and nothing is lost.

It must not know in which store the objects lie, nor what a life is.
"""

from __future__ import annotations

from places import Open

from incremental_ckpt import Repository
from incremental_ckpt.format import layout
from incremental_ckpt.storage import MemoryStore


class Watch:
    """Judges a copy of the store in memory, which follows the store object by object.

    An object is fetched when it is first listed, and looked at again only by ``assert_nothing_changed``: objects are
    never overwritten (I2). A death after which no manifest came and no object went leaves the judgement as it was.
    """

    def __init__(self, open_again: Open) -> None:
        self._open_again = open_again
        self._copy = MemoryStore()
        self._sizes: dict[str, int] = {}
        self._newest = 0

    def assert_whole(self, ground: int) -> None:
        """I1, I3 and coverage of every visible checkpoint, every checksum included; the newest is not behind the step
        ``ground``."""
        went, came = self._follow()
        if went or any(key.startswith(layout.MANIFESTS) for key in came):
            repository = Repository(self._copy)
            assert repository.check(deep=True).problems == ()
            newest = repository.newest()
            self._newest = 0 if newest is None else newest.step
        assert self._newest >= ground, "an acknowledged commit is lost"

    def assert_nothing_changed(self) -> None:
        """Every object, read anew, holds the bytes that were judged."""
        assert self._follow() == (set(), set())
        store = self._open_again()
        for key in self._sizes:
            assert store.get(key) == self._copy.get(key), f"{key} was overwritten"

    def _follow(self) -> tuple[set[str], set[str]]:
        """Bring the copy up to date. Returns the keys that went and those that came."""
        store = self._open_again()
        sizes = {one.key: one.size for one in store.list()}
        went, came = self._sizes.keys() - sizes.keys(), sizes.keys() - self._sizes.keys()
        assert all(sizes[key] == size for key, size in self._sizes.items() if key not in went), (
            "an object was overwritten"
        )
        self._copy.delete(went)
        for key in came:
            content = store.get(key)
            assert content.nbytes == sizes[key], f"{key} is listed with another size than it has"
            self._copy.put(key, [content])
        self._sizes = sizes
        return went, came
