# Starts Redis with its configuration by stdin, so that the password is in no file and no argument list. Data get half of
# the pod's memory, for rewriting the append-only file may take as much again: beyond it a write is refused, where the
# kernel would end the whole server. The user's lines come last, so they win.
case "$REDISCLI_AUTH" in
  "" | *[!A-Za-z0-9._~-]*)
    echo "redis.auth: the password must be letters, digits and -._~ alone, for it goes into a URL" >&2
    exit 2
    ;;
esac
if [ -f /etc/flowfleet/tls/tls.crt ]; then cp /etc/flowfleet/tls/tls.crt /tmp/loaded.crt; fi
exec redis-server - <<END
$(cat /etc/redis/redis.conf)
requirepass $REDISCLI_AUTH
maxmemory $((MEMORY_LIMIT_BYTES / 2))
$(cat /etc/redis/own.conf)
END
