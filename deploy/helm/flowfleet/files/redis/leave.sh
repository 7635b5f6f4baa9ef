# Before a primary ends: writes pause until every replica has them all, then another one is elected. Nothing is lost.
. /etc/redis/client.sh
[ "$(ask role | head -n 1)" = master ] || exit 0
ask info replication | grep -q 'state=online' || exit 0
ask client pause 20000 write
for _ in $(seq 50); do
  ask info replication | tr -d '\r' | awk -F '[=,:]' '
    /^slave[0-9]/ { for (i = 1; i < NF; i++) if ($i == "offset") of[$0] = $(i + 1) }
    /^master_repl_offset/ { at = $2 }
    END { for (replica in of) if (of[replica] < at) exit 1 }' && break
  sleep 0.1
done
begun=
for _ in $(seq 75); do
  found=$(primary)
  host=${found% *}
  if [ -n "$host" ] && [ "$host" != "$REDIS_SELF" ]; then
    ask replicaof "$host" 6379
    ask client kill type normal # what waits for the end of the pause goes to the new one
    exit 0
  fi
  # Asked again until one begins: a Sentinel learns within ten seconds only that a replica may be elected.
  for peer in $REDIS_PEERS; do
    if [ -z "$begun" ] && [ "$peer" != "$REDIS_SELF" ]; then
      if [ "$(ask -h "$peer" -p 26379 sentinel failover flowfleet)" = OK ]; then begun=1; fi
    fi
  done
  sleep 0.2
done
ask client unpause
echo "$REDIS_SELF leaves as the primary: no other one was elected" >&2
exit 1
