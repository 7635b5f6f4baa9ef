# Starts a Sentinel. What it learned stays on the disk over restarts: who is the primary, since which epoch, and whom it
# voted for. All else is written at each start. An election without a result is held again after twice `failover-timeout`.
# It keeps the operator's password in that file, which only its user may read.
umask 077
. /etc/redis/client.sh
. /etc/redis/users.sh
check "$REDISCLI_AUTH"
users=$(users /etc/redis/sentinel-users) || exit 2
file=/data/sentinel.conf
learned='^sentinel (myid|monitor|current-epoch|config-epoch|leader-epoch|known-replica|known-sentinel) '
if grep -qE '^sentinel monitor ' "$file" 2>/dev/null; then
  learned=$(grep -E "$learned" "$file")
else
  found=$(primary)
  host=${found% *}
  learned="sentinel myid $(printf %s "$REDIS_SELF" | sha1sum | cut -c1-40)
sentinel monitor flowfleet ${host:-${REDIS_PEERS%% *}} 6379 2"
fi
if [ -f /etc/flowfleet/tls/tls.crt ]; then cp /etc/flowfleet/tls/tls.crt /tmp/loaded-26379.crt; fi
cat >"$file.new" <<END
$(cat /etc/redis/sentinel.conf)
requirepass $REDISCLI_AUTH
$users
sentinel announce-ip $REDIS_SELF
$learned
sentinel auth-pass flowfleet $REDISCLI_AUTH
sentinel down-after-milliseconds flowfleet ${DOWN_AFTER_SECONDS}000
sentinel failover-timeout flowfleet 10000
END
mv "$file.new" "$file"
exec redis-server "$file" --sentinel
