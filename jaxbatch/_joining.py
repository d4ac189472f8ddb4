"""Which lanes share a batch: shorter examples join longer ones where the sum of latencies is smaller then.

So it is where a batch costs much the same whatever it holds, as on an accelerator that is not full. Where
cells have their price, each size stays alone.
"""

import operator

from ._options import OVERHEAD, Candidate, Option, Table


def group(first: Candidate, candidates: list[Candidate], waiting: int) -> tuple[list[Candidate], Option]:
    """Return the lanes that run together with the first one, and how.

    Args:
      candidates: what the lanes would run each for itself.
      waiting: how many examples wait in all.
    """
    members, largest, num, seconds = [first], first, first.num, first.option.seconds
    while found := _host(largest, (num, seconds), candidates, waiting):
        largest, seconds = found
        members.append(largest)
        num += largest.num
    for other in sorted(candidates, key=lambda other: other.lane.rank):
        if other not in members and _rides(other, largest):
            joint = _joint((num, seconds), other, largest.table, waiting)
            if joint is not None:
                members.append(other)
                num, seconds = num + other.num, joint
    return members, first.option if len(members) == 1 else largest.table.shortest(num)


def _host(
    rider: Candidate, own: tuple[int, float], candidates: list[Candidate], waiting: int
) -> tuple[Candidate, float] | None:
    """Return the batch of larger examples that a batch should join, if any, and the seconds of both."""
    hosts = [each for each in candidates if _rides(rider, each)]
    found = [(each, _joint(own, each, each.table, waiting)) for each in hosts]
    worth = [(each, joint) for each, joint in found if joint is not None]
    return min(worth, key=lambda pair: pair[1] - pair[0].option.seconds, default=None)


def _rides(rider: Candidate, host: Candidate) -> bool:
    """Tell whether a batch may join another of larger examples."""
    if rider is host or rider.full or host.full or not rider.lane.kind.moves:
        return False
    one, other = rider.lane, host.lane
    return one.kind is other.kind and all(map(operator.le, one.sizes, other.sizes))


def _joint(first: tuple[int, float], second: Candidate, table: Table, waiting: int) -> float | None:
    """Return the seconds of two batches in one, where that is worth it.

    Args:
      first: number of examples and seconds of the one that would run first.
      table: of the larger examples.
    """
    num = first[0] + second.num
    if num > table.rows:
        return None
    joint = table.least(num)
    worth = worth_joining(first, (second.num, second.option.seconds), joint, waiting - num)
    return joint if worth else None


def worth_joining(first: tuple[int, float], second: tuple[int, float], joint: float, behind: int) -> bool:
    """Tell whether two batches of lanes are better run as one: the sum of latencies is smaller then.

    Args:
      first: how many examples the batch has that would run first, and its seconds; `second` likewise.
      joint: seconds of both in one.
      behind: how many others wait for their end.
    """
    (num, seconds), (more, later) = first, second
    apart = num * seconds + (more + behind) * (seconds + later + OVERHEAD)
    return (num + more + behind) * joint <= apart
