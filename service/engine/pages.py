"""Who holds which page of the paged KV caches. Bookkeeping only: the pages live on the device."""

from __future__ import annotations

from collections.abc import Sequence

SINK_PAGE = 0
"""Where the device writes what must go nowhere (padding, frozen slots); never allocated."""


class PageAllocator:
    """Hands out page ids 1 .. pages - 1, each to one holder at a time."""

    def __init__(self, pages: int) -> None:
        """Starts with every page free but the sink.

        Args:
          pages: pages in all, the sink page included (`Limits.pages`).

        Raises:
          ValueError: there is no page beside the sink.
        """
        if pages < 2:
            raise ValueError(f"pages is {pages}, and must be at least 2: the sink and one more")
        self._pages = pages
        # A stack, lowest id on top: pages just freed are used again first.
        self._free = list(range(pages - 1, SINK_PAGE, -1))
        self._used: set[int] = set()

    @property
    def usable(self) -> int:
        """Pages that can be held, the sink page excluded."""
        return self._pages - 1

    @property
    def used(self) -> int:
        """Pages held now."""
        return len(self._used)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Takes `count` pages: all of them, or None (and nothing is taken) if fewer are free."""
        if count > len(self._free):
            return None
        page_ids = tuple(self._free.pop() for _ in range(count))
        self._used.update(page_ids)
        return page_ids

    def free(self, page_ids: Sequence[int]) -> None:
        """Gives pages back.

        Raises:
          ValueError: one of them is not held, or is named twice; nothing is given back then.
        """
        foreign = sorted(set(page_ids) - self._used)
        if foreign:
            raise ValueError(f"pages {foreign} are not held and cannot be freed")
        if len(set(page_ids)) != len(page_ids):
            raise ValueError(f"pages {sorted(page_ids)} name a page twice")
        self._used.difference_update(page_ids)
        self._free.extend(reversed(page_ids))

    def check_integrity(self) -> None:
        """Proves that every usable page is either free or held, once.

        Raises:
          RuntimeError: it is not so; the text names both sides.
        """
        if len(self._free) + len(self._used) != self.usable:
            raise RuntimeError(
                f"{len(self._free)} free pages + {len(self._used)} used pages "
                f"!= {self.usable} usable pages"
            )
        if set(self._free) | self._used != set(range(SINK_PAGE + 1, self._pages)):
            raise RuntimeError(
                f"free pages {sorted(self._free)} and used pages {sorted(self._used)} "
                f"are not the pages 1 .. {self._pages - 1}"
            )
