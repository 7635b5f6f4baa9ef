# For operators: sh /etc/redis/ask.sh info replication
. /etc/redis/client.sh
ask "$@"
