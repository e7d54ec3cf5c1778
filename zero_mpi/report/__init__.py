"""`python -m zero_mpi.report RUN...`: what runs did, as one page for a browser or as text for a terminal.

`run_folder` and `metrics` read a run folder as a stream into at most 2000 columns, so neither memory nor the
page grow with the run. `charts` names the curves; `svg`, `page` and `sections` make the page, which works
without a network and shows its curves without JavaScript; `text` draws in the terminal. `chart.js` and
`page.js` let a reader look closer. Where a pixel holds several columns, the line is their mean and the band
their span. What is absent is not drawn; null is a gap with a cross.
"""


def main() -> None:
    """Entry point of the command."""
    from zero_mpi.report.command import main as run

    run()
