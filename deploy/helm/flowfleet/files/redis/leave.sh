# Before a primary ends: writes pause until every replica has them all, then another one is elected. Nothing is lost.
. /etc/redis/client.sh
[ "$(ask role | head -n 1)" = master ] || exit 0
ask info replication | grep -q 'state=online' || exit 0
ask client pause 30000 write
for _ in $(seq 50); do
  ask info replication | tr -d '\r' | awk -F '[=,:]' '
    /^slave[0-9]/ { for (i = 1; i < NF; i++) if ($i == "offset") of[$0] = $(i + 1) }
    /^master_repl_offset/ { at = $2 }
    END { for (replica in of) if (of[replica] < at) exit 1 }' && break
  sleep 0.1
done
# Whether a Sentinel elects by itself: a primary whose writes pause seems down after a while.
elects() {
  for peer in $REDIS_PEERS; do
    ask -h "$peer" -p 26379 sentinel master flowfleet | grep -q failover_in_progress && return
  done
  return 1
}
begun='' end=$(($(date +%s) + 25))
while [ "$(date +%s)" -lt "$end" ]; do
  ask client pause 30000 write # no election begins after the pause: a round takes that long at most
  found=$(primary)
  host=${found% *}
  if [ -n "$host" ] && [ "$host" != "$REDIS_SELF" ]; then
    ask replicaof "$host" 6379
    ask client kill type normal # what waits for the end of the pause goes to the new one
    exit 0
  fi
  # Asked again until one begins: a Sentinel learns within ten seconds only that a replica may be elected.
  if [ -z "$begun" ] && ! elects; then
    for peer in $REDIS_PEERS; do
      if [ "$peer" = "$REDIS_SELF" ]; then continue; fi
      if [ "$(ask -h "$peer" -p 26379 sentinel failover flowfleet)" = OK ]; then begun=1 && break; fi
    done
  fi
  sleep 0.2
done
ask eval_ro 'redis.log(redis.LOG_WARNING, ARGV[1])' 0 "Leaves as the primary: no other one was elected"
exit 1
