check() {
  case "$1" in
    "" | *[!A-Za-z0-9._~-]*)
      echo "redis.auth: the password must be letters, digits and -._~ alone, for it goes into a URL" >&2
      exit 2
      ;;
  esac
}
# Lines of a configuration for the users of a file: a kind of service and its rights a line.
users() {
  while read -r kind rules; do
    password=$(printenv "REDIS_PASSWORD_$kind") || continue
    check "$password"
    digest=$(printf %s "$password" | sha256sum)
    printf 'user %s on #%s %s\n' "$kind" "${digest%% *}" "$rules"
  done <"$1"
}
