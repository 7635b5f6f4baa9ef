#!/usr/bin/env bash
# Wall time of tiny jobs on this machine's CPUs, by the controller's clock. Nothing else should run meanwhile.
#
#     bench/sides.sh [STEPS] [JOBS]             jobs one after the other, then side by side in one stack
#     bench/sides.sh --against CLONE [STEPS]    one job in a clone of another commit and here, twice, in turns
#
# Jobs are `tiny_ocr` with other seeds; each line is of a stack of its own, as `flowfleet up` starts it.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
export FLOWFLEET_API_KEY=bench-side-by-side FLOWFLEET_DEVICE=cpu

flowfleet() { (cd "$clone" && PYTHONPATH=$clone python -m flowfleet.cli.main "$@"); }

spans='
import datetime, json, sys
jobs = json.load(sys.stdin)
if bad := [job["reason"] for job in jobs if job["status"] in ("failed", "cancelled")]:
    sys.exit(bad)
if not all(job["ended_at"] for job in jobs):
    sys.exit(2)
first, last = ([datetime.datetime.fromisoformat(job[key]) for job in jobs] for key in ("created_at", "ended_at"))
print(round((max(last) - min(first)).total_seconds(), 1))'

# timed WHAT CLONE COMMAND…: seconds from the first submit to the last end
timed() {
    local what=$1 times code
    clone=$2
    state=$(mktemp -d)
    trap 'flowfleet down --state-dir "$state" >>"$state.log"; cat "$state.log"' EXIT
    flowfleet up --detach --port 0 --model recipes/tiny/model --state-dir "$state" >"$state.log" 2>&1
    FLOWFLEET_URL=$(sed -n 's/^ *"url": "\(.*\)",$/\1/p' "$state/stack.json")
    export FLOWFLEET_URL
    flowfleet "${@:3}" >>"$state.log"
    while true; do
        code=0
        times=$(flowfleet jobs --json | python -c "$spans") || code=$?
        [ $code = 2 ] || break
        sleep 5
    done
    [ $code = 0 ]
    trap - EXIT
    flowfleet down --state-dir "$state" >>"$state.log"
    echo "$what: $times s, load $(cut -d' ' -f1 /proc/loadavg), $(git -C "$clone" rev-parse --short HEAD)"
    rm -r "$state" "$state.log"
}

if [ "${1:-}" = --against ]; then
    there=$(cd "$2" && pwd)
    for clone in "$there" "$here" "$here" "$there"; do
        timed "one job in $clone" "$clone" submit tiny_ocr --set "schedule.steps=${3:-20}"
    done
else
    sweep=(sweep tiny_ocr --set "seed=1..${2:-6}" --set "schedule.steps=${1:-20}" --name sides)
    timed "one after the other" "$here" "${sweep[@]}" --at-once 1
    timed "side by side" "$here" "${sweep[@]}"
fi
