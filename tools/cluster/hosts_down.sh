#!/usr/bin/env bash
# Ends the hosts of hosts_up.sh and all processes in them, and nothing else.
#
#   tools/cluster/hosts_down.sh STATE     the folder that hosts_up.sh printed; it is removed if nothing else is in it
set -euo pipefail
shopt -s nullglob

[[ $# = 1 && -d $1 ]] || {
    echo "hosts_down.sh: expected the folder that hosts_up.sh printed, got: $*" >&2
    exit 2
}

begun() {   # print when a process started, because another process may have its id by now
    sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20
}

state=$(realpath "$1")
cd "$state"
for file in *.pid; do
    read -r pid since < "$file" || continue
    if [[ $(begun "$pid") = "$since" ]]; then kill -KILL "$pid" || true; fi
done
for file in *.pid; do
    read -r pid since < "$file" || continue
    for _ in {1..500}; do
        [[ $(begun "$pid") = "$since" ]] || break
        sleep 0.02
    done
done
rm -f ./*.pid h[0-9]*.log host_key host_key.pub user_key user_key.pub sshd_config ssh enter hosts
# Mount points, which are empty outside the hosts.
[[ ! -d kept ]] || find kept -depth -type d -exec rmdir --ignore-fail-on-non-empty {} +
cd /
rmdir --ignore-fail-on-non-empty "$state"
