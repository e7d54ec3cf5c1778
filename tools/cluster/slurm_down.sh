#!/usr/bin/env bash
# Ends the Slurm of slurm_up.sh, its jobs first, and nothing else.
#
#   tools/cluster/slurm_down.sh STATE    the folder that slurm_up.sh printed; it goes if nothing else is in it
set -euo pipefail

[[ $# = 1 && -d $1 ]] || {
    echo "slurm_down.sh: expected the folder that slurm_up.sh printed, got: $*" >&2
    exit 2
}
state=$(realpath "$1")
export SLURM_CONF=$state/slurm.conf

daemon() {   # the process of daemon $1: another may have the number in its file by now
    local pid
    pid=$(cat "$state/$1.pid" 2> /dev/null) || return
    [[ $(cat "/proc/$pid/comm" 2> /dev/null) = "$1" ]] && echo "$pid"
}

cancel_jobs() {   # while the daemons are there to end them
    squeue --noheader --format=%A | sort -u | xargs --no-run-if-empty scancel || true
    for _ in {1..600}; do   # Slurm kills after KillWait what does not end; a busy machine takes its time
        [[ -n $(squeue --noheader) ]] || break
        sleep 0.1
    done
}

end_daemon() {
    local pid
    pid=$(daemon "$1") || return 0
    kill -TERM "$pid"
    for _ in {1..100}; do
        daemon "$1" > /dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$pid" 2> /dev/null || true
}

if daemon slurmctld > /dev/null; then cancel_jobs; fi
for name in slurmd slurmctld munged; do end_daemon "$name"; done
cd "$state"
rm -rf saved spool
rm -f {slurm,cgroup,gres}.conf munge.{key,seed,socket,socket.lock} {munged,slurmctld,slurmd}.{pid,log}
cd /
rmdir --ignore-fail-on-non-empty "$state"
