"""A machine without a batch system, for ReFrame: ranks are started by the mpirun of PATH."""

site_configuration = {
    "systems": [
        {
            "name": "here",
            "hostnames": [".*"],
            "partitions": [
                {"name": "cpu", "scheduler": "local", "launcher": "mpirun", "environs": ["builtin"]}
            ],
        }
    ],
    "environments": [{"name": "builtin"}],
}
