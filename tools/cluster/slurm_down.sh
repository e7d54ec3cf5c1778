#!/usr/bin/env bash
# Cancels the jobs of the Slurm of slurm_up.sh, then ends this Slurm, and nothing else.
#
#   tools/cluster/slurm_down.sh STATE    the folder that slurm_up.sh printed; it is removed if nothing else is in it
set -euo pipefail

[[ $# = 1 && -d $1 ]] || {
    echo "slurm_down.sh: expected the folder that slurm_up.sh printed, got: $*" >&2
    exit 2
}
state=$(realpath "$1")
export SLURM_CONF=$state/slurm.conf

hosts=$(cat "$state/over_hosts" 2> /dev/null) || hosts=""
[[ $hosts ]] && first=h1 || first=here

inside() {   # inside HOST COMMAND...: run in a host, which may be lost, or on this machine without hosts
    if [[ $hosts ]]; then timeout 20 "$hosts/enter" "$@"; else "${@:2}"; fi
}

daemon() {   # print the process id in file $3 if it still belongs to daemon $1 on host $2
    local pid
    pid=$(cat "$3" 2> /dev/null) || return
    [[ $(inside "$2" cat "/proc/$pid/comm" 2> /dev/null) = "$1" ]] && echo "$pid"
}

cancel_jobs() {   # before the daemons end, because they end the jobs
    inside $first squeue --noheader --format=%A | sort -u |
        while read -r job; do inside $first scancel "$job" < /dev/null; done || true
    for _ in {1..600}; do   # Slurm kills jobs after KillWait seconds; a busy machine may need longer
        [[ -n $(inside $first squeue --noheader) ]] || break
        sleep 0.1
    done
}

end_daemon() {
    local pid
    pid=$(daemon "$@") || return 0
    inside "$2" kill -TERM "$pid"
    for _ in {1..100}; do
        daemon "$@" > /dev/null || return 0
        sleep 0.1
    done
    inside "$2" kill -KILL "$pid" 2> /dev/null || true
}

if daemon slurmctld $first "$state/slurmctld.pid" > /dev/null; then cancel_jobs; fi
for file in "$state"/slurmd{,-*}.pid; do
    name=${file##*/slurmd-}
    end_daemon slurmd "${name%.pid}" "$file"
done
end_daemon slurmctld $first "$state/slurmctld.pid"
hosts=""   # munged runs outside the hosts
end_daemon munged here "$state/munged.pid"
cd "$state"
rm -rf saved spool
rm -f over_hosts {slurm,cgroup,gres}.conf munge.{key,seed,socket,socket.lock} {munged,slurmctld,slurmd,slurmd-*}.{pid,log}
cd /
rmdir --ignore-fail-on-non-empty "$state"
