# Starts Redis with its configuration by stdin, so that the password is in no file and no argument list. Data get half of
# the pod's memory, for rewriting the append-only file may take as much again: beyond it a write is refused, where the
# kernel would end the whole server. The user's lines come last, so they win.
# The default user, of REDISCLI_AUTH, is the operator's; services have users of their own where they have passwords.
. /etc/redis/users.sh
check "$REDISCLI_AUTH"
users=$(users /etc/redis/users) || exit 2
if [ -f /etc/flowfleet/tls/tls.crt ]; then cp /etc/flowfleet/tls/tls.crt /tmp/loaded-6379.crt; fi
peers=
if [ -n "$REDIS_PEERS" ]; then peers=$(sh /etc/redis/follow.sh) || exit 1; fi
exec redis-server - <<END
$(cat /etc/redis/redis.conf)
requirepass $REDISCLI_AUTH
$users
$peers
maxmemory $((MEMORY_LIMIT_BYTES / 2))
$(cat /etc/redis/own.conf)
END
