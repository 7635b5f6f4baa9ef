# `ask ARGUMENTS`: redis-cli, which reads the operator's password from REDISCLI_AUTH; a server that hangs fails it.
tls=
if [ -f /etc/flowfleet/tls/tls.crt ]; then
  tls="--tls --cacert /etc/flowfleet/tls/ca.crt --cert /etc/flowfleet/tls/tls.crt --key /etc/flowfleet/tls/tls.key"
fi
ask() {
  # shellcheck disable=SC2086
  timeout 4 redis-cli $tls "$@" 2>/dev/null
}
# Who is the primary, and how many Sentinels answered. The highest epoch counts: a Sentinel that was unreachable is behind.
primary() {
  for peer in $REDIS_PEERS; do
    ask -h "$peer" -p 26379 sentinel master flowfleet |
      awk 'NR % 2 { key = $0; next } { of[key] = $0 } END { if ("ip" in of) print of["config-epoch"], of["ip"] }'
  done | sort -n | awk '{ last = $2 } END { if (NR) print last, NR }'
}
