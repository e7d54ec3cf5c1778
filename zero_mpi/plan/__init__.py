"""What a run will take before it is started: memory of a rank, bytes that travel, time of a step.

`case` is the question. `ghost` and `operations` are arrays without memory, on which `rehearsal` runs the
real layers and loops; `memory` and `steptime` read what it saw, `traffic` works from the layout alone. `fit`
and `sweep` ask about many cases.
"""


def main() -> None:
    """Entry point of the command."""
    from zero_mpi.plan.command import main as run

    run()
