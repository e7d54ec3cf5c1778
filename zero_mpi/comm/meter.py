"""What communication costs a rank: bytes that it gives to others, and the time it stands and waits."""

from __future__ import annotations

import time
from types import TracebackType


class Meter:
    """Counts from the start of a transport; take the difference over a step. `with meter:` around a wait.

    wait_seconds   in waits for transfers and for other ranks; what is done in a wait to complete a transfer
                   (adding pieces of a reduction) is part of it, what moves while layers compute is not
    sent_bytes     slices of parameters, gradients and vectors given to other ranks, in a message or, where
                   memory is shared, by letting them read (gathers are free there)
    """

    def __init__(self) -> None:
        self.wait_seconds, self.sent_bytes = 0.0, 0
        self._depth, self._begun = 0, 0.0

    def __enter__(self) -> None:
        if self._depth == 0:  # a wait may lead to another one
            self._begun = time.perf_counter()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.wait_seconds += time.perf_counter() - self._begun
