-- For Lmod. Install the package into a virtual environment first:
--   python3 -m venv /opt/zero-mpi/0.2.0 && /opt/zero-mpi/0.2.0/bin/pip install 'zero_mpi-0.2.0-py3-none-any.whl[fast]'
-- ZERO_MPI_PREFIX names another folder. To load the site's MPI, uncomment the line below; else install [mpich,fast].

local version = "0.2.0"
local root = os.getenv("ZERO_MPI_PREFIX") or pathJoin("/opt/zero-mpi", version)

help("zero_mpi trains transformers over MPI ranks. Start: mpirun -n 8 python -m zero_mpi.train --help")
whatis("Name: zero-mpi")
whatis("Version: " .. version)
whatis("Description: Train transformers sharded over MPI ranks, exact to the last bit, into GGUF")
conflict("zero-mpi")
-- load("mpich")

prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)
