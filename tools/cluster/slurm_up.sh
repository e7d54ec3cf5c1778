#!/usr/bin/env bash
# Starts a private Slurm with a private munge on this machine, for batch jobs.
#
#   tools/cluster/slurm_up.sh [CPUS] [STATE]    starts it (CPUS: 8) and prints the folder STATE
#   tools/cluster/slurm_down.sh STATE           cancels the jobs in it and ends it
#   export SLURM_CONF=STATE/slurm.conf          lets sbatch, squeue and scontrol find it
#
# It has one node of CPUS processors; Slurm does not check how many the machine has. If HOSTS_STATE names the
# folder of hosts_up.sh, each of its hosts is a node: Slurm's commands run inside the hosts, its controller runs
# in h1, and Slurm notices a lost host after ten seconds. Jobs of partition "urgent" preempt jobs of partition
# "all", which are warned a minute before. The script writes nothing outside STATE and uses no system service.
# It needs root and
#   apt-get install -y --no-install-recommends slurm-wlm munge
# and libpmix-dev for srun --mpi=pmix, whose plugin opens a library by a name that only this package has.
set -euo pipefail

here=$(dirname "$(realpath "$0")")
hosts=${HOSTS_STATE:-}
export PATH=$PATH:/usr/sbin:/sbin

refuse() {
    echo "slurm_up.sh: $1" >&2
    exit 2
}

inside() {   # inside HOST COMMAND...: run a command in a host, or on this machine without hosts
    if [[ $hosts ]]; then "$hosts/enter" "$@"; else "${@:2}"; fi
}

name_nodes() {   # set the names of the nodes, and slurm.conf's lines with their addresses
    nodes=$(hostname -s) first=$nodes address=127.0.0.1 lines="NodeName=$nodes NodeAddr=127.0.0.1"
    [[ $hosts ]] || return 0
    nodes= lines= first=h1
    local name ip
    while read -r ip name; do
        [[ $name != localhost ]] || continue
        nodes+=${nodes:+,}$name
        lines+=${lines:+$'\n'}"NodeName=$name NodeAddr=$ip"
        [[ $name != h1 ]] || address=$ip
    done < "$hosts/hosts"
}

free_port() {   # print an unused loopback port, at least $1; systems give clients only higher ports
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
    [[ $(id -u) = 0 ]] || refuse "needs root, to run jobs for other users"
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" > /dev/null ||
            refuse "$program is missing: apt-get install --no-install-recommends slurm-wlm munge"
    done
    state=$(realpath -m "${2:-$(mktemp -d /var/tmp/zero_mpi-slurm.XXXXXX)}")
    [[ ! $hosts || -x $hosts/enter ]] || refuse "HOSTS_STATE=$hosts: expected the folder of hosts_up.sh"
    [[ ! -e $state/slurm.conf ]] || refuse "$state: a Slurm is running in it; end it by slurm_down.sh"
}

write_files() {
    local of_node="" timeout=300
    [[ ! $hosts ]] || of_node=-%n timeout=10
    name_nodes
    mkdir -p "$state"/{saved,spool}
    [[ ! $hosts ]] || echo "$hosts" > "$state/over_hosts"
    chmod 755 "$state"   # munge requires that all users can reach its socket
    (umask 077 && head -c 1024 /dev/urandom > "$state/munge.key")
    # cred_expire: a requeued job waits this long (default: two minutes). config_overrides: do not check CPUS.
    # FirstJobId is random: MPICH names shared memory by job id, and a killed job's memory would be in the way.
    cat > "$state/slurm.conf" <<END
ClusterName=zero_mpi
SlurmctldHost=$first($address)
SlurmctldPort=$(free_port 10000)
SlurmdPort=$(free_port 13000)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket,cred_expire=10
StateSaveLocation=$state/saved
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd$of_node.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd$of_node.log
SlurmdTimeout=$timeout
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
NodeName=DEFAULT CPUs=$cpus Gres=gpu:1 State=UNKNOWN
$lines
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=$nodes Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=urgent Nodes=$nodes PriorityTier=2 State=UP
END
    echo "CgroupAutomount=no" > "$state/cgroup.conf"
    # A fake GPU, so that Slurm accepts jobs that ask for one.
    echo "Name=gpu File=/dev/null" > "$state/gres.conf"
}

start() {
    munged --key-file="$state/munge.key" --socket="$state/munge.socket" --pid-file="$state/munged.pid" \
        --log-file="$state/munged.log" --seed-file="$state/munge.seed"
    export SLURM_CONF=$state/slurm.conf
    inside "$first" slurmctld
    for name in ${nodes//,/ }; do inside "$name" slurmd; done
}

is_idle() {
    for _ in {1..300}; do
        [[ $(inside "$first" sinfo --noheader --format=%T --partition=all 2> /dev/null) = idle ]] && return
        sleep 0.1
    done
    return 1
}

say_why() {   # print what Slurm and its daemons report, because the node is not idle
    echo "slurm_up.sh: the node is not ready: $(inside "$first" sinfo --noheader --format='%T %E' 2>&1)"
    tail -n 5 "$state"/{munged,slurmctld,slurmd*}.log
} >&2

read_arguments "$@"
trap '"$here/slurm_down.sh" "$state"' EXIT
for attempt in 1 2 3; do   # another process may take a port before the start; then retry with other ports
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
