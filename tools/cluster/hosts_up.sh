#!/usr/bin/env bash
# Makes several simulated hosts on one Linux machine, for jobs on many nodes.
#
#   tools/cluster/hosts_up.sh COUNT [RATE|none] [STATE]   makes h1 ... hCOUNT and prints the folder STATE
#   tools/cluster/hosts_down.sh STATE                     ends them
#   STATE/enter h1 COMMAND...                             runs a command inside a host
#   STATE/ssh                                             ssh program for an MPI launcher
#
# A host is a process (its sshd) in namespaces of its own: network, name, System V memory, mounts, processes.
# Each host has its own /tmp and /dev/shm, so that two hosts have no memory in common. All hosts share the rest of
# the file system, as over NFS, and also this project and the folders of HOSTS_SHARE (a:b) if they are under /tmp.
# A bridge in a separate network namespace joins the hosts' links, so the machine's own network does not change.
# RATE (1gbit) limits each link in both directions by a token bucket. Needs root, Linux, openssh-server, iproute2 and util-linux.
set -euo pipefail

here=$(dirname "$(realpath "$0")")
needed=(/usr/sbin/sshd ssh-keygen ip tc unshare nsenter)

refuse() {
    echo "hosts_up.sh: $1" >&2
    exit 2
}

begun() {   # print when a process started, in clock ticks, because a later process may get the same id
    sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20
}

note() {   # note NAME PID: record a process that hosts_down.sh must end
    echo "$2 $(begun "$2")" > "$state/$1.pid"
}

first_child() {   # print the first child of process $1, which is about to fork
    local children=()
    for _ in {1..200}; do
        read -ra children < "/proc/$1/task/$1/children" 2>/dev/null || true   # no newline: read fails
        ((${#children[@]} == 0)) || break
        sleep 0.02
    done
    echo "${children[0]:?process $1 has no child}"
}

read_arguments() {
    [[ $# -ge 1 && $# -le 3 && $1 =~ ^[1-9][0-9]{0,2}$ && $1 -le 250 ]] ||
        refuse "expected: hosts_up.sh COUNT [RATE|none] [STATE], COUNT from 1 to 250; got: $*"
    count=$1 rate=${2:-none}
    [[ $(id -u) = 0 ]] || refuse "needs root, to make namespaces"
    for program in "${needed[@]}"; do
        command -v "$program" > /dev/null ||
            refuse "$program is missing: apt-get install openssh-server iproute2 util-linux"
    done
    state=$(realpath -m "${3:-$(mktemp -d /var/tmp/zero_mpi-hosts.XXXXXX)}")
    case $state/ in
        /tmp/* | /dev/shm/*) refuse "$state: the hosts have private /tmp and /dev/shm; choose another folder" ;;
    esac
    ! compgen -G "$state/*.pid" > /dev/null || refuse "$state: hosts are running in it; end them by hosts_down.sh"
    mkdir -p "$state" /run/sshd
}

write_files() {
    ssh-keygen -q -t ed25519 -N '' -f "$state/host_key"
    ssh-keygen -q -t ed25519 -N '' -f "$state/user_key"
    cat > "$state/sshd_config" <<END
HostKey $state/host_key
AuthorizedKeysFile $state/user_key.pub
PasswordAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
END
    cat > "$state/ssh" <<END
#!/usr/bin/env bash
exec ssh -F none -i "$state/user_key" -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \\
    -o LogLevel=ERROR "\$@"
END
    cat > "$state/enter" <<END
#!/usr/bin/env bash
# enter HOST COMMAND...: run a command inside a host, in the current folder
read -r pid _ < "$state/\$1.pid" || exit 1
exec nsenter --target "\$pid" --net --uts --ipc --pid --mount --wd="\$PWD" -- "\${@:2}"
END
    chmod +x "$state/ssh" "$state/enter"
    echo "127.0.0.1 localhost" > "$state/hosts"
    for ((i = 1; i <= count; i++)); do echo "10.77.0.$i h$i" >> "$state/hosts"; done
}

make_bridge() {
    unshare --net --fork sleep infinity < /dev/null > /dev/null 2>&1 &
    bridge=$(first_child $!)
    note bridge "$bridge"
    nsenter --target "$bridge" --net ip link add br0 type bridge
    nsenter --target "$bridge" --net ip link set br0 addrgenmode none up   # no IPv6: its solicitations go to every host
}

make_host() {   # make_host NAME NUMBER
    local inside host folder before="" after="" number=0
    local -a shared
    IFS=: read -ra shared <<< "${HOSTS_SHARE:-}"
    for folder in "$(realpath "$here/../..")" "${shared[@]}"; do
        [[ $folder == /tmp/* && -d $folder ]] || continue
        before+="mkdir -p '$state/kept/$number' && mount --bind '$folder' '$state/kept/$number' && "
        after+="mkdir -p '$folder' && mount --bind '$state/kept/$number' '$folder' && "
        number=$((number + 1))
    done
    # A user's ~/.bashrc may take long and print to every rank's stderr.
    [[ -f ~/.bashrc ]] && before+="mount --bind /dev/null ~/.bashrc && "
    # sshd is the first process of its process namespace: when it ends, all processes of the host end.
    inside="hostname $1 && mount --bind '$state/hosts' /etc/hosts && mount -t tmpfs none /dev/shm &&
        $before mount -t tmpfs none /tmp && $after ip link set lo up && exec /usr/sbin/sshd -D -e -f '$state/sshd_config'"
    unshare --net --uts --ipc --mount --pid --fork --mount-proc bash -c "$inside" \
        < /dev/null > "$state/$1.log" 2>&1 &
    host=$(first_child $!)
    note "$1" "$host"
    nsenter --target "$bridge" --net ip link add "to-$1" type veth peer name eth0 netns "$host"
    nsenter --target "$bridge" --net ip link set "to-$1" master br0 addrgenmode none up
    nsenter --target "$host" --net ip addr add "10.77.0.$2/24" dev eth0
    nsenter --target "$host" --net ip link set eth0 addrgenmode none up
    [[ $rate != none ]] || return 0
    # An idle link may later send `burst` bytes at once. This must be small, but hold TCP's large segments: the kernel
    # would cut larger ones into packets, which takes as long as the computation. Use HOSTS_BURST=32kb for slow links,
    # where a message has about 256 KB. The queue holds 50 ms of 1 Gbit/s at any rate: a full queue drops packets, and
    # TCP may then wait 0.2 s.
    local burst=${HOSTS_BURST:-256kb} limit=6500kb
    nsenter --target "$host" --net tc qdisc add dev eth0 root tbf rate "$rate" burst $burst limit $limit
    nsenter --target "$bridge" --net tc qdisc add dev "to-$1" root tbf rate "$rate" burst $burst limit $limit
}

wait_for_sshd() {
    for _ in {1..200}; do
        "$state/enter" "$1" bash -c ': < /dev/tcp/127.0.0.1/22' 2> /dev/null && return
        sleep 0.05
    done
    echo "hosts_up.sh: no sshd in $1: $(tail -n 1 "$state/$1.log")" >&2
    return 1
}

read_arguments "$@"
trap '"$here/hosts_down.sh" "$state"' EXIT
write_files
make_bridge
for ((i = 1; i <= count; i++)); do make_host "h$i" "$i"; done
for ((i = 1; i <= count; i++)); do wait_for_sshd "h$i"; done
trap - EXIT
echo "$state"
