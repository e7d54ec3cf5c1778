"""Command `report`: one HTML page with the curves, events and settings of one or several runs.

`runs` reads run folders, their records in a bounded number of columns, and `command` makes one Plotly figure
and the tables around it. The page needs no network. It is one process without MPI, changes nothing of the
runs, and may be used while a job goes on.
"""
