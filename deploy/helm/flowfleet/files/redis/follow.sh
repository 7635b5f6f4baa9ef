# Whom this Redis follows, as lines of its configuration. Waits until two Sentinels tell, for one alone may be behind.
# Where they name this one and its disk is empty, its data are lost, and its replicas would follow into emptiness: it
# waits until they are elected. Only where all others are empty as well is it the first start of all.
. /etc/redis/client.sh
all_empty() {
  for peer in $REDIS_PEERS; do
    [ "$peer" = "$REDIS_SELF" ] || [ "$(ask -h "$peer" dbsize)" = 0 ] || return 1
  done
}
has_data() { [ -e /data/appendonlydir ] || [ -e /data/appendonly.aof ]; }
said=
while true; do
  found=$(primary)
  host=${found% *} answers=${found##* }
  if [ "${answers:-0}" -lt 2 ]; then
    why="waits for two Sentinels"
  elif [ "$host" != "$REDIS_SELF" ] || has_data || all_empty; then
    break
  else
    why="is the primary and its disk is empty: waits until another one is elected, or all others are empty"
  fi
  if [ "$why" != "$said" ]; then echo "$REDIS_SELF $why" >&2; fi
  said=$why
  sleep 1
done
echo "masterauth $REDISCLI_AUTH"
echo "replica-announce-ip $REDIS_SELF"
if [ "$host" != "$REDIS_SELF" ]; then
  echo "replicaof $host 6379"
  echo "replica-priority 0" # may not be elected before it has what its primary has: probe.sh
fi
