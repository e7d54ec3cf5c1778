#!/usr/bin/env bash
# A Slurm of its own on this machine, with its own munge, to run batch jobs on.
#
#   tools/cluster/slurm_up.sh [CPUS] [STATE]    starts it (CPUS: 8) and prints the folder STATE
#   tools/cluster/slurm_down.sh STATE           cancels the jobs in it and ends it
#   export SLURM_CONF=STATE/slurm.conf          what sbatch, squeue and scontrol need to find it
#
# One node of CPUS processors, however many the machine has: Slurm takes the number on trust. Jobs of the
# partition "urgent" preempt those of the other one, which are told a minute before. Nothing is written outside
# of STATE and no service of the system is used. Needs root and
#   apt-get install -y --no-install-recommends slurm-wlm munge
# and libpmix-dev for srun --mpi=pmix, whose plugin opens the library by a name that only this package has.
set -euo pipefail

here=$(dirname "$(realpath "$0")")
node=$(hostname -s)
export PATH=$PATH:/usr/sbin:/sbin

refuse() {
    echo "slurm_up.sh: $1" >&2
    exit 2
}

free_port() {   # a port of the loopback that nobody listens on, from $1: below those that systems give to clients
    local port
    while port=$((RANDOM % 3000 + $1)); do
        (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null || break
    done
    echo "$port"
}

read_arguments() {
    [[ $# -le 2 && ${1:-8} =~ ^[1-9][0-9]{0,3}$ ]] ||
        refuse "expected: slurm_up.sh [CPUS] [STATE], CPUS from 1 to 9999; got: $*"
    cpus=${1:-8}
    [[ $(id -u) = 0 ]] || refuse "only root may run jobs for others"
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" > /dev/null ||
            refuse "$program is missing: apt-get install --no-install-recommends slurm-wlm munge"
    done
    state=$(realpath -m "${2:-$(mktemp -d /var/tmp/zero_mpi-slurm.XXXXXX)}")
    [[ ! -e $state/slurm.conf ]] || refuse "$state: has a Slurm already; end it by slurm_down.sh"
}

write_files() {
    mkdir -p "$state"/{saved,spool}
    chmod 755 "$state"   # munge wants everybody to reach its socket
    (umask 077 && head -c 1024 /dev/urandom > "$state/munge.key")
    # cred_expire: as long waits a requeued job, two minutes otherwise. config_overrides: take CPUS on trust.
    # FirstJobId: MPICH names memory after the job; what a killed one left would be in the way of its namesake.
    cat > "$state/slurm.conf" <<END
ClusterName=zero_mpi
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$(free_port 10000)
SlurmdPort=$(free_port 13000)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket,cred_expire=10
StateSaveLocation=$state/saved
SlurmdSpoolDir=$state/spool
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=pmi2
GresTypes=gpu
JobRequeue=1
FirstJobId=$((RANDOM * 100 + 1))
KillWait=5
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SlurmdParameters=config_overrides
NodeName=$node NodeAddr=127.0.0.1 CPUs=$cpus Gres=gpu:1 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=$node Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=urgent Nodes=$node PriorityTier=2 State=UP
END
    echo "CgroupAutomount=no" > "$state/cgroup.conf"
    # Pretended, so that a job that asks for a GPU is taken.
    echo "Name=gpu File=/dev/null" > "$state/gres.conf"
}

start() {
    munged --key-file="$state/munge.key" --socket="$state/munge.socket" --pid-file="$state/munged.pid" \
        --log-file="$state/munged.log" --seed-file="$state/munge.seed"
    export SLURM_CONF=$state/slurm.conf
    slurmctld
    slurmd
}

is_idle() {
    for _ in {1..300}; do
        [[ $(sinfo --noheader --format=%T 2> /dev/null) = idle ]] && return
        sleep 0.1
    done
    return 1
}

say_why() {   # the node is not idle: what Slurm and its daemons say
    echo "slurm_up.sh: the node is not ready: $(sinfo --noheader --format='%T %E' 2>&1)"
    tail -n 5 "$state"/{munged,slurmctld,slurmd}.log
} >&2

read_arguments "$@"
trap '"$here/slurm_down.sh" "$state"' EXIT
for attempt in 1 2 3; do   # a port may be taken between the look and the start: then once more with others
    write_files
    start
    if is_idle; then
        trap - EXIT
        echo "$state"
        exit
    fi
    say_why
    ((attempt == 3)) || "$here/slurm_down.sh" "$state"
done
exit 1
