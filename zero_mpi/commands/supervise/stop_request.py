"""Signals that ask the supervised run to stop: noted here, handed on by whoever waits for it.

Whatever the signal, the run is told SIGUSR1, as the job scripts do: all launchers hand that on and none ends
its ranks for it. A second Ctrl-C means at once.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

from zero_mpi.launch.stopping import SIGNALS, TWICE, handle


class StopRequest:
    """What this process was told: `told`, the first signal's name, and `at_once`."""

    def __init__(self) -> None:
        self.told, self.at_once = "", False
        self._interrupted = 0.0

    def listen(self) -> None:
        """Take the signals from now on."""
        for number in SIGNALS:
            handle(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.told = self.told or signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            self.at_once |= bool(self._interrupted) and now - self._interrupted > TWICE
            self._interrupted = self._interrupted or now
