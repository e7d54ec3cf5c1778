"""ReFrame test: four ranks train for 20 steps on a small text; the loss must fall and the run must be `done`.

    reframe -C packaging/reframe/local.py -c packaging/reframe/zero_mpi_check.py -r

On a cluster, leave out -C to use the site's configuration, with zero_mpi in PATH or in a module of `modules`.
"""

import reframe as rfm
import reframe.utility.sanity as sn

TEXT = "print('\\n'.join(f'def f{n}(x):\\n    return x + {n}\\n' for n in range(400)))"


@rfm.simple_test
class ZeroMpiTrains(rfm.RunOnlyRegressionTest):
    """Train a small byte-level model for twenty steps."""

    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    num_tasks = 4
    time_limit = "10m"
    prerun_cmds = [f'python -c "{TEXT}" > text.txt']
    executable = "python"
    executable_opts = [
        *("-m", "zero_mpi.train", "--steps", "20", "--data", "text.txt", "--out", "run", "--log-every", "1"),
        *("--layers", "2", "--dim", "32", "--heads", "2", "--context", "64", "--sample", "0"),
    ]
    postrun_cmds = ["cat run/status.json"]

    @sanity_function
    def the_loss_falls_and_the_run_is_done(self):
        """Check the losses of steps 1 and 20 and the final state."""
        losses = sn.extractall(r"^step +(?:1|20)/20 +loss (\S+)", self.stdout, 1, float)
        return sn.all(
            [
                sn.assert_eq(sn.count(losses), 2),
                sn.assert_lt(losses[1], losses[0]),
                sn.assert_found(r'"state": "done"', self.stdout),
            ]
        )
