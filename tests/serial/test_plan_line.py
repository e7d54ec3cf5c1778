"""`zero_mpi.plan.line` beside every piece on every link: sums that pass from node to node and come back.

Here a link takes what is sent in the order in which it comes, like the queue of a network card; a node sends
and receives at the same time. The plan knows no pieces but the last one of a unit.
"""

import heapq
from collections import Counter, deque
from itertools import count

import pytest

from zero_mpi.plan.line import Cost, TransferLine

LANES = 8
PACKETS = 16  # of a message: a node passes on none before all of it has arrived


class Links:
    """One way out of each node and one into it."""

    def __init__(self, nodes):
        self.nodes, self.now, self.events, self.order = nodes, 0.0, [], count()
        self.queues = [deque() for _ in range(2 * nodes)]

    def send(self, source, target, seconds, arrived):
        left, each, into = count(PACKETS - 1, -1), seconds / PACKETS, self.nodes + target
        for _ in range(PACKETS):
            self.join(source, each, lambda: self.join(into, each, lambda: next(left) or arrived()))

    def join(self, link, seconds, passed):
        self.queues[link].append((seconds, passed))
        if len(self.queues[link]) == 1:
            self.serve(link)

    def serve(self, link):
        heapq.heappush(self.events, (self.now + self.queues[link][0][0], next(self.order), link))

    def run(self):
        while self.events:
            self.now, _, link = heapq.heappop(self.events)
            _, passed = self.queues[link].popleft()
            if self.queues[link]:
                self.serve(link)
            passed()


class Sums:
    """Units with one piece in each lane, of so many seconds on a link, through all nodes and back.

    A node begins a unit when it has the one `window` before; pieces that come earlier wait there.
    """

    def __init__(self, nodes, units, piece, window):
        self.links, self.last, self.piece, self.window = Links(nodes), nodes - 1, piece, window
        self.begun, self.there, self.early = [0] * nodes, Counter(), Counter()
        for unit in range(units):
            self.early[0, unit] = LANES  # what the first node has of its own
        for node in range(nodes):
            self.begin(node)
        self.links.run()

    @property
    def seconds(self):
        return self.links.now

    def begin(self, node):
        unit = self.begun[node]
        while unit < self.window or self.there[node, unit - self.window] == LANES:
            self.begun[node] = unit = unit + 1
            for _ in range(self.early.pop((node, unit - 1), 0)):
                self.pass_on(node, unit - 1)

    def forth(self, node, unit):
        if unit < self.begun[node]:
            self.pass_on(node, unit)
        else:
            self.early[node, unit] += 1

    def pass_on(self, node, unit):
        if node == self.last:
            self.back(node, unit)
        else:
            self.links.send(node, node + 1, self.piece, lambda: self.forth(node + 1, unit))

    def back(self, node, unit):
        if node:
            self.links.send(node, node - 1, self.piece, lambda: self.back(node - 1, unit))
        self.there[node, unit] += 1
        self.begin(node)


def planned(nodes, units, piece, window):
    """The same by the line: the first node starts a unit, or waits for the one `window` before."""
    line, now = TransferLine(), 0.0
    cost = Cost(LANES * piece, LANES * piece * (nodes > 2), 2 * (nodes - 1) * piece)
    for unit in range(units + window):
        now = max(now, line.complete(unit - window))
        if unit < units:
            line.start(unit, now, cost)
    return now


@pytest.mark.parametrize("window", [1, 2, 4])  # of four units
@pytest.mark.parametrize("nodes", [2, 3, 8, 16])
def test_the_line_tells_what_pieces_on_links_take(nodes, window):
    pieces, within = Sums(nodes, 4, 0.08, window).seconds, 0.05 if nodes > 3 and window > 1 else 0.11
    assert planned(nodes, 4, 0.08, window) == pytest.approx(pieces, rel=within)


def test_what_comes_back_goes_behind_what_began_meanwhile():
    line = TransferLine()
    for unit in (0, 1):
        line.start(unit, 0.0, Cost(3.0, 3.0, 10.0))
    assert line.complete(0) == 3 + 3 + 3 + 10  # there, the other's way there, back
    line.start(2, 19.0, Cost(3.0, 3.0, 10.0))
    assert line.complete(1) == 4 * 3 + 10
    assert line.complete(2) == 19 + 3 + 3 + 10  # by then there is nothing else on the line


def test_to_ask_for_what_is_over_changes_nothing():
    line = TransferLine()
    line.start(0, 0.0, Cost(3.0, 3.0))
    assert line.complete(0) == 6
    line.start(1, 6.0, Cost(3.0, 3.0))
    assert line.complete(0) == line.complete(5) == 0
    line.start(2, 6.0, Cost(3.0))
    assert line.complete(1) == 15  # behind what began meanwhile
