"""`python -m zero_mpi.report RUN...`: what runs did, as one page for a browser or as text for a terminal.

`folder` and `metrics` read a run folder and keep a curve small however long the run was; `charts` names the
curves; `svg`, `page` and `sections` make the page, which works without a network and shows its curves without
JavaScript; `text` draws in the terminal. `chart.js` and `page.js` let a reader look closer.
"""


def main() -> None:
    """Entry point of the command."""
    from zero_mpi.report.command import main as run

    run()
