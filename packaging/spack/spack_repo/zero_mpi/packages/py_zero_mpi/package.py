"""Spack package of zero_mpi. Add its repository: `spack repo add packaging/spack/spack_repo/zero_mpi`."""

import os

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyZeroMpi(PythonPackage):
    """Train transformers sharded over MPI ranks, exact to the last bit, into GGUF."""

    # The archive of `make dist`, in the folder where spack is called. It has no digest before it is
    # published, so --no-checksum is needed.
    manual_download = True
    url = f"file://{os.getcwd()}/zero_mpi-0.2.0.tar.gz"

    license("MIT")

    version("0.2.0")

    variant("fast", default=True, description="Compiled operations (numba)")
    variant("tokenizers", default=False, description="Byte-level BPE tokenizers")
    variant("arrow", default=False, description="Arrow and Parquet files")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling@1.27:", type="build")

    depends_on("mpi", type=("build", "run"))
    depends_on("py-numpy@2.0:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-gguf@0.17:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-ml-dtypes@0.5:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.5:", type=("build", "run"))
    depends_on("py-tomli-w@1.1:", type=("build", "run"))
    depends_on("py-tqdm@4.66:", type=("build", "run"))
    depends_on("py-xxhash@3.5:", type=("build", "run"))

    depends_on("py-numba@0.61:", type=("build", "run"), when="+fast")
    depends_on("py-tokenizers@0.21:", type=("build", "run"), when="+tokenizers")
    depends_on("py-pyarrow@18:", type=("build", "run"), when="+arrow")
    depends_on("arrow+parquet", type="run", when="+arrow")  # without it, Arrow cannot read Parquet

    @property
    def skip_modules(self):
        needs_cupy, needs_numba = ["zero_mpi.comm.gpu", "zero_mpi.ops.gpu"], ["zero_mpi.ops.cpu"]
        return needs_cupy if self.spec.satisfies("+fast") else needs_cupy + needs_numba
