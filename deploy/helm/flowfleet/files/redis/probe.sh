# Answers with its data loaded. `probe.sh ready`: and is the primary, or follows it, and may be elected from then on. A
# renewed certificate is loaded on the way. `probe.sh sentinel`: the Sentinels reach each other and could elect a primary.
. /etc/redis/client.sh
if [ "$1" = sentinel ]; then
  ask -p 26379 sentinel ckquorum flowfleet | grep -q '^OK'
  exit
fi
if [ -f /tmp/loaded-6379.crt ] && ! cmp -s /tmp/loaded-6379.crt /etc/flowfleet/tls/tls.crt; then
  cp /etc/flowfleet/tls/tls.crt /tmp/new.crt
  ask config set tls-cert-file /etc/flowfleet/tls/tls.crt && mv /tmp/new.crt /tmp/loaded-6379.crt
fi
[ "$(ask ping)" = PONG ] || exit 1
if [ "$1" = ready ]; then
  ask info replication | grep -qE '^(role:master|master_link_status:up)' && ask config set replica-priority 100
fi
