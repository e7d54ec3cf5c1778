"""`python -m zero_mpi.report RUN...`: what runs did, as one page for a browser or as text for a terminal.

`runs` and `columns` read a run folder as a stream into at most 2000 columns, so neither memory nor the page
grow with the run. `charts` names the curves; `traces` and `plots` turn them into data for Plotly, which draws
them in the browser; `sections` makes the rows around them, and `page` puts all into its template, which needs
no network; `terminal` draws on a terminal. What is absent is not drawn; null is a gap with a cross.
"""
