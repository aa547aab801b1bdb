"""WeakRegistry: threads add objects while others iterate; objects are held weakly."""

import gc

from mirror.base.process_bound import WeakRegistry


class Member:
    pass


def test_members_are_kept_in_order_by_identity_and_only_while_they_live():
    registry, members = WeakRegistry(), [Member() for _ in range(3)]
    assert not registry
    for member in (*members, members[0]):
        registry.add(member)
    assert list(registry) == members
    registry.discard(members[1])
    registry.discard(Member())
    assert list(registry) == [members[0], members[2]]
    del member, members
    gc.collect()
    assert not registry


def test_members_may_be_added_and_freed_while_others_iterate():
    # As threads do it, in one: a WeakSet raises RuntimeError here.
    registry, members = WeakRegistry(), [Member() for _ in range(3)]
    for member in members:
        registry.add(member)
    found = iter(registry)
    assert next(found) is members[0]
    added = Member()
    registry.add(added)
    del member, members[1]
    gc.collect()
    assert list(found) == [members[1]]
    assert list(registry) == [*members, added]
