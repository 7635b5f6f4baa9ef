# Starts Redis with its configuration by stdin, so that the password is in no file and no argument list. Data get half of
# the pod's memory, for rewriting the append-only file may take as much again: beyond it a write is refused, where the
# kernel would end the whole server. The user's lines come last, so they win.
# The default user, of REDISCLI_AUTH, is the operator's; services have users of their own where they have passwords.
check() {
  case "$1" in
    "" | *[!A-Za-z0-9._~-]*)
      echo "redis.auth: the password must be letters, digits and -._~ alone, for it goes into a URL" >&2
      exit 2
      ;;
  esac
}
users() {
  while read -r kind rules; do
    password=$(printenv "REDIS_PASSWORD_$kind") || continue
    check "$password"
    digest=$(printf %s "$password" | sha256sum)
    printf 'user %s on #%s %s\n' "$kind" "${digest%% *}" "$rules"
  done </etc/redis/users
}
check "$REDISCLI_AUTH"
users=$(users) || exit 2
if [ -f /etc/flowfleet/tls/tls.crt ]; then cp /etc/flowfleet/tls/tls.crt /tmp/loaded.crt; fi
exec redis-server - <<END
$(cat /etc/redis/redis.conf)
requirepass $REDISCLI_AUTH
$users
maxmemory $((MEMORY_LIMIT_BYTES / 2))
$(cat /etc/redis/own.conf)
END
