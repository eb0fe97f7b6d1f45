"""Pages have one holder at a time, and none gets lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.pages import SINK_PAGE, PageAllocator


def test_every_page_but_the_sink_can_be_held():
    allocator = PageAllocator(5)
    assert sorted(allocator.allocate(4) or ()) == [1, 2, 3, 4]
    assert (allocator.used, allocator.usable) == (4, 4)
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == ()


def test_too_few_free_pages_take_nothing():
    allocator = PageAllocator(5)
    held = allocator.allocate(2)
    assert allocator.allocate(3) is None
    assert allocator.used == 2
    assert held is not None
    allocator.free(held)
    assert len(allocator.allocate(4) or ()) == 4


@pytest.mark.parametrize("wrong", [(3,), (1, 3), (1, 1), (SINK_PAGE,)])
def test_freeing_what_is_not_held_changes_nothing(wrong: tuple[int, ...]):
    allocator = PageAllocator(5)
    assert allocator.allocate(2) == (1, 2)
    with pytest.raises(ValueError, match="page"):
        allocator.free(wrong)
    assert allocator.used == 2
    allocator.check_integrity()


def test_a_pool_of_the_sink_alone_is_refused():
    with pytest.raises(ValueError, match="pages is 1"):
        PageAllocator(1)


@given(
    pages=st.integers(2, 40),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_no_page_is_ever_held_twice(pages: int, steps: list[tuple[bool, int]]):
    allocator = PageAllocator(pages)
    held: list[tuple[int, ...]] = []
    for take, number in steps:
        if take:
            got = allocator.allocate(number)
            free = pages - 1 - sum(map(len, held))
            assert (got is None) == (number > free)
            held += [got] if got is not None else []
        elif held:
            allocator.free(held.pop(number % len(held)))
        every = [page_id for page_ids in held for page_id in page_ids]
        assert len(set(every)) == len(every) == allocator.used
        assert all(SINK_PAGE < page_id < pages for page_id in every)
        allocator.check_integrity()
