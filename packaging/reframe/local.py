"""ReFrame configuration for a machine without a batch system: the mpirun of PATH starts the ranks."""

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
