#!/usr/bin/env bash
# Unpacks Debian's MPICH into a folder, like the MPICH of a site. Installs nothing, and does not need root.
#
#   tools/cluster/debian_mpich.sh FOLDER    unpacks it, and prints the variables to set, as VARIABLE=VALUE
#
# It represents any library with MPICH's ABI (Cray MPICH, MVAPICH) outside the wheel: mpi4py's wheel must open the
# site's libmpi.so.12. Debian calls this file libmpich.so.12, so the folder gets a link with the name libmpi.so.12.
set -euo pipefail

[[ $# = 1 ]] || { echo "debian_mpich.sh: expected: debian_mpich.sh FOLDER; got: $*" >&2; exit 2; }
command -v apt-get > /dev/null || { echo "debian_mpich.sh: apt-get is missing: this script needs Debian" >&2; exit 2; }
mkdir -p "$1"
folder=$(realpath "$1")
cd "$folder"

# The packages that apt-get would install: MPICH, and its dependencies that this machine lacks.
apt-get -s install --reinstall --no-install-recommends mpich libmpich12 | awk '/^Inst/ { print $2 }' > packages
grep -qx libmpich12 packages || { echo "debian_mpich.sh: no package libmpich12: apt-get update?" >&2; exit 1; }
xargs apt-get -qq download < packages 2> /dev/null
for package in *.deb; do
    dpkg -x "$package" root
done

libraries=$(dirname "$(echo root/usr/lib/*/libmpich.so.12)")
ln -sf libmpich.so.12 "$libraries/libmpi.so.12"
mkdir -p bin
ln -sf ../root/usr/bin/hydra_pmi_proxy bin/   # the launcher looks for it in its own folder
for name in mpiexec mpirun; do
    ln -sf ../root/usr/bin/mpiexec.hydra "bin/$name"
done
echo "LD_LIBRARY_PATH=$folder/$libraries"
echo "MPI4PY_LIBMPI=$folder/$libraries/libmpi.so.12"
echo "ZERO_MPI_MPIEXEC=$folder/bin/mpiexec"
